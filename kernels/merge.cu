// Log-sum-exp merge of attention partials.
#include "device.cuh"

namespace bc {
namespace {

constexpr int kThreads = 256;

// blockDim.x threads a (row, head), kN elements a thread and step. An empty partial (weight 0) may hold anything, NaN
// included, and is not read.
template <typename In, typename Out, int kN>
__global__ void __launch_bounds__(kThreads) merge_kernel(const MergeArgs a) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (at >= a.rows * a.heads) return;
  const int64_t row = at / a.heads, head = at % a.heads;
  const char* const lse = a.lse + row * a.lse_row + head * a.lse_head;
  const auto lse_of = [&](int64_t n) { return *reinterpret_cast<const float*>(lse + n * a.lse_n); };

  const int64_t partials = row < a.num_tokens ? a.n : 0;
  float top = -INFINITY, total = 0;
  for (int64_t n = 0; n < partials; ++n) top = fmaxf(top, lse_of(n));
  if (top == -INFINITY) top = 0;
  for (int64_t n = 0; n < partials; ++n) total += expf(lse_of(n) - top);
  const float scale = 1.f / fmaxf(total, 1.17549435e-38f);

  Out* const out = reinterpret_cast<Out*>(a.out + row * a.out_row + head * a.out_head);
  const char* const from = a.partials + row * a.partial_row + head * a.partial_head;
  for (int64_t d = threadIdx.x * kN; d < a.head_dim; d += blockDim.x * kN) {
    float sum[kN] = {};
#pragma unroll 4
    for (int64_t n = 0; n < partials; ++n) {
      const float weight = expf(lse_of(n) - top) * scale;
      Pack<In, kN> x{};
      if (weight != 0) x = *reinterpret_cast<const Pack<In, kN>*>(from + n * a.partial_n + d * sizeof(In));
#pragma unroll
      for (int i = 0; i < kN; ++i) sum[i] += weight * to_float(x.x[i]);
    }
    Pack<Out, kN> merged;
#pragma unroll
    for (int i = 0; i < kN; ++i) merged.x[i] = from_float<Out>(sum[i]);
    *reinterpret_cast<Pack<Out, kN>*>(out + d) = merged;
  }
}

template <typename In, typename Out>
void merge(const MergeArgs& a, cudaStream_t stream) {
  const int per_thread = a.vectors ? 8 : 1, lanes = power_of_two_from(ceil_div(a.head_dim, per_thread), 32);
  const dim3 block(lanes, kThreads / lanes);
  const unsigned blocks = static_cast<unsigned>(ceil_div(a.rows * a.heads, block.y));
  if (a.vectors) {
    merge_kernel<In, Out, 8><<<blocks, block, 0, stream>>>(a);
  } else {
    merge_kernel<In, Out, 1><<<blocks, block, 0, stream>>>(a);
  }
}

template <typename In>
void merge(const MergeArgs& a, cudaStream_t stream) {
  switch (a.out_kind) {
    case Float::f32: return merge<In, float>(a, stream);
    case Float::f16: return merge<In, __half>(a, stream);
    case Float::bf16: return merge<In, __nv_bfloat16>(a, stream);
  }
}

}  // namespace

void merge_partials(const MergeArgs& a, cudaStream_t stream) {
  switch (a.in_kind) {
    case Float::f32: return merge<float>(a, stream);
    case Float::f16: return merge<__half>(a, stream);
    case Float::bf16: return merge<__nv_bfloat16>(a, stream);
  }
}

}  // namespace bc
