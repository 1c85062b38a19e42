// Cuts page lists for attention over several sequences: one thread an entry of the tables, each a function of state,
// lists and its own index alone (the formulas are in bc_diffusers/ops/splits.py).
#include "launch.h"

namespace bc {
namespace {

constexpr int kThreads = 128;

__device__ int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
__device__ int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// The table pages that causal block j sees whole: [0, a) and [first, last).
struct FullPages {
  int64_t a, first, last;

  __device__ FullPages(const SplitArgs& args, int64_t j) {
    const int64_t mask = (static_cast<int64_t>(1) << args.page_shift) - 1;
    const int64_t pin = args.state[1], start = args.state[0] + j * args.causal_block_size;
    const int64_t off = (-pin & mask) - (args.state[2] << args.page_shift);
    const int64_t a_end = least(pin, start);
    const int64_t begin = start > pin ? most(pin, start - args.window_tokens) + off : a_end;
    const int64_t end = start > pin ? start + off : a_end;
    a = a_end >> args.page_shift;
    first = (begin + mask) >> args.page_shift;
    last = most(first, end >> args.page_shift);
  }
};

__global__ void __launch_bounds__(kThreads) split_kernel(const SplitArgs args) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= args.rows * args.width) return;
  const int64_t row = at / args.width, column = at % args.width, size = static_cast<int64_t>(1) << args.page_shift;
  const int64_t runs = args.blocks > 1 ? args.rows - args.blocks : args.rows;
  const auto page = [&](int64_t block, int64_t entry) {
    return entry < args.list_length ? args.pages[block * args.list_length + entry] : 0;
  };

  // Shared pages: entries [0, fixed) of the first causal block's list, then [skip, skip + shared - fixed).
  int64_t fixed = 0, begin = 0, end = 0, skip = 0, shared = 0, shared_keys = 0;
  if (args.blocks > 1) {
    const FullPages front(args, 0), back(args, args.blocks - 1);
    fixed = front.a, begin = back.first, end = most(front.last, begin);
    skip = fixed + begin - front.first;
    shared = fixed + end - begin, shared_keys = shared << args.page_shift;
  } else {
    shared_keys = args.totals[0];
    shared = (shared_keys + size - 1) >> args.page_shift;
  }

  int64_t entry = 0, keys = 0;
  if (row < runs) {
    const int64_t each = (shared + runs - 1) / runs, i = row * each + column;
    if (column < each && i < shared) entry = page(0, i < fixed ? i : skip + i - fixed);
    keys = most(0, least(shared_keys - ((row * each) << args.page_shift), each << args.page_shift));
  } else {
    const int64_t j = row - runs;
    const FullPages own(args, j);
    const int64_t head = own.a - fixed + least(begin, own.last) - own.first;
    const int64_t after = own.a + least(end, own.last) - own.first;
    entry = page(j, column < head ? fixed + column : after + column - head);
    keys = most(0, args.totals[j] - shared_keys);
  }
  args.tables[at] = static_cast<int32_t>(entry);
  if (column == 0) {
    args.keys[row] = static_cast<int32_t>(keys);
    args.lens[row] = static_cast<int32_t>(most(keys, 1));
  }
}

}  // namespace

void split_page_lists(const SplitArgs& args, cudaStream_t stream) {
  const int64_t entries = args.rows * args.width;
  split_kernel<<<static_cast<unsigned>(ceil_div(entries, kThreads)), kThreads, 0, stream>>>(args);
}

}  // namespace bc
