// What the bindings hand to the kernels: plain structs, all strides in bytes, and one launcher an operator.
// Only bindings.cu includes torch's headers, so that the kernels compile in a second or two.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <initializer_list>

namespace bc {

enum class Float : int { f32, f16, bf16 };

// A pool [layers, pages, 2, kv_heads, page, head_dim]; `layer` is 0 for one layer's view.
struct Pool {
  char* data;
  int64_t layer, page, kv, head, slot;
  int page_shift;
};

// Keys of each causal block, own tokens included; written by whatever writes the own tokens.
struct Totals {
  const int32_t* lengths;
  int32_t* totals;
  int64_t count, causal_block_size;
};

// Entry i copies row src[i] (row i without src) to slots dst[i] and dst2[i]. Negative ones are skipped.
struct Entries {
  const int32_t *src, *dst, *dst2;
  int64_t count, num_tokens;
};

// A tensor [rows, heads, head_dim] whose last dimension is contiguous.
struct Rows {
  char* data;
  int64_t row, head;
};

struct LayoutArgs {
  const int64_t* state;
  const int32_t *fixed, *ring, *sizes, *private_pages;
  int32_t *pages, *lengths, *copy_src, *copy_dst, *scatter_src, *scatter_dst, *scatter_dst2;
  int64_t num_fixed, num_ring, num_sizes, num_pages, num_lengths, num_copy, num_scatter;
  int64_t window_tokens, copied_slots;
  int page_shift;
};

struct SplitArgs {
  const int64_t* state;
  const int32_t *pages, *totals;
  int32_t *tables, *keys, *lens;
  int64_t blocks, list_length, rows, width, causal_block_size, window_tokens;
  int page_shift;
};

struct MergeArgs {
  const char* partials;  // [n, rows, heads, head_dim]
  const char* lse;       // [n, rows, heads], fp32; without the last partial's if there is a tail
  const char* tail_lse;  // null, or [blocks, size, heads], fp32, of the last partial
  const int32_t* keys;   // null, or [n]: 0 for an empty partial (never the tail)
  char* out;             // [rows, heads, head_dim]
  int64_t partial_n, partial_row, partial_head, lse_n, lse_row, lse_head, out_row, out_head;
  int64_t tail_block, tail_row, tail_head, tail_size;
  int64_t n, rows, heads, head_dim, num_tokens;
  Float in_kind, out_kind;
  bool vectors;  // every row of head_dim begins on 16 bytes, and head_dim is a multiple of 8
};

struct NormRopeArgs {
  struct Part {
    Rows in, out;  // out.data is null where the result goes to the pool
    const void* weight;
    Float weight_kind;
    bool over_all_heads;
    int heads;
  } q, k;
  Rows v;
  Pool pool;  // pool.data is null without a slot write
  Entries entries;
  Totals totals;
  const float *cos, *sin;
  int64_t rows;
  int head_dim;
  float eps;
  bool interleaved;
  Float kind;
  bool vectors;  // as in MergeArgs
};

// A tensor [rows, dim] whose last dimension is contiguous; the stride in bytes.
struct Row {
  char* data;
  int64_t row;
};

// A float tensor [1 or rows, dim], or nothing; `row` in elements, 0 if one row serves all.
struct Modulation {
  const void* data;
  int64_t row;
  Float kind;
};

struct ResidualNormArgs {
  Row x, delta, sum_out, norm_out;
  Modulation gate, scale, shift;
  int64_t rows, dim;
  float scale_offset, eps;
  Float kind;
  bool vectors;  // every row begins on 16 bytes and is a multiple of them
};

void advance_state(int64_t* state, int64_t num_tokens, int64_t window_tokens, int page_shift, cudaStream_t stream);
void rotate_rows(void* rows, int64_t num_rows, int64_t length, int64_t row_stride, int element_size,
                 const int64_t* shift, cudaStream_t stream);
void block_causal_layout(const LayoutArgs& args, cudaStream_t stream);
void scatter_kv_slots(const Rows& k, const Rows& v, const Pool& pool, const Entries& entries, const Totals& totals,
                      int heads, int64_t row_bytes, cudaStream_t stream);
void copy_kv_slots(const Pool& pool, const int32_t* src, const int32_t* dst, int64_t count, int64_t layers, int heads,
                   int64_t row_bytes, cudaStream_t stream);
void split_page_lists(const SplitArgs& args, cudaStream_t stream);
void merge_partials(const MergeArgs& args, cudaStream_t stream);
void qk_norm_rope(const NormRopeArgs& args, cudaStream_t stream);
void residual_norm(const ResidualNormArgs& args, cudaStream_t stream);

// The widest access, up to 16 bytes, that all these addresses, strides and sizes (in bytes) are multiples of.
inline int common_width(std::initializer_list<int64_t> values) {
  int64_t all = 16;
  for (int64_t value : values) all |= value;
  return static_cast<int>(all & -all);
}

inline int64_t address(const void* pointer) { return static_cast<int64_t>(reinterpret_cast<intptr_t>(pointer)); }

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int power_of_two_from(int64_t n, int most) {
  int p = 1;
  while (p < n && p < most) p *= 2;
  return p;
}

}  // namespace bc
