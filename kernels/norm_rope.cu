// RMSNorm and rotary embedding of q and k, each element read once and written once, with or without the slot write.
//
// A row is cut into units of 2 * kPairs elements; `lanes` threads take a head, so a warp takes 32 / lanes heads a step,
// and threadIdx.y warps take the steps of a row in turn. With kHeld a thread first reads all its units, up to kHeld,
// into registers, where they stay until the sum over the row is known. Since every step of a thread is at the same
// place within its head, cos and sin are read once a thread.
#include "device.cuh"

namespace bc {
namespace {

using Part = NormRopeArgs::Part;

constexpr int kMostHeld = 3, kThreads = 128;  // measured on an H200: 3 is faster than 4 and 6, 128 than 64 and 256

template <int kN>
__device__ __forceinline__ void load_floats(const void* base, Float kind, int64_t at, float* to) {
  const auto load = [&](auto zero) {
    using W = decltype(zero);
    const Pack<W, kN> x = *reinterpret_cast<const Pack<W, kN>*>(static_cast<const W*>(base) + at);
#pragma unroll
    for (int i = 0; i < kN; ++i) to[i] = to_float(x.x[i]);
  };
  if (kind == Float::f32) return load(0.f);
  if (kind == Float::f16) return load(__half());
  load(__nv_bfloat16());
}

// kPairs pairs (first, second) that rotate together. Interleaved pairs are neighbours; half-split ones lie head_dim / 2
// apart. With one pair a unit, an odd head_dim (never rotated) has a last unit without its second.
template <int kPairs>
struct Floats {
  float first[kPairs], second[kPairs];

  __device__ float squares() const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) sum += first[i] * first[i] + second[i] * second[i];
    return sum;
  }
};

template <typename T, int kPairs>
struct Unit {
  Pack<T, kPairs> low, high;  // as they lie in memory

  __device__ __forceinline__ void load(const T* head, int u, const NormRopeArgs& a) {
    if constexpr (kPairs == 1) {
      const int other = a.interleaved ? 2 * u + 1 : u + a.head_dim / 2;
      low.x[0] = head[a.interleaved ? 2 * u : u];
      high.x[0] = other < a.head_dim ? head[other] : from_float<T>(0.f);
    } else if (a.interleaved) {
      const Pack<T, 2 * kPairs> both = reinterpret_cast<const Pack<T, 2 * kPairs>*>(head)[u];
#pragma unroll
      for (int i = 0; i < kPairs; ++i) low.x[i] = both.x[i], high.x[i] = both.x[kPairs + i];
    } else {
      low = reinterpret_cast<const Pack<T, kPairs>*>(head)[u];
      high = reinterpret_cast<const Pack<T, kPairs>*>(head + a.head_dim / 2)[u];
    }
  }

  __device__ __forceinline__ void store(T* head, int u, const NormRopeArgs& a) const {
    if constexpr (kPairs == 1) {
      const int other = a.interleaved ? 2 * u + 1 : u + a.head_dim / 2;
      head[a.interleaved ? 2 * u : u] = low.x[0];
      if (other < a.head_dim) head[other] = high.x[0];
    } else if (a.interleaved) {
      Pack<T, 2 * kPairs> both;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) both.x[i] = low.x[i], both.x[kPairs + i] = high.x[i];
      reinterpret_cast<Pack<T, 2 * kPairs>*>(head)[u] = both;
    } else {
      reinterpret_cast<Pack<T, kPairs>*>(head)[u] = low;
      reinterpret_cast<Pack<T, kPairs>*>(head + a.head_dim / 2)[u] = high;
    }
  }

  // Which of low and high an element of a pair lies in: interleaved units are 2 * kPairs neighbours.
  __device__ __forceinline__ Floats<kPairs> floats(bool interleaved) const {
    Floats<kPairs> y;
    if (interleaved && kPairs > 1) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const int at = 2 * i % kPairs;
        y.first[i] = to_float(2 * i < kPairs ? low.x[at] : high.x[at]);
        y.second[i] = to_float(2 * i < kPairs ? low.x[at + 1] : high.x[at + 1]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) y.first[i] = to_float(low.x[i]), y.second[i] = to_float(high.x[i]);
    }
    return y;
  }

  __device__ __forceinline__ void set(const Floats<kPairs>& y, bool interleaved) {
    if (interleaved && kPairs > 1) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const int at = 2 * i % kPairs;
        (2 * i < kPairs ? low : high).x[at] = from_float<T>(y.first[i]);
        (2 * i < kPairs ? low : high).x[at + 1] = from_float<T>(y.second[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) low.x[i] = from_float<T>(y.first[i]), high.x[i] = from_float<T>(y.second[i]);
    }
  }
};

template <int kPairs>
__device__ __forceinline__ void load_weight(const Part& p, const NormRopeArgs& a, int head, int u, Floats<kPairs>& w) {
  const int64_t at = p.over_all_heads ? static_cast<int64_t>(head) * a.head_dim : 0;
  if constexpr (kPairs == 1) {
    const int other = a.interleaved ? 2 * u + 1 : u + a.head_dim / 2;
    load_floats<1>(p.weight, p.weight_kind, at + (a.interleaved ? 2 * u : u), w.first);
    if (other < a.head_dim) load_floats<1>(p.weight, p.weight_kind, at + other, w.second);
  } else if (a.interleaved) {
    float both[2 * kPairs];
    load_floats<2 * kPairs>(p.weight, p.weight_kind, at + 2 * kPairs * u, both);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) w.first[i] = both[2 * i], w.second[i] = both[2 * i + 1];
  } else {
    load_floats<kPairs>(p.weight, p.weight_kind, at + kPairs * u, w.first);
    load_floats<kPairs>(p.weight, p.weight_kind, at + a.head_dim / 2 + kPairs * u, w.second);
  }
}

template <int kPairs>
struct Angles {
  float cos[kPairs], sin[kPairs];

  __device__ __forceinline__ void load(const NormRopeArgs& a, int64_t row, int u) {
    const int64_t at = row * (a.head_dim / 2) + kPairs * u;
    load_floats<kPairs>(a.cos, Float::f32, at, cos);
    load_floats<kPairs>(a.sin, Float::f32, at, sin);
  }
  __device__ __forceinline__ void turn(Floats<kPairs>& x) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float f = x.first[i], s = x.second[i];
      x.first[i] = f * cos[i] - s * sin[i];
      x.second[i] = f * sin[i] + s * cos[i];
    }
  }
};

// The sum over the `warps` warps (threadIdx.y) of one row (threadIdx.z).
__device__ __forceinline__ float row_sum(float x) {
  __shared__ float sums[32];
  const int warps = blockDim.y, mine = threadIdx.z * warps;
#pragma unroll
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  if (warps == 1) return x;
  if (threadIdx.x == 0) sums[mine + threadIdx.y] = x;
  __syncthreads();
  x = 0;
  for (int w = 0; w < warps; ++w) x += sums[mine + w];
  return x;
}

// blockIdx.y: a row of q (0), k (1) or v (2). kHeld 0: a row too long for the registers, read twice.
template <typename T, int kPairs, int kHeld>
__global__ void __launch_bounds__(kHeld ? 512 : 1024) norm_rope_kernel(const NormRopeArgs a, const int lanes) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.z + threadIdx.z;
  const int which = blockIdx.y;
  const Part& p = which == 0 ? a.q : a.k;
  if (blockIdx.x == 0 && which == 0 && a.totals.totals) {
    const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * 32 + threadIdx.x;
    write_totals(a.totals, a.entries.num_tokens, thread, 32 * blockDim.y * blockDim.z);
  }
  bool live = row < a.rows;
  char* to[2] = {nullptr, nullptr};
  int64_t to_head = a.pool.head;
  if (which == 0 || !a.pool.data) {
    to[0] = p.out.data + row * p.out.row;
    to_head = p.out.head;
  } else {
    live = live && row < a.entries.num_tokens && row < a.entries.count;
    const int first = live ? a.entries.dst[row] : -1, second = live && a.entries.dst2 ? a.entries.dst2[row] : -1;
    if (first >= 0) to[0] = slot_address(a.pool, first, which - 1);
    if (second >= 0) to[1] = slot_address(a.pool, second, which - 1);
    live = first >= 0 || second >= 0;
  }
  const Rows& in = which == 2 ? a.v : p.in;
  const char* const from = in.data + row * in.row;
  const int units = kPairs == 1 ? (a.head_dim + 1) / 2 : a.head_dim / (2 * kPairs);
  const int per_warp = 32 / lanes, per_step = per_warp * blockDim.y;
  const int first_head = threadIdx.y * per_warp + threadIdx.x / lanes, lane = threadIdx.x % lanes;
  const bool norm = which < 2 && p.weight, rotate = which < 2 && a.cos, over_all = norm && p.over_all_heads;
  const float whole_row = static_cast<float>(p.heads) * a.head_dim;

  const auto head_of = [&](int head) { return reinterpret_cast<const T*>(from + head * in.head); };
  const auto store = [&](const Unit<T, kPairs>& x, int head, int u) {
    if (to[0]) x.store(reinterpret_cast<T*>(to[0] + head * to_head), u, a);
    if (to[1]) x.store(reinterpret_cast<T*>(to[1] + head * to_head), u, a);
  };
  const auto sum_of_head = [&](float x) {
    for (int offset = lanes / 2; offset; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
    return x;
  };
  const auto finish = [&](Unit<T, kPairs>& x, const Angles<kPairs>& angles, float scale, int head, int u) {
    if (norm || rotate) {  // else v, or nothing to compute: the bits as they are
      Floats<kPairs> y = x.floats(a.interleaved);
      if (norm) {
        Floats<kPairs> w;
        load_weight(p, a, head, u, w);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) y.first[i] *= scale * w.first[i], y.second[i] *= scale * w.second[i];
      }
      if (rotate) angles.turn(y);
      x.set(y, a.interleaved);
    }
    store(x, head, u);
  };

  float scale = 1;
  if constexpr (kHeld > 0) {
    Unit<T, kPairs> held[kHeld];
    Angles<kPairs> angles;
    const bool mine = live && lane < units;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (mine && first_head + i * per_step < p.heads) held[i].load(head_of(first_head + i * per_step), lane, a);
    }
    if (mine && rotate) angles.load(a, row, lane);
    if (over_all) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (mine && first_head + i * per_step < p.heads) sum += held[i].floats(a.interleaved).squares();
      }
      scale = rsqrtf(row_sum(sum) / whole_row + a.eps);
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int head = first_head + i * per_step;
      const bool here = mine && head < p.heads;
      if (norm && !over_all) {
        scale = rsqrtf(sum_of_head(here ? held[i].floats(a.interleaved).squares() : 0.f) / a.head_dim + a.eps);
      }
      if (here) finish(held[i], angles, scale, head, lane);
    }
  } else {
    const auto squares = [&](int head) {
      float sum = 0;
      for (int u = lane; live && head < p.heads && u < units; u += lanes) {
        Unit<T, kPairs> x;
        x.load(head_of(head), u, a);
        sum += x.floats(a.interleaved).squares();
      }
      return sum;
    };
    if (over_all) {
      float sum = 0;
      for (int head = first_head; head < p.heads; head += per_step) sum += squares(head);
      scale = rsqrtf(row_sum(sum) / whole_row + a.eps);
    }
    const int steps = (p.heads + per_step - 1) / per_step;  // the same for every thread: shuffles need the whole warp
    for (int step = 0; step < steps; ++step) {
      const int head = first_head + step * per_step;
      if (norm && !over_all) scale = rsqrtf(sum_of_head(squares(head)) / a.head_dim + a.eps);
      for (int u = lane; live && head < p.heads && u < units; u += lanes) {
        Unit<T, kPairs> x;
        Angles<kPairs> angles;
        x.load(head_of(head), u, a);
        if (rotate) angles.load(a, row, u);
        finish(x, angles, scale, head, u);
      }
    }
  }
}

template <typename T, int kPairs, int kHeld>
void launch(const NormRopeArgs& a, int lanes, int warps, cudaStream_t stream) {
  const int rows = kThreads / 32 / warps > 1 ? kThreads / 32 / warps : 1;
  const int64_t blocks = ceil_div(a.rows, rows);
  const dim3 grid(static_cast<unsigned>(blocks ? blocks : 1), a.pool.data ? 3 : 2);
  norm_rope_kernel<T, kPairs, kHeld><<<grid, dim3(32, warps, rows), 0, stream>>>(a, lanes);
}

template <typename T, int kPairs>
void launch(const NormRopeArgs& a, cudaStream_t stream) {
  const int units = kPairs == 1 ? (a.head_dim + 1) / 2 : a.head_dim / (2 * kPairs);
  const int lanes = power_of_two_from(units, 32), heads = a.q.heads > a.k.heads ? a.q.heads : a.k.heads;
  const int64_t steps = ceil_div(heads, 32 / lanes);
  if constexpr (kPairs > 1) {
    int64_t warps = ceil_div(steps, kMostHeld);
    while (warps < 16 && steps % warps) ++warps;  // so that every warp has the same work
    if (units <= lanes && warps <= 16) return launch<T, kPairs, kMostHeld>(a, lanes, static_cast<int>(warps), stream);
  }
  launch<T, kPairs, 0>(a, lanes, static_cast<int>(steps < 32 ? steps : 32), stream);
}

template <typename T>
void launch(const NormRopeArgs& a, cudaStream_t stream) {
  if (a.vectors) return launch<T, 4>(a, stream);
  launch<T, 1>(a, stream);
}

}  // namespace

void qk_norm_rope(const NormRopeArgs& a, cudaStream_t stream) {
  switch (a.kind) {
    case Float::f32: return launch<float>(a, stream);
    case Float::f16: return launch<__half>(a, stream);
    case Float::bf16: return launch<__nv_bfloat16>(a, stream);
  }
}

}  // namespace bc
