// Log-sum-exp merge of attention partials.
#include "device.cuh"

namespace bc {
namespace {

constexpr int kThreads = 256;

constexpr int kInFlight = 4;

// blockDim.x threads a (row, head), kN elements a thread and step, kInFlight partials read at once. The weights are
// relative to the largest lse so far. An empty partial (weight 0) may hold anything, NaN included, and counts as 0.
template <typename In, typename Out, int kN>
__global__ void __launch_bounds__(kThreads) merge_kernel(const MergeArgs a) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (at >= a.rows * a.heads) return;
  const bool small = at >> 32 == 0 && a.heads >> 32 == 0;  // a 64-bit division would take as long as all the rest
  const int64_t row = small ? static_cast<uint32_t>(at) / static_cast<uint32_t>(a.heads) : at / a.heads;
  const int64_t head = at - row * a.heads;
  const char* const lse = a.lse + row * a.lse_row + head * a.lse_head;
  const char* tail = nullptr;
  if (a.tail_lse) {
    const int64_t block = row >> 32 == 0 && a.tail_size >> 32 == 0
                              ? static_cast<uint32_t>(row) / static_cast<uint32_t>(a.tail_size)
                              : row / a.tail_size;
    tail = a.tail_lse + block * a.tail_block + (row - block * a.tail_size) * a.tail_row + head * a.tail_head;
  }
  const auto lse_of = [&](int n) {
    if (tail && n == a.n - 1) return *reinterpret_cast<const float*>(tail);
    if (a.keys && a.keys[n] == 0) return -INFINITY;
    return *reinterpret_cast<const float*>(lse + n * a.lse_n);
  };
  const char* const from = a.partials + row * a.partial_row + head * a.partial_head;
  Out* const out = reinterpret_cast<Out*>(a.out + row * a.out_row + head * a.out_head);
  const int partials = row < a.num_tokens ? static_cast<int>(a.n) : 0;

  for (int64_t d = threadIdx.x * kN; d < a.head_dim; d += blockDim.x * kN) {
    float sum[kN] = {}, total = 0, top = -INFINITY;
    for (int first = 0; first < partials; first += kInFlight) {
      Pack<In, kN> x[kInFlight];
      float weight[kInFlight];
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        const int n = first + j < partials ? first + j : partials - 1;
        x[j] = *reinterpret_cast<const Pack<In, kN>*>(from + n * a.partial_n + d * sizeof(In));
        weight[j] = lse_of(n);
      }
      float new_top = top;
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        if (first + j >= partials) weight[j] = -INFINITY;
        new_top = fmaxf(new_top, weight[j]);
      }
      if (new_top == -INFINITY) continue;  // nothing but empty partials so far
      const float rescale = expf(top - new_top);
      top = new_top;
      total *= rescale;
#pragma unroll
      for (int i = 0; i < kN; ++i) sum[i] *= rescale;
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        weight[j] = expf(weight[j] - top);
        total += weight[j];
#pragma unroll
        for (int i = 0; i < kN; ++i) sum[i] += weight[j] == 0 ? 0.f : weight[j] * to_float(x[j].x[i]);
      }
    }
    const float scale = total == 0 ? 0.f : 1.f / total;
    Pack<Out, kN> merged;
#pragma unroll
    for (int i = 0; i < kN; ++i) merged.x[i] = from_float<Out>(sum[i] * scale);
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
