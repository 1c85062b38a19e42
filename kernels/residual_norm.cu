// The residual sum of a transformer block and the modulated LayerNorm behind it, each element read and written once.
//
// A thread block takes a row and a thread up to kUnits units of kVector elements of it, which stay in registers between
// the sum, the row's mean, its variance (of the differences from the mean, not of the squares) and the output.
#include "device.cuh"

namespace bc {
namespace {

constexpr int kThreads = 256;  // a row takes no more, if so many units a thread suffice

template <int kVector>
struct Floats {
  float x[kVector];
};

template <int kVector>
__device__ __forceinline__ Floats<kVector> load(const Modulation& m, int64_t row, int column) {
  Floats<kVector> to;
  load_floats<kVector>(m.data, m.kind, row * m.row + column, to.x);
  return to;
}

__device__ __forceinline__ float block_sum(float x, float* sums) {
#pragma unroll
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
  if (lane == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();
  x = lane < warps ? sums[lane] : 0.f;
#pragma unroll
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

template <typename T, int kVector, int kUnits>
__global__ void __launch_bounds__(kUnits < 8 ? kThreads : 1024) residual_norm_kernel(const ResidualNormArgs a) {
  __shared__ float sums[2][32];
  const int64_t row = blockIdx.x;
  const int dim = static_cast<int>(a.dim);
  const auto column = [](int i) { return static_cast<int>(threadIdx.x + i * blockDim.x) * kVector; };
  const auto row_of = [&](const Row& r) { return reinterpret_cast<T*>(r.data + row * r.row); };
  Pack<T, kVector> held[kUnits], delta[kUnits];
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    if (column(i) >= dim) continue;
    held[i] = *reinterpret_cast<const Pack<T, kVector>*>(row_of(a.x) + column(i));
    if (a.delta.data) delta[i] = *reinterpret_cast<const Pack<T, kVector>*>(row_of(a.delta) + column(i));
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    if (column(i) >= dim) continue;
    if (a.delta.data) {
      Floats<kVector> gate;
      if (a.gate.data) gate = load<kVector>(a.gate, row, column(i));
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const float x = to_float(held[i].x[j]), y = to_float(delta[i].x[j]);
        held[i].x[j] = from_float<T>(a.gate.data ? __fmaf_rn(y, gate.x[j], x) : x + y);
      }
      *reinterpret_cast<Pack<T, kVector>*>(row_of(a.sum_out) + column(i)) = held[i];
    }
#pragma unroll
    for (int j = 0; j < kVector; ++j) sum += to_float(held[i].x[j]);
  }
  if (!a.norm_out.data) return;
  const float mean = block_sum(sum, sums[0]) / dim;
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    if (column(i) >= dim) continue;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const float x = to_float(held[i].x[j]) - mean;
      squares += x * x;
    }
  }
  const float inverse = rsqrtf(block_sum(squares, sums[1]) / dim + a.eps);
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    if (column(i) >= dim) continue;
    Floats<kVector> scale, shift;
    if (a.scale.data) scale = load<kVector>(a.scale, row, column(i)), shift = load<kVector>(a.shift, row, column(i));
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      float x = (to_float(held[i].x[j]) - mean) * inverse;
      if (a.scale.data) x = x * (a.scale_offset + scale.x[j]) + shift.x[j];
      held[i].x[j] = from_float<T>(x);
    }
    *reinterpret_cast<Pack<T, kVector>*>(row_of(a.norm_out) + column(i)) = held[i];
  }
}

template <typename T, int kVector>
void launch(const ResidualNormArgs& a, cudaStream_t stream) {
  const int64_t units = ceil_div(a.dim, kVector);
  const auto run = [&](auto kernel, int each) {
    const int threads = static_cast<int>(ceil_div(ceil_div(units, each), 32) * 32);
    kernel<<<static_cast<unsigned>(a.rows), threads, 0, stream>>>(a);
  };
  if (units <= kThreads) return run(residual_norm_kernel<T, kVector, 1>, 1);
  if (units <= 2 * kThreads) return run(residual_norm_kernel<T, kVector, 2>, 2);
  if (units <= 4 * kThreads) return run(residual_norm_kernel<T, kVector, 4>, 4);
  run(residual_norm_kernel<T, kVector, 8>, 8);  // at most 8192 elements: 1024 threads
}

template <typename T>
void launch(const ResidualNormArgs& a, cudaStream_t stream) {
  constexpr int kVector = 16 / sizeof(T);
  if (a.vectors) return launch<T, kVector>(a, stream);
  launch<T, 1>(a, stream);
}

}  // namespace

void residual_norm(const ResidualNormArgs& a, cudaStream_t stream) {
  switch (a.kind) {
    case Float::f32: return launch<float>(a, stream);
    case Float::f16: return launch<__half>(a, stream);
    case Float::bf16: return launch<__nv_bfloat16>(a, stream);
  }
}

}  // namespace bc
