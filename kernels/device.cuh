// What the kernels share: slots, totals, packs of elements.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "launch.h"

namespace bc {

template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
  T x[N];
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) { return x; }
template <>
__device__ __forceinline__ __half from_float<__half>(float x) { return __float2half_rn(x); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

// kN neighbours, as float.
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

// Where slot begins, K (kv = 0) or V (kv = 1), head 0, layer 0.
__device__ __forceinline__ char* slot_address(const Pool& pool, int slot, int kv) {
  const int offset = slot & ((1 << pool.page_shift) - 1);
  return pool.data + (slot >> pool.page_shift) * pool.page + kv * pool.kv + offset * pool.slot;
}

__device__ __forceinline__ void write_totals(const Totals& t, int64_t num_tokens, int thread, int threads) {
  for (int64_t j = thread; j < t.count; j += threads) {
    int64_t own = num_tokens - j * t.causal_block_size;
    own = own < t.causal_block_size ? own : t.causal_block_size;
    t.totals[j] = own > 0 ? t.lengths[j] + static_cast<int32_t>(own) : 0;
  }
}

}  // namespace bc
