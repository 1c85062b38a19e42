// Everything a commit rewrites besides the pool, in one launch: one thread an entry of the flat output lists. Each entry
// is a function of state, page table and its own index alone (the formulas are in bc_diffusers/ops/layout.py), so no
// thread waits for another.
#include "launch.h"

namespace bc {
namespace {

constexpr int kThreads = 128;

// A row of `sizes`: one causal-block size, its bounds and where its part begins in each flat list.
struct Size {
  int size, count, private_pages, list_length, rows, extra, at_block, at_pages, at_private, at_copy, at_scatter;
};

struct Table {
  const LayoutArgs& args;
  int64_t committed, pin, before, base, off;

  __device__ explicit Table(const LayoutArgs& a) : args(a) {
    committed = a.state[0];
    pin = a.state[1];
    const int64_t evicted = a.state[2];
    before = a.state[4];
    const int64_t pad = -pin & mask();
    base = (pin + pad) >> a.page_shift;
    off = pad - (evicted << a.page_shift);
  }
  __device__ int64_t mask() const { return (static_cast<int64_t>(1) << args.page_shift) - 1; }
  __device__ int page_at(int64_t i) const {
    if (i < base && args.num_fixed) return args.fixed[max(static_cast<int64_t>(0), min(i, args.num_fixed - 1))];
    return args.ring[max(static_cast<int64_t>(0), min(i - base, args.num_ring - 1))];
  }
  __device__ int slot_at(int64_t y) const {
    return (page_at(y >> args.page_shift) << args.page_shift) + static_cast<int>(y & mask());
  }
};

// Causal block j of a size: its key list is fully visible pages, then private pages that begin with copied slots.
struct CausalBlock {
  int64_t a_pages, tail, b_begin, first, last, head, full_pages, copied;

  __device__ CausalBlock(const Table& t, const Size& s, int j) {
    const int shift = t.args.page_shift;
    const int64_t start = t.committed + static_cast<int64_t>(j) * s.size;
    const int64_t a_end = min(t.pin, start);
    const bool has_b = start > t.pin;
    b_begin = has_b ? max(t.pin, start - t.args.window_tokens) + t.off : a_end;
    const int64_t b_end = has_b ? start + t.off : a_end;
    a_pages = a_end >> shift;
    tail = a_end & t.mask();
    first = (b_begin + t.mask()) >> shift;
    last = b_end >> shift;
    head = min(b_end, first << shift) - b_begin;
    const int64_t own_start = last >= first ? b_end - (last << shift) : 0;
    full_pages = a_pages + max(last - first, static_cast<int64_t>(0));
    copied = tail + head + own_start;
  }
  __device__ int64_t table_slot(int64_t q, int shift) const {
    if (q < tail) return (a_pages << shift) + q;
    if (q < tail + head) return b_begin + q - tail;
    return (last << shift) + q - tail - head;
  }
};

__device__ int private_slot(const LayoutArgs& a, const Size& s, int j, int64_t q) {
  const int page = a.private_pages[s.at_private + j * s.private_pages + (q >> a.page_shift)];
  return (page << a.page_shift) + static_cast<int>(q & ((static_cast<int64_t>(1) << a.page_shift) - 1));
}

__device__ void list_page(const Table& t, const Size& s, int64_t at) {
  const LayoutArgs& a = t.args;
  const int local = static_cast<int>(at - s.at_pages), j = local / s.list_length, i = local % s.list_length;
  const CausalBlock b(t, s, j);
  int page = 0;
  if (i < b.full_pages) {
    page = t.page_at(i < b.a_pages ? i : b.first + i - b.a_pages);
  } else if (i < b.full_pages + s.private_pages) {
    page = a.private_pages[s.at_private + j * s.private_pages + (i - b.full_pages)];
  }
  a.pages[at] = page;
}

__device__ void list_copy(const Table& t, const Size& s, int64_t at) {
  const LayoutArgs& a = t.args;
  const int copied_slots = static_cast<int>(a.copied_slots), local = static_cast<int>(at - s.at_copy);
  const int j = local / copied_slots, q = local % copied_slots;
  const CausalBlock b(t, s, j);
  const int64_t y = b.table_slot(q, a.page_shift), x = y < t.pin ? y : y - t.off;
  // Once the fixed region is full its tail never moves, and its private copies stay where they are.
  const bool copy = q < b.copied && x < t.committed && (y >= t.pin || t.before < t.pin);
  a.copy_src[at] = copy ? t.slot_at(y) : -1;
  a.copy_dst[at] = copy ? private_slot(a, s, j, q) : -1;
}

__device__ void list_scatter(const Table& t, const Size& s, int64_t at) {
  const LayoutArgs& a = t.args;
  const int local = static_cast<int>(at - s.at_scatter);
  int src, dst, dst2 = -1;
  if (local < s.rows) {
    const int j = local / s.size, own = local % s.size;
    const int64_t x = t.committed + local;
    src = local;
    dst = t.slot_at(x < t.pin ? x : x + t.off);
    dst2 = private_slot(a, s, j, CausalBlock(t, s, j).copied + own);
  } else {
    // A copied slot whose token is not committed was staged by an earlier causal block of the same forward.
    const int copied_slots = static_cast<int>(a.copied_slots), entry = local - s.rows;
    const int j = 1 + entry / copied_slots, q = entry % copied_slots;
    const CausalBlock b(t, s, j);
    const int64_t y = b.table_slot(q, a.page_shift), x = y < t.pin ? y : y - t.off;
    const bool staged = q < b.copied && x >= t.committed;
    src = staged ? static_cast<int>(x - t.committed) : -1;
    dst = staged ? private_slot(a, s, j, q) : -1;
  }
  a.scatter_src[at] = src;
  a.scatter_dst[at] = dst;
  a.scatter_dst2[at] = dst2;
}

__global__ void __launch_bounds__(kThreads) layout_kernel(const LayoutArgs a) {
  int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const Table table(a);
  int list = 0;  // which flat list: pages, lengths, copy, scatter
  const int64_t ends[] = {a.num_pages, a.num_lengths, a.num_copy, a.num_scatter};
  while (list < 4 && at >= ends[list]) at -= ends[list++];
  if (list == 4) return;
  const Size* const sizes = reinterpret_cast<const Size*>(a.sizes);
  for (int64_t i = 0; i < a.num_sizes; ++i) {  // entries between two sizes' parts belong to none and stay as they are
    const Size s = sizes[i];
    const auto within = [at](int begin, int64_t length) { return at >= begin && at < begin + length; };
    if (list == 0 && within(s.at_pages, static_cast<int64_t>(s.count) * s.list_length)) return list_page(table, s, at);
    if (list == 1 && within(s.at_block, s.count)) {
      const CausalBlock b(table, s, static_cast<int>(at - s.at_block));
      a.lengths[at] = static_cast<int>((b.full_pages << a.page_shift) + b.copied);
      return;
    }
    if (list == 2 && within(s.at_copy, s.count * a.copied_slots)) return list_copy(table, s, at);
    if (list == 3 && within(s.at_scatter, static_cast<int64_t>(s.rows) + s.extra)) return list_scatter(table, s, at);
  }
}

}  // namespace

void block_causal_layout(const LayoutArgs& args, cudaStream_t stream) {
  const int64_t entries = args.num_pages + args.num_lengths + args.num_copy + args.num_scatter;
  layout_kernel<<<static_cast<unsigned>(ceil_div(entries, kThreads)), kThreads, 0, stream>>>(args);
}

}  // namespace bc
