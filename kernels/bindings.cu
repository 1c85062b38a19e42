// The CUDA implementations of the operators that bc_diffusers/ops/schemas.py declares: what they refuse, what they make
// of their arguments, and their registration. The only source that includes torch's headers.
#include "tensors.h"

namespace bc {
namespace {

using Optional = std::optional<Tensor>;

void rotate_rows_(const Tensor rows_, const Tensor shift_) {
  const Arg rows(rows_), shift(shift_);
  BC_REQUIRE(rows.dim == 1 || rows.dim == 2, "rotate_rows_: rows must be [n] or [m, n], got ", shape(rows));
  const int64_t bytes = rows.element_size();
  BC_REQUIRE(bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8, "rotate_rows_: no element size of ", bytes,
             " bytes");
  BC_REQUIRE(rows.size(-1) <= 1 || rows.stride(-1) == 1, "rotate_rows_: last stride must be 1, got ", strides(rows));
  BC_REQUIRE(rows.dim == 1 || rows.size(0) <= 1 || rows.stride(0) >= rows.size(1),
             "rotate_rows_: rows overlap, strides ", strides(rows));
  BC_REQUIRE(shift.is_int64() && shift.numel == 1, "rotate_rows_: shift must be one int64, got ", dtype(shift), ' ',
             shape(shift));
  same_device("rotate_rows_", {{"rows", &rows}, {"shift", &shift}});
  if (rows.numel == 0) return;
  const OnDeviceOf device(rows);
  const int64_t count = rows.dim == 2 ? rows.size(0) : 1, stride = rows.dim == 2 ? rows.stride(0) : 0;
  rotate_rows(rows.data, count, rows.size(-1), stride, static_cast<int>(bytes), shift.as<int64_t>(), device.stream());
  check_launch("rotate_rows_");
}

int check_state(const Arg& state, int64_t num_tokens, int64_t window_tokens, int64_t page_size) {
  BC_REQUIRE(state.is_int64() && state.dim == 1 && state.size(0) == 5 && state.contiguous(),
             "advance_state_: state must be contiguous int64 [5], got ", dtype(state), ' ', shape(state));
  BC_REQUIRE(num_tokens >= 0 && window_tokens >= 0, "advance_state_: negative count (", num_tokens, ", ",
             window_tokens, ")");
  return page_shift("advance_state_", page_size);
}

void advance_state_(const Tensor state_, int64_t num_tokens, int64_t window_tokens, int64_t page_size) {
  const Arg state(state_);
  const int shift = check_state(state, num_tokens, window_tokens, page_size);
  const OnDeviceOf device(state);
  advance_state(state.as<int64_t>(), num_tokens, window_tokens, shift, device.stream());
  check_launch("advance_state_");
}

struct LayoutTensors {
  const Arg state, fixed, ring, sizes, private_pages, pages, lengths, copy_src, copy_dst, scatter_src, scatter_dst;
  const Arg scatter_dst2;
};

LayoutArgs check_layout(const LayoutTensors& t, int64_t page_size, int64_t window_tokens, int64_t copied_slots) {
  const char* const op = "block_causal_layout_";
  const int shift = check_state(t.state, 0, window_tokens, page_size);
  const std::vector<Named> lists = {{"fixed", &t.fixed}, {"ring", &t.ring}, {"private_pages", &t.private_pages},
                                    {"pages", &t.pages}, {"lengths", &t.lengths}, {"copy_src", &t.copy_src},
                                    {"copy_dst", &t.copy_dst}, {"scatter_src", &t.scatter_src},
                                    {"scatter_dst", &t.scatter_dst}, {"scatter_dst2", &t.scatter_dst2}};
  for (const auto& [name, list] : lists) int32_list(op, name, *list);
  int32_list(op, "copy_dst", t.copy_dst, t.copy_src.size(0));
  int32_list(op, "scatter_dst", t.scatter_dst, t.scatter_src.size(0));
  int32_list(op, "scatter_dst2", t.scatter_dst2, t.scatter_src.size(0));
  BC_REQUIRE(t.ring.size(0) > 0, op, ": ring is empty");
  BC_REQUIRE(copied_slots >= 0, op, ": copied_slots ", copied_slots, " is negative");
  BC_REQUIRE(t.sizes.is_int32() && t.sizes.dim == 2 && t.sizes.size(1) == 11 && t.sizes.contiguous(), op,
             ": sizes must be contiguous int32 [num_sizes, 11], got ", dtype(t.sizes), ' ', shape(t.sizes));
  std::vector<Named> all = {{"state", &t.state}, {"sizes", &t.sizes}};
  all.insert(all.end(), lists.begin(), lists.end());
  same_device(op, all);

  LayoutArgs args{};
  args.state = t.state.as<int64_t>();
  args.fixed = t.fixed.as<int32_t>(), args.ring = t.ring.as<int32_t>(), args.sizes = t.sizes.as<int32_t>();
  args.private_pages = t.private_pages.as<int32_t>(), args.pages = t.pages.as<int32_t>();
  args.lengths = t.lengths.as<int32_t>();
  args.copy_src = t.copy_src.as<int32_t>(), args.copy_dst = t.copy_dst.as<int32_t>();
  args.scatter_src = t.scatter_src.as<int32_t>(), args.scatter_dst = t.scatter_dst.as<int32_t>();
  args.scatter_dst2 = t.scatter_dst2.as<int32_t>();
  args.num_fixed = t.fixed.numel, args.num_ring = t.ring.numel, args.num_sizes = t.sizes.size(0);
  args.num_pages = t.pages.numel, args.num_lengths = t.lengths.numel;
  args.num_copy = t.copy_src.numel, args.num_scatter = t.scatter_src.numel;
  args.window_tokens = window_tokens, args.copied_slots = copied_slots, args.page_shift = shift;
  return args;
}

bool writes_nothing(const LayoutArgs& a) {
  return a.num_sizes == 0 || a.num_pages + a.num_lengths + a.num_copy + a.num_scatter == 0;
}

void block_causal_layout_(const Tensor state, const Tensor fixed, const Tensor ring, const Tensor sizes,
                          const Tensor private_pages, const Tensor pages, const Tensor lengths, const Tensor copy_src,
                          const Tensor copy_dst, const Tensor scatter_src, const Tensor scatter_dst,
                          const Tensor scatter_dst2, int64_t page_size, int64_t window_tokens, int64_t copied_slots) {
  const LayoutTensors t{state,   fixed,    ring,     sizes,       private_pages, pages,
                        lengths, copy_src, copy_dst, scatter_src, scatter_dst,   scatter_dst2};
  const LayoutArgs args = check_layout(t, page_size, window_tokens, copied_slots);
  if (writes_nothing(args)) return;
  const OnDeviceOf device(t.state);
  block_causal_layout(args, device.stream());
  check_launch("block_causal_layout_");
}

Pool check_kv_and_pool(const char* op, const Arg& k, const Arg& v, const Arg& pool) {
  BC_REQUIRE(pool.dim == 5 && pool.size(1) == 2 && pool.stride(-1) == 1, op,
             ": layer_pool must be [pages, 2, kv_heads, page_size, head_dim], got ", shape(pool));
  const int shift = page_shift(op, pool.size(3));
  const int64_t heads = pool.size(2), dim = pool.size(4);
  for (const auto& [name, t] : {Named("k", &k), Named("v", &v)}) {
    BC_REQUIRE(t->dim == 3 && t->size(1) == heads && t->size(2) == dim, op, ": ", name, " must be [rows, ", heads,
               ", ", dim, "] to fit the pool, got ", shape(*t));
    BC_REQUIRE(dim <= 1 || t->stride(-1) == 1, op, ": the last stride of ", name, " must be 1, got ", strides(*t));
    BC_REQUIRE(t->dtype == pool.dtype, op, ": ", name, " is ", dtype(*t), ", the pool ", dtype(pool));
  }
  BC_REQUIRE(k.size(0) == v.size(0), op, ": k has ", k.size(0), " rows, v ", v.size(0));
  same_device(op, {{"k", &k}, {"v", &v}, {"layer_pool", &pool}});
  return {pool.data, 0, pool.bytes(0), pool.bytes(1), pool.bytes(2), pool.bytes(3), shift};
}

Entries check_entries(const char* op, int64_t rows, const Arg& pool, const Arg& dst, const Arg& dst2, const Arg& src,
                      int64_t num_tokens, const Arg& lengths, const Arg& totals, int64_t causal_block_size) {
  int32_list(op, "dst", dst);
  for (const auto& [name, t] : {Named("dst2", &dst2), Named("src", &src)}) {
    if (t->given) int32_list(op, name, *t, dst.size(0));
  }
  BC_REQUIRE(-1 <= num_tokens && num_tokens <= rows, op, ": num_tokens ", num_tokens, " is not within the ", rows,
             " rows");
  BC_REQUIRE(lengths.given == totals.given, op, ": lengths and totals go together");
  if (totals.given) {
    int32_list(op, "lengths", lengths);
    int32_list(op, "totals", totals, lengths.size(0));
    BC_REQUIRE(causal_block_size > 0, op, ": totals need a causal_block_size > 0, got ", causal_block_size);
  }
  same_device(op, {{"layer_pool", &pool}, {"dst", &dst}, {"dst2", &dst2}, {"src", &src}, {"lengths", &lengths},
                   {"totals", &totals}});
  return {src.as<int32_t>(), dst.as<int32_t>(), dst2.as<int32_t>(), dst.size(0), num_tokens < 0 ? rows : num_tokens};
}

Totals totals_of(const Arg& lengths, const Arg& totals, int64_t causal_block_size) {
  return {lengths.as<int32_t>(), totals.as<int32_t>(), totals.numel, causal_block_size};
}

Rows rows_of(const Arg& t) { return {t.data, t.bytes(0), t.bytes(1)}; }

void scatter_kv_slots_(const Tensor k_, const Tensor v_, const Tensor layer_pool_, const Tensor dst_,
                       const Optional dst2_, const Optional src_, int64_t num_tokens, const Optional lengths_,
                       const Optional totals_, int64_t causal_block_size) {
  const char* const op = "scatter_kv_slots_";
  const Arg k(k_), v(v_), layer_pool(layer_pool_), dst(dst_), dst2(dst2_), src(src_), lengths(lengths_);
  const Arg totals(totals_);
  const Pool pool = check_kv_and_pool(op, k, v, layer_pool);
  const Entries entries = check_entries(op, k.size(0), layer_pool, dst, dst2, src, num_tokens, lengths, totals,
                                        causal_block_size);
  if ((entries.count == 0 || k.numel == 0) && totals.numel == 0) return;
  const OnDeviceOf device(layer_pool);
  scatter_kv_slots(rows_of(k), rows_of(v), pool, entries, totals_of(lengths, totals, causal_block_size),
                   static_cast<int>(k.size(1)), k.size(2) * k.element_size(), device.stream());
  check_launch(op);
}

Pool check_copy(const Arg& pool, const Arg& src, const Arg& dst) {
  const char* const op = "copy_kv_slots_";
  BC_REQUIRE(pool.dim == 6 && pool.size(2) == 2 && pool.stride(-1) == 1, op,
             ": pool must be [layers, pages, 2, kv_heads, page_size, head_dim], got ", shape(pool));
  const int shift = page_shift(op, pool.size(4));
  int32_list(op, "src", src);
  int32_list(op, "dst", dst, src.size(0));
  same_device(op, {{"pool", &pool}, {"src", &src}, {"dst", &dst}});
  return {pool.data, pool.bytes(0), pool.bytes(1), pool.bytes(2), pool.bytes(3), pool.bytes(4), shift};
}

void launch_copy(const Pool& slots, const Arg& pool, const Arg& src, const Arg& dst, cudaStream_t stream) {
  copy_kv_slots(slots, src.as<int32_t>(), dst.as<int32_t>(), src.numel, pool.size(0), static_cast<int>(pool.size(3)),
                pool.size(5) * pool.element_size(), stream);
}

void copy_kv_slots_(const Tensor pool_, const Tensor src_, const Tensor dst_) {
  const Arg pool(pool_), src(src_), dst(dst_);
  const Pool slots = check_copy(pool, src, dst);
  if (src.numel == 0 || pool.numel == 0) return;
  const OnDeviceOf device(pool);
  launch_copy(slots, pool, src, dst, device.stream());
  check_launch("copy_kv_slots_");
}

void commit_(const Tensor pool_, const Tensor state, const Tensor fixed, const Tensor ring, const Tensor sizes,
             const Tensor private_pages, const Tensor pages, const Tensor lengths, const Tensor copy_src,
             const Tensor copy_dst, const Tensor scatter_src, const Tensor scatter_dst, const Tensor scatter_dst2,
             int64_t num_tokens, int64_t page_size, int64_t window_tokens, int64_t copied_slots) {
  const Arg pool(pool_);
  const LayoutTensors t{state,   fixed,    ring,     sizes,       private_pages, pages,
                        lengths, copy_src, copy_dst, scatter_src, scatter_dst,   scatter_dst2};
  const int shift = check_state(t.state, num_tokens, window_tokens, page_size);
  const LayoutArgs layout = check_layout(t, page_size, window_tokens, copied_slots);
  const Pool slots = check_copy(pool, t.copy_src, t.copy_dst);
  BC_REQUIRE(pool.size(4) == page_size, "commit_: page_size ", page_size, ", but the pool's is ", pool.size(4));
  const OnDeviceOf device(t.state);
  const cudaStream_t stream = device.stream();
  int64_t* const values = t.state.as<int64_t>();
  advance_state(values, num_tokens, window_tokens, shift, stream);
  rotate_rows(t.ring.data, 1, t.ring.numel, 0, 4, values + 3, stream);
  if (!writes_nothing(layout)) block_causal_layout(layout, stream);
  if (t.copy_src.numel && pool.numel) launch_copy(slots, pool, t.copy_src, t.copy_dst, stream);
  check_launch("commit_");
}

void split_page_lists_(const Tensor state_, const Tensor pages_, const Tensor totals_, const Tensor tables_,
                       const Tensor keys_, const Tensor lens_, int64_t causal_block_size, int64_t window_tokens,
                       int64_t page_size) {
  const char* const op = "split_page_lists_";
  const Arg state(state_), pages(pages_), totals(totals_), tables(tables_), keys(keys_), lens(lens_);
  const int shift = check_state(state, 0, window_tokens, page_size);
  for (const auto& [name, t] : {Named("pages", &pages), Named("tables", &tables)}) {
    BC_REQUIRE(t->is_int32() && t->dim == 2 && t->contiguous() && t->size(1) > 0, op, ": ", name,
               " must be contiguous int32 [rows, entries], got ", dtype(*t), ' ', shape(*t));
  }
  const int64_t blocks = pages.size(0), rows = tables.size(0);
  BC_REQUIRE(blocks > 0 && rows > (blocks > 1 ? blocks : 0), op, ": ", rows, " rows of tables for ", blocks,
             " causal blocks");
  int32_list(op, "totals", totals, blocks);
  int32_list(op, "keys", keys, rows);
  int32_list(op, "lens", lens, rows);
  BC_REQUIRE(causal_block_size > 0, op, ": causal_block_size must be > 0, got ", causal_block_size);
  same_device(op, {{"state", &state}, {"pages", &pages}, {"totals", &totals}, {"tables", &tables}, {"keys", &keys},
                   {"lens", &lens}});
  const OnDeviceOf device(state);
  split_page_lists({state.as<int64_t>(), pages.as<int32_t>(), totals.as<int32_t>(), tables.as<int32_t>(),
                    keys.as<int32_t>(), lens.as<int32_t>(), blocks, pages.size(1), rows, tables.size(1),
                    causal_block_size, window_tokens, shift},
                   device.stream());
  check_launch(op);
}

void merge_partials_(const Tensor partials_, const Tensor lse_, const Tensor out_, int64_t num_tokens,
                     const Optional keys_, const Optional tail_lse_) {
  const char* const op = "merge_partials_";
  const Arg partials(partials_), lse(lse_), out(out_), keys(keys_), tail(tail_lse_);
  BC_REQUIRE(partials.dim == 4 && partials.stride(-1) == 1, op,
             ": partials must be [n, rows, heads, head_dim] with last stride 1, got ", shape(partials));
  BC_REQUIRE(out.dim == 3 && std::equal(out.sizes, out.sizes + 3, partials.sizes + 1) && out.stride(-1) == 1, op,
             ": out must be ", shape(partials, 1, 4), ", got ", shape(out));
  const int64_t lse_shape[] = {partials.size(0) - (tail.given ? 1 : 0), partials.size(1), partials.size(2)};
  BC_REQUIRE(lse.dim == 3 && std::equal(lse.sizes, lse.sizes + 3, lse_shape) && lse.is_float32(), op,
             ": lse must be float32 ", ListOf{lse_shape, 3}, ", got ", dtype(lse), ' ', shape(lse));
  if (keys.given) {
    int32_list(op, "keys", keys);
    BC_REQUIRE(keys.size(0) >= lse_shape[0], op, ": keys has ", keys.size(0), " entries for ", lse_shape[0],
               " partials");
  }
  BC_REQUIRE(!tail.given || (tail.is_float32() && tail.dim == 3 && tail.size(2) == lse_shape[2] &&
                             tail.size(0) * tail.size(1) >= lse_shape[1]),
             op, ": tail_lse must be float32 [blocks, size, ", lse_shape[2], "] with blocks * size >= ", lse_shape[1],
             ", got ", dtype(tail), ' ', shape(tail));
  BC_REQUIRE(partials.computes() && out.computes(), op, ": no kernel for ", dtype(partials), " -> ", dtype(out));
  BC_REQUIRE(-1 <= num_tokens && num_tokens <= out.size(0), op, ": num_tokens ", num_tokens, " is not within the ",
             out.size(0), " rows");
  same_device(op, {{"partials", &partials}, {"lse", &lse}, {"out", &out}, {"keys", &keys}, {"tail_lse", &tail}});
  if (out.numel == 0) return;
  MergeArgs a{};
  a.partials = partials.data, a.lse = lse.data, a.out = out.data, a.keys = keys.as<int32_t>();
  a.tail_lse = tail.data, a.tail_size = 1;
  if (tail.given) {
    a.tail_block = tail.bytes(0), a.tail_row = tail.bytes(1), a.tail_head = tail.bytes(2), a.tail_size = tail.size(1);
  }
  a.partial_n = partials.bytes(0), a.partial_row = partials.bytes(1), a.partial_head = partials.bytes(2);
  a.lse_n = lse.bytes(0), a.lse_row = lse.bytes(1), a.lse_head = lse.bytes(2);
  a.out_row = out.bytes(0), a.out_head = out.bytes(1);
  a.n = partials.size(0), a.rows = out.size(0), a.heads = out.size(1), a.head_dim = out.size(2);
  a.num_tokens = num_tokens < 0 ? a.rows : num_tokens;
  a.in_kind = partials.kind(), a.out_kind = out.kind();
  a.vectors = a.head_dim % 8 == 0 && common_width({address(a.partials), address(a.out), a.partial_n, a.partial_row,
                                                   a.partial_head, a.out_row, a.out_head}) == 16;
  const OnDeviceOf device(out);
  merge_partials(a, device.stream());
  check_launch(op);
}

void check_part(const char* op, const char* name, const Arg& x, const Arg& out) {
  BC_REQUIRE(x.dim == 3 && x.stride(-1) == 1 && x.computes(), op, ": ", name,
             " must be floating [rows, heads, head_dim] with last stride 1, got ", shape(x));
  BC_REQUIRE(!out.given || (out.dim == 3 && std::equal(out.sizes, out.sizes + 3, x.sizes) && out.dtype == x.dtype &&
                            out.stride(-1) == 1),
             op, ": ", name, "_out must be ", dtype(x), ' ', shape(x), ", got ", dtype(out), ' ', shape(out));
}

void check_weight(const char* op, const char* name, const Arg& x, const Arg& w) {
  if (!w.given) return;
  const int64_t heads = x.size(1), dim = x.size(2);
  BC_REQUIRE(w.dim == 1 && w.contiguous() && (w.size(0) == dim || w.size(0) == heads * dim), op, ": ", name,
             "_weight has ", w.numel, " entries; ", heads, " heads of ", dim, " take ", dim, " (per head) or ",
             heads * dim, " (over all heads). A norm over all heads cannot run on one tensor-parallel rank's slice.");
  BC_REQUIRE(w.computes(), op, ": no kernel for a ", name, "_weight of ", dtype(w));
}

NormRopeArgs::Part part_of(const Arg& x, const Arg& out, const Arg& weight) {
  const bool over_all_heads = weight.given && weight.numel != x.size(2);
  return {rows_of(x), rows_of(out.given ? out : x), weight.data, weight.kind(), over_all_heads,
          static_cast<int>(x.size(1))};
}

void qk_norm_rope_(const Tensor q_, const Tensor k_, const Optional q_weight_, const Optional k_weight_,
                   const Optional cos_, const Optional sin_, double eps, bool interleaved, const Optional q_out_,
                   const Optional k_out_, const Optional v_, const Optional layer_pool_, const Optional dst_,
                   const Optional dst2_, int64_t num_tokens, const Optional lengths_, const Optional totals_,
                   int64_t causal_block_size) {
  const char* const op = "qk_norm_rope_";
  const Arg q(q_), k(k_), q_weight(q_weight_), k_weight(k_weight_), cos(cos_), sin(sin_), q_out(q_out_);
  const Arg k_out(k_out_), v(v_), layer_pool(layer_pool_), dst(dst_), dst2(dst2_), lengths(lengths_), totals(totals_);
  check_part(op, "q", q, q_out);
  check_part(op, "k", k, k_out);
  const int64_t rows = q.size(0), dim = q.size(2);
  BC_REQUIRE(k.size(0) == rows && k.size(2) == dim && k.dtype == q.dtype, op, ": k ", dtype(k), ' ', shape(k),
             " does not go with q ", dtype(q), ' ', shape(q));
  check_weight(op, "q", q, q_weight);
  check_weight(op, "k", k, k_weight);
  BC_REQUIRE(cos.given == sin.given, op, ": cos and sin go together");
  if (cos.given) {
    BC_REQUIRE(dim % 2 == 0, op, ": head_dim ", dim, " is odd and cannot be rotated");
    for (const auto& [name, t] : {Named("cos", &cos), Named("sin", &sin)}) {
      BC_REQUIRE(t->is_float32() && t->dim == 2 && t->size(0) == rows && t->size(1) == dim / 2 && t->contiguous(), op,
                 ": ", name, " must be contiguous float32 [", rows, ", ", dim / 2, "], got ", dtype(*t), ' ',
                 shape(*t));
    }
  }
  const bool writes = layer_pool.given;
  BC_REQUIRE(v.given == writes && dst.given == writes, op, ": v, layer_pool and dst go together");
  NormRopeArgs a{};
  if (writes) {
    BC_REQUIRE(!k_out.given, op, ": k goes to k_out or to the pool, not both");
    a.pool = check_kv_and_pool(op, k, v, layer_pool);
    a.entries = check_entries(op, rows, layer_pool, dst, dst2, Arg(), num_tokens, lengths, totals, causal_block_size);
    BC_REQUIRE(dst.size(0) <= rows, op, ": ", dst.size(0), " slots for ", rows, " rows");
    a.totals = totals_of(lengths, totals, causal_block_size);
    a.v = rows_of(v);
  }
  same_device(op, {{"q", &q}, {"k", &k}, {"q_weight", &q_weight}, {"k_weight", &k_weight}, {"cos", &cos},
                   {"sin", &sin}, {"q_out", &q_out}, {"k_out", &k_out}});
  if (q.numel == 0 && k.numel == 0 && a.totals.count == 0) return;
  a.q = part_of(q, q_out, q_weight), a.k = part_of(k, k_out, k_weight);
  a.cos = cos.as<float>(), a.sin = sin.as<float>();
  a.rows = rows, a.head_dim = static_cast<int>(dim), a.eps = static_cast<float>(eps), a.kind = q.kind();
  a.interleaved = interleaved || !cos.given;
  const auto rows_width = [](const Rows& r) { return common_width({address(r.data), r.row, r.head}); };
  a.vectors = dim % 8 == 0 &&
              common_width({rows_width(a.q.in), rows_width(a.q.out), rows_width(a.k.in), rows_width(a.k.out),
                            rows_width(a.v), address(q_weight.data), address(k_weight.data), address(a.cos),
                            address(a.sin), address(a.pool.data), a.pool.page, a.pool.kv, a.pool.head,
                            a.pool.slot}) == 16;
  const OnDeviceOf device(q);
  qk_norm_rope(a, device.stream());
  check_launch(op);
}

void residual_norm_(const Tensor x_, const Optional delta_, const Optional gate_, const Optional scale_,
                    const Optional shift_, double scale_offset, double eps, const Optional sum_out_,
                    const Optional norm_out_) {
  const char* const op = "residual_norm_";
  const Arg x(x_), delta(delta_), gate(gate_), scale(scale_), shift(shift_), sum_out(sum_out_), norm_out(norm_out_);
  BC_REQUIRE(x.dim == 2 && x.computes() && (x.size(1) <= 1 || x.stride(1) == 1) && x.size(1) <= 8192, op,
             ": x must be floating [rows, up to 8192] with last stride 1, got ", dtype(x), ' ', shape(x), ' ', strides(x));
  const int64_t rows = x.size(0), dim = x.size(1);
  for (const auto& [name, t] : {Named("delta", &delta), Named("sum_out", &sum_out), Named("norm_out", &norm_out)}) {
    BC_REQUIRE(!t->given || (t->dim == 2 && t->size(0) == rows && t->size(1) == dim && t->dtype == x.dtype &&
                             (dim <= 1 || t->stride(1) == 1)),
               op, ": ", name, " must be ", dtype(x), ' ', shape(x), ", got ", dtype(*t), ' ', shape(*t));
  }
  for (const auto& [name, t] : {Named("gate", &gate), Named("scale", &scale), Named("shift", &shift)}) {
    BC_REQUIRE(!t->given || (t->dim == 2 && (t->size(0) == 1 || t->size(0) == rows) && t->size(1) == dim &&
                             t->computes() && (dim <= 1 || t->stride(1) == 1)),
               op, ": ", name, " must be floating [1 or ", rows, ", ", dim, "], got ", dtype(*t), ' ', shape(*t));
  }
  BC_REQUIRE(delta.given == sum_out.given, op, ": delta and sum_out go together");
  BC_REQUIRE(delta.given || !gate.given, op, ": gate without delta");
  BC_REQUIRE(scale.given == shift.given && (norm_out.given || !scale.given), op,
             ": scale, shift and norm_out go together");
  same_device(op, {{"x", &x}, {"delta", &delta}, {"gate", &gate}, {"scale", &scale}, {"shift", &shift},
                   {"sum_out", &sum_out}, {"norm_out", &norm_out}});
  if (x.numel == 0 || (!sum_out.given && !norm_out.given)) return;
  const auto row_of = [](const Arg& t) { return t.given ? Row{t.data, t.bytes(0)} : Row{}; };
  const auto modulation = [](const Arg& t) {
    return t.given ? Modulation{t.data, t.size(0) == 1 ? 0 : t.stride(0), t.kind()} : Modulation{};
  };
  ResidualNormArgs a{};
  a.x = row_of(x), a.delta = row_of(delta), a.sum_out = row_of(sum_out), a.norm_out = row_of(norm_out);
  a.gate = modulation(gate), a.scale = modulation(scale), a.shift = modulation(shift);
  a.rows = rows, a.dim = dim, a.kind = x.kind();
  a.scale_offset = static_cast<float>(scale_offset), a.eps = static_cast<float>(eps);
  int width = common_width({dim * x.element_size()});
  for (const Arg* t : {&x, &delta, &sum_out, &norm_out, &gate, &scale, &shift}) {
    if (t->given) width = common_width({width, address(t->data), t->size(0) == 1 ? 0 : t->bytes(0)});
  }
  a.vectors = width == 16;
  const OnDeviceOf device(x);
  residual_norm(a, device.stream());
  check_launch(op);
}

}  // namespace
}  // namespace bc

STABLE_TORCH_LIBRARY_IMPL(bc_diffusers, CUDA, m) {
  m.impl("advance_state_", TORCH_BOX(&bc::advance_state_));
  m.impl("block_causal_layout_", TORCH_BOX(&bc::block_causal_layout_));
  m.impl("commit_", TORCH_BOX(&bc::commit_));
  m.impl("copy_kv_slots_", TORCH_BOX(&bc::copy_kv_slots_));
  m.impl("merge_partials_", TORCH_BOX(&bc::merge_partials_));
  m.impl("qk_norm_rope_", TORCH_BOX(&bc::qk_norm_rope_));
  m.impl("residual_norm_", TORCH_BOX(&bc::residual_norm_));
  m.impl("rotate_rows_", TORCH_BOX(&bc::rotate_rows_));
  m.impl("scatter_kv_slots_", TORCH_BOX(&bc::scatter_kv_slots_));
  m.impl("split_page_lists_", TORCH_BOX(&bc::split_page_lists_));
}
