// RMSNorm and rotary embedding of q and k, with or without the slot write, for any element, head size and stride; what
// norm_rope_fast.cu takes goes there. A norm over all heads reads its row twice.
#include "device.cuh"

namespace bc {

// norm_rope_fast.cu; false, and nothing launched, if it does not take the call.
bool qk_norm_rope_fast(const NormRopeArgs& args, cudaStream_t stream);

namespace {

using Part = NormRopeArgs::Part;

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

// `at`: where the head's weights begin; u: the unit of kPairs pairs within the head.
template <int kPairs>
__device__ __forceinline__ void load_weight(const Part& p, int head_dim, bool interleaved, int64_t at, int u,
                                            Floats<kPairs>& w) {
  if constexpr (kPairs == 1) {
    const int other = interleaved ? 2 * u + 1 : u + head_dim / 2;
    load_floats<1>(p.weight, p.weight_kind, at + (interleaved ? 2 * u : u), w.first);
    if (other < head_dim) load_floats<1>(p.weight, p.weight_kind, at + other, w.second);
  } else if (interleaved) {
    float both[2 * kPairs];
    load_floats<2 * kPairs>(p.weight, p.weight_kind, at + 2 * kPairs * u, both);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) w.first[i] = both[2 * i], w.second[i] = both[2 * i + 1];
  } else {
    load_floats<kPairs>(p.weight, p.weight_kind, at + kPairs * u, w.first);
    load_floats<kPairs>(p.weight, p.weight_kind, at + head_dim / 2 + kPairs * u, w.second);
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

// Where row `row` of a part goes: one row of the outputs, or up to two slots.
struct Target {
  char* to[2] = {nullptr, nullptr};
  int64_t head;

  __device__ __forceinline__ Target(const NormRopeArgs& a, const Part& p, int which, int64_t row) {
    if (row >= a.rows) return;
    if (which == 0 || !a.pool.data) {
      to[0] = p.out.data + row * p.out.row, head = p.out.head;
      return;
    }
    head = a.pool.head;
    if (row >= a.entries.num_tokens || row >= a.entries.count) return;
    const int first = a.entries.dst[row], second = a.entries.dst2 ? a.entries.dst2[row] : -1;
    if (first >= 0) to[0] = slot_address(a.pool, first, which - 1);
    if (second >= 0) to[1] = slot_address(a.pool, second, which - 1);
  }
  __device__ __forceinline__ bool live() const { return to[0] || to[1]; }
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

// The sum over a block's warps (threadIdx.y).
__device__ __forceinline__ float row_sum(float x) {
  __shared__ float sums[32];
#pragma unroll
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  if (threadIdx.x == 0) sums[threadIdx.y] = x;
  __syncthreads();
  x = 0;
  for (int w = 0; w < static_cast<int>(blockDim.y); ++w) x += sums[w];
  return x;
}

// A block takes a row, its warps (threadIdx.y) the steps of the row in turn; `lanes` threads take a head.
template <typename T, int kPairs>
__global__ void __launch_bounds__(1024) any_kernel(const NormRopeArgs a, const int lanes) {
  const int64_t row = blockIdx.x;
  const int which = blockIdx.y;
  const Part& p = which == 0 ? a.q : a.k;
  if (row == 0 && which == 0 && a.totals.totals) {
    write_totals(a.totals, a.entries.num_tokens, threadIdx.y * 32 + threadIdx.x, 32 * blockDim.y);
  }
  const Target target(a, p, which, row);
  const bool live = target.live();
  const Rows& in = which == 2 ? a.v : p.in;
  const char* const from = in.data + row * in.row;
  const int units = kPairs == 1 ? (a.head_dim + 1) / 2 : a.head_dim / (2 * kPairs);
  const int per_warp = 32 / lanes, per_step = per_warp * blockDim.y;
  const int first_head = threadIdx.y * per_warp + threadIdx.x / lanes, lane = threadIdx.x % lanes;
  const bool norm = which < 2 && p.weight, rotate = which < 2 && a.cos, over_all = norm && p.over_all_heads;

  const auto load = [&](int head, int u) {
    Unit<T, kPairs> x;
    x.load(reinterpret_cast<const T*>(from + head * in.head), u, a);
    return x;
  };
  const auto squares = [&](int head) {
    float sum = 0;
    for (int u = lane; live && head < p.heads && u < units; u += lanes) {
      sum += load(head, u).floats(a.interleaved).squares();
    }
    return sum;
  };
  float scale = 1;
  if (over_all) {
    float sum = 0;
    for (int head = first_head; head < p.heads; head += per_step) sum += squares(head);
    scale = rsqrtf(row_sum(sum) / (static_cast<float>(p.heads) * a.head_dim) + a.eps);
  }
  const int steps = (p.heads + per_step - 1) / per_step;  // the same for every thread: shuffles need the whole warp
  for (int step = 0; step < steps; ++step) {
    const int head = first_head + step * per_step;
    if (norm && !over_all) {
      float sum = squares(head);
      for (int offset = lanes / 2; offset; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
      scale = rsqrtf(sum / a.head_dim + a.eps);
    }
    for (int u = lane; live && head < p.heads && u < units; u += lanes) {
      Unit<T, kPairs> x = load(head, u);
      if (norm || rotate) {  // else v, or nothing to compute: the bits as they are
        Floats<kPairs> y = x.floats(a.interleaved);
        if (norm) {
          Floats<kPairs> w;
          load_weight(p, a.head_dim, a.interleaved, over_all ? static_cast<int64_t>(head) * a.head_dim : 0, u, w);
#pragma unroll
          for (int i = 0; i < kPairs; ++i) y.first[i] *= scale * w.first[i], y.second[i] *= scale * w.second[i];
        }
        if (rotate) {
          Angles<kPairs> angles;
          angles.load(a, row, u);
          angles.turn(y);
        }
        x.set(y, a.interleaved);
      }
      for (char* to : target.to) {
        if (to) x.store(reinterpret_cast<T*>(to + head * target.head), u, a);
      }
    }
  }
}

template <typename T, int kPairs>
void launch_any(const NormRopeArgs& a, cudaStream_t stream) {
  const int units = kPairs == 1 ? (a.head_dim + 1) / 2 : a.head_dim / (2 * kPairs);
  const int lanes = power_of_two_from(units, 32), heads = a.q.heads > a.k.heads ? a.q.heads : a.k.heads;
  const int64_t steps = ceil_div(heads, 32 / lanes);
  const dim3 grid(static_cast<unsigned>(a.rows ? a.rows : 1), a.pool.data ? 3 : 2);
  any_kernel<T, kPairs><<<grid, dim3(32, static_cast<unsigned>(steps < 32 ? steps : 32)), 0, stream>>>(a, lanes);
}

template <typename T>
void launch(const NormRopeArgs& a, cudaStream_t stream) {
  if (!a.vectors) return launch_any<T, 1>(a, stream);
  launch_any<T, 4>(a, stream);
}

}  // namespace

void qk_norm_rope(const NormRopeArgs& a, cudaStream_t stream) {
  if (qk_norm_rope_fast(a, stream)) return;
  switch (a.kind) {
    case Float::f32: return launch<float>(a, stream);
    case Float::f16: return launch<__half>(a, stream);
    case Float::bf16: return launch<__nv_bfloat16>(a, stream);
  }
}

}  // namespace bc
