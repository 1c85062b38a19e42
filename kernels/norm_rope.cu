// RMSNorm and rotary embedding of q and k, each element read once and written once, with or without the slot write.
#include "device.cuh"

namespace bc {
namespace {

using Part = NormRopeArgs::Part;

template <int kN>
__device__ void load_weight(const void* base, Float kind, int64_t at, float* to) {
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

// A thread's unit: kPairs pairs (first, second) that rotate together. Interleaved pairs are neighbours; half-split ones
// lie head_dim / 2 apart. With one pair a unit, an odd head_dim (never rotated) has a last unit without its second.
template <typename T, int kPairs>
struct Unit {
  float first[kPairs], second[kPairs];

  __device__ void load(const T* head, int u, const NormRopeArgs& a) {
    if constexpr (kPairs == 1) {
      const int other = a.interleaved ? 2 * u + 1 : u + a.head_dim / 2;
      first[0] = to_float(head[a.interleaved ? 2 * u : u]);
      second[0] = other < a.head_dim ? to_float(head[other]) : 0.f;
    } else if (a.interleaved) {
      const Pack<T, 2 * kPairs> x = reinterpret_cast<const Pack<T, 2 * kPairs>*>(head)[u];
#pragma unroll
      for (int i = 0; i < kPairs; ++i) first[i] = to_float(x.x[2 * i]), second[i] = to_float(x.x[2 * i + 1]);
    } else {
      const Pack<T, kPairs> x = reinterpret_cast<const Pack<T, kPairs>*>(head)[u];
      const Pack<T, kPairs> y = reinterpret_cast<const Pack<T, kPairs>*>(head + a.head_dim / 2)[u];
#pragma unroll
      for (int i = 0; i < kPairs; ++i) first[i] = to_float(x.x[i]), second[i] = to_float(y.x[i]);
    }
  }

  __device__ void store(T* head, int u, const NormRopeArgs& a) const {
    if constexpr (kPairs == 1) {
      const int other = a.interleaved ? 2 * u + 1 : u + a.head_dim / 2;
      head[a.interleaved ? 2 * u : u] = from_float<T>(first[0]);
      if (other < a.head_dim) head[other] = from_float<T>(second[0]);
    } else if (a.interleaved) {
      Pack<T, 2 * kPairs> x;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) x.x[2 * i] = from_float<T>(first[i]), x.x[2 * i + 1] = from_float<T>(second[i]);
      reinterpret_cast<Pack<T, 2 * kPairs>*>(head)[u] = x;
    } else {
      Pack<T, kPairs> x, y;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) x.x[i] = from_float<T>(first[i]), y.x[i] = from_float<T>(second[i]);
      reinterpret_cast<Pack<T, kPairs>*>(head)[u] = x;
      reinterpret_cast<Pack<T, kPairs>*>(head + a.head_dim / 2)[u] = y;
    }
  }

  __device__ float squares() const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) sum += first[i] * first[i] + second[i] * second[i];
    return sum;
  }
};

// What a unit is multiplied by: read before the sum of squares is waited for.
template <int kPairs>
struct Factors {
  float first[kPairs], second[kPairs], cos[kPairs], sin[kPairs];

  __device__ void load(const Part& p, const NormRopeArgs& a, int64_t row, int head, int u) {
    if (p.weight) {
      const int64_t at = p.over_all_heads ? static_cast<int64_t>(head) * a.head_dim : 0;
      if constexpr (kPairs == 1) {
        const int other = a.interleaved ? 2 * u + 1 : u + a.head_dim / 2;
        load_weight<1>(p.weight, p.weight_kind, at + (a.interleaved ? 2 * u : u), first);
        if (other < a.head_dim) load_weight<1>(p.weight, p.weight_kind, at + other, second);
      } else if (a.interleaved) {
        float both[2 * kPairs];
        load_weight<2 * kPairs>(p.weight, p.weight_kind, at + 2 * kPairs * u, both);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) first[i] = both[2 * i], second[i] = both[2 * i + 1];
      } else {
        load_weight<kPairs>(p.weight, p.weight_kind, at + kPairs * u, first);
        load_weight<kPairs>(p.weight, p.weight_kind, at + a.head_dim / 2 + kPairs * u, second);
      }
    }
    if (a.cos) {
      const int64_t at = row * (a.head_dim / 2) + kPairs * u;
      load_weight<kPairs>(a.cos, Float::f32, at, cos);
      load_weight<kPairs>(a.sin, Float::f32, at, sin);
    }
  }

  template <typename T>
  __device__ void apply(Unit<T, kPairs>& x, float scale, bool norm, bool rotate) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float f = norm ? x.first[i] * scale * first[i] : x.first[i];
      const float s = norm ? x.second[i] * scale * second[i] : x.second[i];
      x.first[i] = rotate ? f * cos[i] - s * sin[i] : f;
      x.second[i] = rotate ? f * sin[i] + s * cos[i] : s;
    }
  }
};

// The sum over the threads of one row (threadIdx.y), whole warps each.
__device__ float row_sum(float x) {
  __shared__ float sums[32];
  const int warps = blockDim.x / 32, mine = threadIdx.y * warps;
#pragma unroll
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  if (threadIdx.x % 32 == 0) sums[mine + threadIdx.x / 32] = x;
  __syncthreads();
  x = 0;
  for (int w = 0; w < warps; ++w) x += sums[mine + w];
  return x;
}

// A row of q (blockIdx.y 0), k (1) or v (2) a threadIdx.y; `lanes` threads a head. With kOnce a thread has at most one
// unit, which stays in registers between the sum and the product; a row too long for that is read again.
template <typename T, int kPairs, bool kOnce>
__global__ void __launch_bounds__(1024) norm_rope_kernel(const NormRopeArgs a, const int lanes) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool is_q = blockIdx.y == 0;
  const Part& p = is_q ? a.q : a.k;
  if (blockIdx.x == 0 && is_q && a.totals.totals) {
    write_totals(a.totals, a.entries.num_tokens, threadIdx.y * blockDim.x + threadIdx.x, blockDim.x * blockDim.y);
  }
  bool live = row < a.rows;
  char* to[2] = {nullptr, nullptr};
  int64_t to_head = a.pool.head;
  if (is_q || !a.pool.data) {
    to[0] = p.out.data + row * p.out.row;
    to_head = p.out.head;
  } else {
    live = live && row < a.entries.num_tokens && row < a.entries.count;
    const int first = live ? a.entries.dst[row] : -1, second = live && a.entries.dst2 ? a.entries.dst2[row] : -1;
    const int kv = blockIdx.y - 1;
    if (first >= 0) to[0] = slot_address(a.pool, first, kv);
    if (second >= 0) to[1] = slot_address(a.pool, second, kv);
    live = first >= 0 || second >= 0;
  }
  const int units = kPairs == 1 ? (a.head_dim + 1) / 2 : a.head_dim / (2 * kPairs);
  const int groups = blockDim.x / lanes, group = threadIdx.x / lanes, lane = threadIdx.x % lanes;
  const Rows& in = blockIdx.y == 2 ? a.v : p.in;
  const char* const from = in.data + row * in.row;
  const bool norm = p.weight != nullptr, rotate = a.cos != nullptr;

  const auto load = [&](Unit<T, kPairs>& x, int head, int u) {
    x.load(reinterpret_cast<const T*>(from + head * in.head), u, a);
  };
  const auto store = [&](const Unit<T, kPairs>& x, int head, int u) {
    if (to[0]) x.store(reinterpret_cast<T*>(to[0] + head * to_head), u, a);
    if (to[1]) x.store(reinterpret_cast<T*>(to[1] + head * to_head), u, a);
  };
  const auto sum_of_head = [&](float x) {
    for (int offset = lanes / 2; offset; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
    return x;
  };
  const auto scale_of = [&](float sum, float count) { return rsqrtf(sum / count + a.eps); };
  const float whole_row = static_cast<float>(p.heads) * a.head_dim;

  if (blockIdx.y == 2) {  // v goes to its slots as it is: the round trip through fp32 is exact
    for (int head = group; live && head < p.heads; head += groups) {
      for (int u = lane; u < units; u += lanes) {
        Unit<T, kPairs> x;
        load(x, head, u);
        store(x, head, u);
      }
    }
    return;
  }

  if constexpr (kOnce) {
    Unit<T, kPairs> x{};
    Factors<kPairs> factors;
    const bool mine = live && group < p.heads && lane < units;
    if (mine) {
      load(x, group, lane);
      factors.load(p, a, row, group, lane);
    }
    float scale = 1;
    if (norm && p.over_all_heads) {
      scale = scale_of(row_sum(x.squares()), whole_row);
    } else if (norm) {
      scale = scale_of(sum_of_head(x.squares()), a.head_dim);
    }
    if (mine) {
      factors.apply(x, scale, norm, rotate);
      store(x, group, lane);
    }
  } else {
    const auto squares = [&](int head) {
      float sum = 0;
      for (int u = lane; live && head < p.heads && u < units; u += lanes) {
        Unit<T, kPairs> x;
        load(x, head, u);
        sum += x.squares();
      }
      return sum;
    };
    float scale = 1;
    if (norm && p.over_all_heads) {
      float sum = 0;
      for (int head = group; head < p.heads; head += groups) sum += squares(head);
      scale = scale_of(row_sum(sum), whole_row);
    }
    const int steps = (p.heads + groups - 1) / groups;  // the same for every thread: shuffles need the whole warp
    for (int step = 0; step < steps; ++step) {
      const int head = group + step * groups;
      if (norm && !p.over_all_heads) scale = scale_of(sum_of_head(squares(head)), a.head_dim);
      for (int u = lane; live && head < p.heads && u < units; u += lanes) {
        Unit<T, kPairs> x;
        Factors<kPairs> factors;
        load(x, head, u);
        factors.load(p, a, row, head, u);
        factors.apply(x, scale, norm, rotate);
        store(x, head, u);
      }
    }
  }
}

template <typename T, int kPairs>
void launch(const NormRopeArgs& a, cudaStream_t stream) {
  const int units = kPairs == 1 ? (a.head_dim + 1) / 2 : a.head_dim / (2 * kPairs);
  const int lanes = power_of_two_from(units, 32), heads = a.q.heads > a.k.heads ? a.q.heads : a.k.heads;
  const int64_t wanted = ceil_div(static_cast<int64_t>(heads) * lanes, 32) * 32;
  const int x = static_cast<int>(wanted < 1024 ? wanted : 1024), y = x < 128 ? 128 / x : 1;
  const int64_t blocks = ceil_div(a.rows, y);
  const dim3 grid(static_cast<unsigned>(blocks ? blocks : 1), a.pool.data ? 3 : 2), block(x, y);
  if constexpr (kPairs > 1) {
    if (wanted <= 1024 && units <= lanes) {
      norm_rope_kernel<T, kPairs, true><<<grid, block, 0, stream>>>(a, lanes);
      return;
    }
  }
  norm_rope_kernel<T, kPairs, false><<<grid, block, 0, stream>>>(a, lanes);
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
