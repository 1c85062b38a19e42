// RMSNorm and rotary embedding of q and k for 16-bit elements in heads of 64, 128, ...
//
// A warp takes up to kUnits steps of a row, a step being 32 lanes times 16 bytes of interleaved pairs, or twice 16 of
// half-split ones. It reads all its steps into registers, where they stay packed until the sum over the row is known.
// A lane is at the same place within its head in every step, so cos and sin are read once a lane. Few instructions an
// element are what counts: conversions are of two elements at once, and what differs between calls is decided once a
// step.
#include "norm_rope.cuh"

namespace bc {
namespace {

constexpr int kWarps = 4;  // a block, unless a row takes another number
// Steps that a warp holds. Measured on an H200: for 12 heads of 128, 6 are faster than 3 and 2; for 32 half-split, 4.
constexpr int kUnitsFirst = 6, kUnitsSecond = 4;

__device__ __forceinline__ float2 unpack(uint32_t two, __nv_bfloat16) {
  return {__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u)};
}
__device__ __forceinline__ float2 unpack(uint32_t two, __half) {
  return __half22float2(*reinterpret_cast<const __half2*>(&two));
}
__device__ __forceinline__ uint32_t pack(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&two);
}
__device__ __forceinline__ uint32_t pack(float low, float high, __half) {
  const __half2 two = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&two);
}

// A lane's share of a step: kPairs pairs that rotate together, (first, second), as two to a register.
template <typename T, bool kInterleaved>
struct Step {
  static constexpr int kPairs = kInterleaved ? 4 : 8;
  uint4 x[kPairs / 4];  // interleaved: the pairs; half-split: the first ones, then the second ones

  __device__ __forceinline__ void load(const char* at, int half) {
    x[0] = *reinterpret_cast<const uint4*>(at);
    if constexpr (!kInterleaved) x[1] = *reinterpret_cast<const uint4*>(at + half);
  }
  __device__ __forceinline__ void store(char* at, int half) const {
    *reinterpret_cast<uint4*>(at) = x[0];
    if constexpr (!kInterleaved) *reinterpret_cast<uint4*>(at + half) = x[1];
  }
  __device__ __forceinline__ Floats<kPairs> floats() const {
    Floats<kPairs> y;
    const uint32_t* const two = &x[0].x;
    if constexpr (kInterleaved) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack(two[i], T());
        y.first[i] = pair.x, y.second[i] = pair.y;
      }
    } else {
      const uint32_t* const other = &x[1].x;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 first = unpack(two[i], T()), second = unpack(other[i], T());
        y.first[2 * i] = first.x, y.first[2 * i + 1] = first.y;
        y.second[2 * i] = second.x, y.second[2 * i + 1] = second.y;
      }
    }
    return y;
  }
  __device__ __forceinline__ void set(const Floats<kPairs>& y) {
    uint32_t* const two = &x[0].x;
    if constexpr (kInterleaved) {
#pragma unroll
      for (int i = 0; i < 4; ++i) two[i] = pack(y.first[i], y.second[i], T());
    } else {
      uint32_t* const other = &x[1].x;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        two[i] = pack(y.first[2 * i], y.first[2 * i + 1], T());
        other[i] = pack(y.second[2 * i], y.second[2 * i + 1], T());
      }
    }
  }
};

// blockIdx.y: q (0), k (1) or v (2). Warp w of the grid takes part w % warps of row w / warps.
template <typename T, bool kInterleaved, int kUnits>
__global__ void __launch_bounds__(512) held_kernel(const NormRopeArgs a) {
  using Mine = Step<T, kInterleaved>;
  constexpr int kPairs = Mine::kPairs;
  const int which = blockIdx.y;
  const Part& p = which == 0 ? a.q : a.k;
  if (blockIdx.x == 0 && which == 0 && a.totals.totals) {
    write_totals(a.totals, a.entries.num_tokens, threadIdx.x, blockDim.x);
  }
  const int lanes = a.head_dim / (2 * kPairs), heads_a_step = 32 / lanes;
  const int warps = (p.heads + heads_a_step * kUnits - 1) / (heads_a_step * kUnits);
  const int block_warps = blockDim.x / 32, warp = threadIdx.x / 32, thread = threadIdx.x % 32;
  const int64_t id = static_cast<int64_t>(blockIdx.x) * block_warps + warp;
  const int64_t row = id / warps;
  const int head0 = static_cast<int>(id - row * warps) * kUnits * heads_a_step + thread / lanes, lane = thread % lanes;
  const Target target(a, p, which, row);
  const bool live = target.live();

  const Rows& in = which == 2 ? a.v : p.in;
  const int half = a.head_dim * static_cast<int>(sizeof(T)) / 2;
  const int64_t offset = lane * 16;
  Mine held[kUnits];
  {
    const char* from = in.data + row * in.row + head0 * in.head + offset;
#pragma unroll
    for (int i = 0; i < kUnits; ++i, from += heads_a_step * in.head) {
      if (live && head0 + i * heads_a_step < p.heads) held[i].load(from, half);
    }
  }
  const auto store = [&](const Mine& x, int head) {
    if (target.to[0]) x.store(target.to[0] + head * target.head + offset, half);
    if (target.to[1]) x.store(target.to[1] + head * target.head + offset, half);
  };
  const bool norm = which < 2 && p.weight, rotate = which < 2 && a.cos, over_all = norm && p.over_all_heads;
  if (!norm && !rotate) {  // v, or nothing to compute: the bits as they are
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (live && head0 + i * heads_a_step < p.heads) store(held[i], head0 + i * heads_a_step);
    }
    return;
  }

  Angles<kPairs> angles;
  if (live && rotate) angles.load(a, row, lane);
  Floats<kPairs> weight;
  const auto load_weights = [&](int head) {
    const int64_t at = over_all ? static_cast<int64_t>(head) * a.head_dim : 0;
    load_weight(p, a.head_dim, kInterleaved, at, lane, weight);
  };
  if (norm && !over_all) load_weights(0);
  float scale = 1;
  if (over_all) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (live && head0 + i * heads_a_step < p.heads) sum += held[i].floats().squares();
    }
#pragma unroll
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (warps > 1) {  // the row's warps are in one block
      __shared__ float sums[16];
      if (thread == 0) sums[warp] = sum;
      __syncthreads();
      sum = 0;
      for (int w = warp - warp % warps, end = w + warps; w < end; ++w) sum += sums[w];
    }
    scale = rsqrtf(sum / (static_cast<float>(p.heads) * a.head_dim) + a.eps);
  }
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const int head = head0 + i * heads_a_step;
    const bool here = live && head < p.heads;
    Floats<kPairs> y;
    if (here) y = held[i].floats();
    if (norm) {
      if (over_all) {
        if (here) load_weights(head);
      } else {
        float sum = here ? y.squares() : 0.f;
        for (int step = lanes / 2; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        scale = rsqrtf(sum / a.head_dim + a.eps);
      }
#pragma unroll
      for (int j = 0; j < kPairs; ++j) y.first[j] *= scale * weight.first[j], y.second[j] *= scale * weight.second[j];
    }
    if (!here) continue;
    if (rotate) angles.turn(y);
    held[i].set(y);
    store(held[i], head);
  }
}

// Runs held_kernel if it can: the warps of a row whose norm is over all heads must make up a block, or divide one.
template <typename T, bool kInterleaved, int kUnits>
bool launch_held(const NormRopeArgs& a, cudaStream_t stream) {
  const int heads_a_warp = 32 / (a.head_dim / (2 * Step<T, kInterleaved>::kPairs)) * kUnits;
  int64_t block = kWarps, most = 0;
  for (const Part* p : {&a.q, &a.k}) {
    const int64_t warps = ceil_div(p->heads, heads_a_warp);
    most = warps > most ? warps : most;
    if (!p->weight || !p->over_all_heads || block % warps == 0) continue;
    if (block != kWarps) return false;
    block = warps;
  }
  if (block > 16 || (block != kWarps && (a.q.heads != a.k.heads))) return false;
  const int64_t blocks = ceil_div(a.rows * most, block);
  const dim3 grid(static_cast<unsigned>(blocks ? blocks : 1), a.pool.data ? 3 : 2);
  held_kernel<T, kInterleaved, kUnits><<<grid, static_cast<unsigned>(32 * block), 0, stream>>>(a);
  return true;
}

template <typename T, bool kInterleaved>
bool launch_held(const NormRopeArgs& a, cudaStream_t stream) {
  constexpr int kElements = 2 * Step<T, kInterleaved>::kPairs;
  const int lanes = a.head_dim / kElements;
  if (a.head_dim % kElements || lanes & (lanes - 1) || lanes > 32 || !lanes) return false;
  const int64_t steps = ceil_div(a.q.heads, 32 / lanes);
  if (steps % kUnitsFirst == 0) return launch_held<T, kInterleaved, kUnitsFirst>(a, stream);
  if (steps % kUnitsSecond == 0) return launch_held<T, kInterleaved, kUnitsSecond>(a, stream);
  return launch_held<T, kInterleaved, 1>(a, stream);
}

template <typename T>
bool launch_held(const NormRopeArgs& a, cudaStream_t stream) {
  return a.interleaved ? launch_held<T, true>(a, stream) : launch_held<T, false>(a, stream);
}

}  // namespace

bool norm_rope_held(const NormRopeArgs& a, cudaStream_t stream) {
  if (!a.vectors || a.kind == Float::f32) return false;
  return a.kind == Float::f16 ? launch_held<__half>(a, stream) : launch_held<__nv_bfloat16>(a, stream);
}

}  // namespace bc
