// The usual call of qk_norm_rope: 16-bit elements, everything on 16 bytes, a norm and a rotation for both q and k.
//
// A block takes whole rows (threadIdx.z): its first warps the row's q, the next ones its k, the last ones its v. A
// thread has 8 elements (4 pairs that rotate together) at one place of a head; 2^lane_shift lanes take a head, so a
// warp takes several heads a step. It takes kSteps steps, all at the same place within the heads: cos and sin are read
// once. All loads of a thread are issued before the first value is used. Lanes, steps and rows that are too many load
// what their last neighbour loads, count nothing and store nothing, so that no load waits for a branch.
#include <utility>

#include "device.cuh"

namespace bc {
namespace {

// kSteps of a norm over all heads and of one per head; threads that a block has at least and at most. Measured on an
// H200: for 12 heads of 128, 6 steps are faster than 3, 2 and 1, and 128 registers a thread faster than 64; for 32
// half-split heads, 4 steps than 2 and 1. Blocks that take several rows in turn are no faster.
constexpr int kStepsOverAll = 6, kStepsPerHead = 4, kThreads = 128, kMostThreads = 512;

// A row of q, k or v; strides in bytes.
struct RowPart {
  const char* in;
  char* out;  // null if the row goes to the pool
  const char* weight;
  uint32_t in_row, in_head, out_row, out_head;
  int heads, warps;
  float per_element;  // 1 / the elements that are normalised together
};

struct FastArgs {
  RowPart part[3];
  Pool pool;
  Entries entries;
  Totals totals;
  const float *cos, *sin;
  uint32_t rows, written;  // rows of k and v that are written
  int k_begin, v_begin;    // first warps
  int lane_shift, units;   // units of 8 elements in a head
  int half;                // head_dim / 2
  float eps;
};

__device__ __forceinline__ float2 two_floats(uint32_t x, __nv_bfloat16) {
  return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
}
__device__ __forceinline__ float2 two_floats(uint32_t x, __half) {
  return __half22float2(reinterpret_cast<const __half2&>(x));
}
// The same by another instruction: the compiler then converts twice what it would else keep as floats in registers.
__device__ __forceinline__ float2 two_floats_again(uint32_t x, __nv_bfloat16) {
  return {__uint_as_float(__byte_perm(x, 0, 0x1044)), __uint_as_float(__byte_perm(x, 0, 0x3244))};
}
__device__ __forceinline__ float2 two_floats_again(uint32_t x, __half) { return two_floats(x, __half()); }
__device__ __forceinline__ uint32_t pack(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 x = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(x);
}
__device__ __forceinline__ uint32_t pack(float low, float high, __half) {
  const __half2 x = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(x);
}

// Eight elements of a head as they lie in memory: neighbours, or twice four that are half a head apart.
template <typename T, bool kInterleaved>
struct Unit {
  static constexpr int kAt = kInterleaved ? 16 : 8;  // bytes from one unit to the next
  uint32_t x[4];

  __device__ __forceinline__ void load(const char* at, int half) {
    if constexpr (kInterleaved) {
      const uint4 all = *reinterpret_cast<const uint4*>(at);
      x[0] = all.x, x[1] = all.y, x[2] = all.z, x[3] = all.w;
    } else {
      const uint2 low = *reinterpret_cast<const uint2*>(at), high = *reinterpret_cast<const uint2*>(at + 2 * half);
      x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
    }
  }
  __device__ __forceinline__ void load_constant(const char* at, int half) {
    if constexpr (kInterleaved) {
      const uint4 all = __ldg(reinterpret_cast<const uint4*>(at));
      x[0] = all.x, x[1] = all.y, x[2] = all.z, x[3] = all.w;
    } else {
      const uint2 low = __ldg(reinterpret_cast<const uint2*>(at));
      const uint2 high = __ldg(reinterpret_cast<const uint2*>(at + 2 * half));
      x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
    }
  }
  __device__ __forceinline__ void store(char* at, int half) const {
    if constexpr (kInterleaved) {
      *reinterpret_cast<uint4*>(at) = {x[0], x[1], x[2], x[3]};
    } else {
      *reinterpret_cast<uint2*>(at) = {x[0], x[1]};
      *reinterpret_cast<uint2*>(at + 2 * half) = {x[2], x[3]};
    }
  }
  __device__ __forceinline__ void floats(float* y) const {  // in the order of memory
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = two_floats(x[i], T());
      y[2 * i] = two.x, y[2 * i + 1] = two.y;
    }
  }
  __device__ __forceinline__ void floats_again(float* y) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = two_floats_again(x[i], T());
      y[2 * i] = two.x, y[2 * i + 1] = two.y;
    }
  }
  __device__ __forceinline__ void set(const float* y) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = pack(y[2 * i], y[2 * i + 1], T());
  }
};

template <bool kInterleaved>
struct Unit<float, kInterleaved> {
  static constexpr int kAt = kInterleaved ? 32 : 16;
  float4 low, high;

  __device__ __forceinline__ void load_constant(const char* at, int half) {
    low = __ldg(reinterpret_cast<const float4*>(at));
    high = __ldg(reinterpret_cast<const float4*>(at + (kInterleaved ? 16 : 4 * half)));
  }
  __device__ __forceinline__ void floats(float* y) const {
    y[0] = low.x, y[1] = low.y, y[2] = low.z, y[3] = low.w;
    y[4] = high.x, y[5] = high.y, y[6] = high.z, y[7] = high.w;
  }
};

__device__ __forceinline__ float sum_over(int lanes, float x) {
  for (int offset = lanes / 2; offset; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

template <typename T, typename W, bool kInterleaved, bool kOverAll, int kSteps>
__global__ void __launch_bounds__(kMostThreads) fast_kernel(const __grid_constant__ FastArgs a) {
  using Mine = Unit<T, kInterleaved>;
  using Weight = Unit<W, kInterleaved>;
  constexpr int kWeights = kOverAll ? kSteps : 1;
  if (blockIdx.x == 0 && a.totals.totals) {
    const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * 32 + threadIdx.x;
    write_totals(a.totals, a.entries.num_tokens, thread, 32 * blockDim.y * blockDim.z);
  }
  const int which = (static_cast<int>(threadIdx.y) >= a.k_begin) + (static_cast<int>(threadIdx.y) >= a.v_begin);
  const RowPart& p = a.part[which];
  const int warp = threadIdx.y - (which == 0 ? 0 : which == 1 ? a.k_begin : a.v_begin);
  const int lane = threadIdx.x & ((1 << a.lane_shift) - 1), u = min(lane, a.units - 1);
  const int head0 = (warp << (5 - a.lane_shift)) + (threadIdx.x >> a.lane_shift);
  const int step = p.warps << (5 - a.lane_shift);  // heads from one step of a warp to its next
  const auto head_at = [&](int i) { return min(head0 + i * step, p.heads - 1); };

  Weight weight[kWeights];
  if (which < 2) {
#pragma unroll
    for (int i = 0; i < kWeights; ++i) {
      const uint32_t at_head = kOverAll ? head_at(i) * 2 * a.half * static_cast<uint32_t>(sizeof(W)) : 0;
      weight[i].load_constant(p.weight + at_head + Weight::kAt * u, a.half);
    }
  }
  const uint32_t given_row = blockIdx.x * blockDim.z + threadIdx.z;
  const uint32_t row = min(given_row, a.rows - 1);
  Mine x[kSteps];
  float4 cos, sin;
  const char* const from = p.in + static_cast<uint64_t>(row) * p.in_row + Mine::kAt * u;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) x[i].load(from + head_at(i) * p.in_head, a.half);
  if (which < 2) {
    const uint64_t at = static_cast<uint64_t>(row) * a.half + 4 * u;
    cos = __ldg(reinterpret_cast<const float4*>(a.cos + at));
    sin = __ldg(reinterpret_cast<const float4*>(a.sin + at));
  }

  char *to = p.out, *also = nullptr;
  bool writes = lane == u, writes_also = false;
  if (to) {
    to += static_cast<uint64_t>(row) * p.out_row;
    writes = writes && given_row < a.rows;
  } else {
    writes = writes && given_row < a.written;
    if (writes) {
      const int slot = a.entries.dst[row], second = a.entries.dst2 ? a.entries.dst2[row] : -1;
      to = slot_address(a.pool, slot, which - 1), also = slot_address(a.pool, second, which - 1);
      writes = slot >= 0, writes_also = second >= 0;
    }
  }
  to += Mine::kAt * u, also += Mine::kAt * u;

  float sums[kSteps], all = 0;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    float y[8], sum = 0;
    x[i].floats(y);
#pragma unroll
    for (int e = 0; e < 8; ++e) sum += y[e] * y[e];
    sums[i] = lane == u && head0 + i * step < p.heads ? sum : 0;
    all += sums[i];
  }
  if constexpr (kOverAll) {
    all = sum_over(32, all);
    if (a.v_begin > 2) {
      __shared__ float of_warp[kMostThreads / 32];
      float* const mine = of_warp + threadIdx.z * blockDim.y + threadIdx.y - warp;
      if (threadIdx.x == 0) mine[warp] = all;
      __syncthreads();
      all = sum_over(32, static_cast<int>(threadIdx.x) < p.warps ? mine[threadIdx.x] : 0);
    }
    const float scale = rsqrtf(all * p.per_element + a.eps);
    cos.x *= scale, cos.y *= scale, cos.z *= scale, cos.w *= scale;
    sin.x *= scale, sin.y *= scale, sin.z *= scale, sin.w *= scale;
  }
  const float c[] = {cos.x, cos.y, cos.z, cos.w}, s[] = {sin.x, sin.y, sin.z, sin.w};
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    if (which < 2) {
      float y[8], w[8], scale = 1;
      if constexpr (!kOverAll) scale = rsqrtf(sum_over(1 << a.lane_shift, sums[i]) * p.per_element + a.eps);
      x[i].floats_again(y);
      weight[kOverAll ? i : 0].floats(w);
#pragma unroll
      for (int e = 0; e < 8; ++e) y[e] *= kOverAll ? w[e] : scale * w[e];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float &first = y[kInterleaved ? 2 * j : j], &second = y[kInterleaved ? 2 * j + 1 : j + 4];
        const float f = first;
        first = f * c[j] - second * s[j];
        second = f * s[j] + second * c[j];
      }
      x[i].set(y);
    }
    const int head = head0 + i * step;
    if (head < p.heads) {
      const uint32_t at = head * p.out_head;
      if (writes) x[i].store(to + at, a.half);
      if (writes_also) x[i].store(also + at, a.half);
    }
  }
}

bool fits(const Rows& r, int64_t rows, int heads) {
  const auto within = [](int64_t count, int64_t stride) { return stride >= 0 && count * stride < int64_t(1) << 31; };
  return within(1, r.row) && within(heads, r.head) && rows < int64_t(1) << 31;
}

template <typename T, typename W, bool kInterleaved, bool kOverAll>
bool launch(const NormRopeArgs& a, cudaStream_t stream) {
  constexpr int kSteps = kOverAll ? kStepsOverAll : kStepsPerHead;
  FastArgs f{};
  f.units = a.head_dim / 8;
  while (1 << f.lane_shift < f.units) ++f.lane_shift;
  if (f.lane_shift > 5) return false;
  const int heads_a_warp = kSteps << (5 - f.lane_shift);
  const auto part = [&](const NormRopeArgs::Part& p, const Rows& in, const Rows& out) {
    return RowPart{in.data, out.data, static_cast<const char*>(p.weight), static_cast<uint32_t>(in.row),
                   static_cast<uint32_t>(in.head), static_cast<uint32_t>(out.row), static_cast<uint32_t>(out.head),
                   p.heads, static_cast<int>(ceil_div(p.heads, heads_a_warp)),
                   1.f / ((kOverAll ? p.heads : 1) * static_cast<float>(a.head_dim))};
  };
  const Rows kv_out = a.pool.data ? Rows{nullptr, 0, a.pool.head} : a.k.out;
  f.part[0] = part(a.q, a.q.in, a.q.out), f.part[1] = part(a.k, a.k.in, kv_out), f.part[2] = part(a.k, a.v, kv_out);
  f.k_begin = f.part[0].warps, f.v_begin = f.k_begin + f.part[1].warps;
  // Whether there is a pool must not decide it: the slot write is bit for bit what norm and rotation give without it.
  if (f.v_begin + f.part[2].warps > kMostThreads / 32) return false;
  const int in_row = f.v_begin + (a.pool.data ? f.part[2].warps : 0);
  f.pool = a.pool, f.entries = a.entries, f.totals = a.totals, f.cos = a.cos, f.sin = a.sin, f.eps = a.eps;
  f.half = a.head_dim / 2, f.rows = static_cast<uint32_t>(a.rows);
  const int64_t written = a.entries.num_tokens < a.entries.count ? a.entries.num_tokens : a.entries.count;
  f.written = static_cast<uint32_t>(written < a.rows ? written : a.rows);
  const int rows = kThreads / 32 / in_row > 1 ? kThreads / 32 / in_row : 1;
  fast_kernel<T, W, kInterleaved, kOverAll, kSteps>
      <<<static_cast<unsigned>(ceil_div(a.rows, rows)), dim3(32, in_row, rows), 0, stream>>>(f);
  return true;
}

template <typename T, typename W>
bool launch(const NormRopeArgs& a, cudaStream_t stream) {
  if (a.q.over_all_heads) {
    return a.interleaved ? launch<T, W, true, true>(a, stream) : launch<T, W, false, true>(a, stream);
  }
  return a.interleaved ? launch<T, W, true, false>(a, stream) : launch<T, W, false, false>(a, stream);
}

template <typename T>
bool launch(const NormRopeArgs& a, cudaStream_t stream) {
  return a.q.weight_kind == Float::f32 ? launch<T, float>(a, stream) : launch<T, T>(a, stream);
}

}  // namespace

bool qk_norm_rope_fast(const NormRopeArgs& a, cudaStream_t stream) {
  const Float weights = a.q.weight_kind;
  if (!a.vectors || !a.q.weight || !a.k.weight || !a.cos || a.k.weight_kind != weights ||
      a.q.over_all_heads != a.k.over_all_heads || (weights != Float::f32 && weights != a.kind)) {
    return false;
  }
  const Rows slots = {nullptr, 0, a.pool.head};
  for (const auto& [r, heads] : {std::pair(a.q.in, a.q.heads), std::pair(a.q.out, a.q.heads),
                                 std::pair(a.k.in, a.k.heads), std::pair(a.k.out, a.k.heads),
                                 std::pair(a.v, a.k.heads), std::pair(slots, a.k.heads)}) {
    if (!fits(r, a.rows, heads)) return false;
  }
  if (a.rows == 0 || a.q.heads == 0 || a.k.heads == 0) return false;
  if (a.kind == Float::bf16) return launch<__nv_bfloat16>(a, stream);
  return a.kind == Float::f16 && launch<__half>(a, stream);
}

}  // namespace bc
