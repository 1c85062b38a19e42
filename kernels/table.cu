// The page table: advancing a rollout's state, rotating the ring of pages.
#include "launch.h"

namespace bc {
namespace {

// state: committed, pin_tokens, evicted pages, pages this commit evicted, committed before this commit.
__global__ void advance_kernel(int64_t* state, int64_t num_tokens, int64_t window_tokens, int page_shift) {
  const int64_t before = state[0], pin = state[1], evicted = state[2];
  const int64_t committed = before + num_tokens;
  const int64_t start = max(min(pin, committed), committed - window_tokens);
  const int64_t now = max(static_cast<int64_t>(0), start - pin) >> page_shift;
  state[0] = committed;
  state[2] = now;
  state[3] = now - evicted;
  state[4] = before;
}

__device__ int64_t positive_shift(const int64_t* shift, int64_t length) {
  const int64_t s = *shift % length;
  return s < 0 ? s + length : s;
}

// A row that fits in shared memory is read once and written once.
template <typename T>
__global__ void rotate_through_shared(T* rows, int64_t num_rows, int length, int64_t row_stride,
                                      const int64_t* shift) {
  extern __shared__ uint64_t storage[];
  T* turned = reinterpret_cast<T*>(storage);
  const int s = static_cast<int>(positive_shift(shift, length));
  if (s == 0) return;
  for (int64_t row = blockIdx.x; row < num_rows; row += gridDim.x) {
    T* const here = rows + row * row_stride;
    for (int i = threadIdx.x; i < length; i += blockDim.x) turned[i] = here[i + s < length ? i + s : i + s - length];
    __syncthreads();
    for (int i = threadIdx.x; i < length; i += blockDim.x) here[i] = turned[i];
    __syncthreads();
  }
}

template <typename T>
__device__ void reverse(T* begin, int64_t length) {
  for (int64_t i = threadIdx.x; i < length / 2; i += blockDim.x) {
    const T first = begin[i];
    begin[i] = begin[length - 1 - i];
    begin[length - 1 - i] = first;
  }
  __syncthreads();
}

// A longer row is rotated in place by three reversals, which need no second copy of it.
template <typename T>
__global__ void rotate_by_reversals(T* rows, int64_t num_rows, int64_t length, int64_t row_stride,
                                    const int64_t* shift) {
  const int64_t s = positive_shift(shift, length);
  if (s == 0) return;
  for (int64_t row = blockIdx.x; row < num_rows; row += gridDim.x) {
    T* const here = rows + row * row_stride;
    reverse(here, s);
    reverse(here + s, length - s);
    reverse(here, length);
  }
}

template <typename T>
void rotate(void* rows, int64_t num_rows, int64_t length, int64_t row_stride, const int64_t* shift,
            cudaStream_t stream) {
  constexpr int64_t shared_bytes = 48 << 10, most_blocks = 1 << 20;
  const int threads = power_of_two_from(length, 1024) < 32 ? 32 : power_of_two_from(length, 1024);
  const unsigned blocks = static_cast<unsigned>(num_rows < most_blocks ? num_rows : most_blocks);
  T* const data = static_cast<T*>(rows);
  if (length * static_cast<int64_t>(sizeof(T)) <= shared_bytes) {
    rotate_through_shared<T><<<blocks, threads, length * sizeof(T), stream>>>(data, num_rows, static_cast<int>(length),
                                                                              row_stride, shift);
  } else {
    rotate_by_reversals<T><<<blocks, threads, 0, stream>>>(data, num_rows, length, row_stride, shift);
  }
}

}  // namespace

void advance_state(int64_t* state, int64_t num_tokens, int64_t window_tokens, int page_shift, cudaStream_t stream) {
  advance_kernel<<<1, 1, 0, stream>>>(state, num_tokens, window_tokens, page_shift);
}

void rotate_rows(void* rows, int64_t num_rows, int64_t length, int64_t row_stride, int element_size,
                 const int64_t* shift, cudaStream_t stream) {
  switch (element_size) {  // row_stride counts elements here
    case 1: return rotate<uint8_t>(rows, num_rows, length, row_stride, shift, stream);
    case 2: return rotate<uint16_t>(rows, num_rows, length, row_stride, shift, stream);
    case 4: return rotate<uint32_t>(rows, num_rows, length, row_stride, shift, stream);
    default: return rotate<uint64_t>(rows, num_rows, length, row_stride, shift, stream);
  }
}

}  // namespace bc
