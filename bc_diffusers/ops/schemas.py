"""The operators of `bc_diffusers`: each schema, with its mutations, is declared once, here.

The CPU implementations (`cpu.py`, `layout.py`) and the fakes are registered beside it; the compiled library only adds
the CUDA ones (`kernels/`). Common conventions:

- a slot id is `page * page_size + offset` in a pool `[..., pages, 2, kv_heads, page_size, head_dim]` (K at 0, V at 1);
  slot, page and length lists are int32, and -1 in a slot list means "skip this entry before anything is read";
- counts that change between forwards live in device tensors; an `int` argument is a kernel argument, never an upload;
- every operator works in place and returns nothing.
"""

import torch


NAMESPACE = "bc_diffusers"

SCHEMAS = {
    # rows [n] or [m, n], elements of 1, 2, 4 or 8 bytes, any row stride; shift: one int64 on the same device.
    # rows[..., i] <- rows[..., (i + shift) mod n]; shift may be negative or larger than n.
    "rotate_rows_": "(Tensor(a!) rows, Tensor shift) -> ()",
    # state int64 [5]: committed, pin_tokens, evicted pages, pages this commit evicted, committed before this commit.
    "advance_state_": "(Tensor(a!) state, int num_tokens, int window_tokens, int page_size) -> ()",
    # Reads state and the page table (fixed [F], ring [R], already rotated) and rewrites, for every causal block of
    # every size, its page list, its key count before the own tokens, its copied slots and its scatter entries.
    # sizes int32 [num_sizes, 11]: where each size's part lies in the flat tensors (bc_diffusers/cache/geometry.py).
    "block_causal_layout_": (
        "(Tensor state, Tensor fixed, Tensor ring, Tensor sizes, Tensor private_pages, Tensor(a!) pages, "
        "Tensor(b!) lengths, Tensor(c!) copy_src, Tensor(d!) copy_dst, Tensor(e!) scatter_src, "
        "Tensor(f!) scatter_dst, Tensor(g!) scatter_dst2, int page_size, int window_tokens, int copied_slots) -> ()"
    ),
    # A commit in one call: advance_state_, rotate_rows_ of the ring by state[3], block_causal_layout_, copy_kv_slots_.
    "commit_": (
        "(Tensor(a!) pool, Tensor(b!) state, Tensor fixed, Tensor(c!) ring, Tensor sizes, Tensor private_pages, "
        "Tensor(d!) pages, Tensor(e!) lengths, Tensor(f!) copy_src, Tensor(g!) copy_dst, Tensor(h!) scatter_src, "
        "Tensor(i!) scatter_dst, Tensor(j!) scatter_dst2, int num_tokens, int page_size, int window_tokens, "
        "int copied_slots) -> ()"
    ),
    # k, v [rows, kv_heads, head_dim], last stride 1, any other; layer_pool [pages, 2, kv_heads, page, head_dim].
    # Entry i copies row src[i] (row i without src) to slots dst[i] and dst2[i]; rows >= num_tokens (-1: all rows) are
    # padding. With totals: totals[j] = lengths[j] + own tokens of causal block j, 0 where the block has none.
    "scatter_kv_slots_": (
        "(Tensor k, Tensor v, Tensor(a!) layer_pool, Tensor dst, Tensor? dst2=None, Tensor? src=None, "
        "int num_tokens=-1, Tensor? lengths=None, Tensor(b!)? totals=None, int causal_block_size=0) -> ()"
    ),
    # pool [layers, pages, 2, kv_heads, page, head_dim]; slot src[i] -> slot dst[i] in every layer.
    "copy_kv_slots_": "(Tensor(a!) pool, Tensor src, Tensor dst) -> ()",
    # Cuts the page lists of one causal-block size for attention over several sequences, evenly for the current totals.
    # pages [m, L], totals [m] of causal blocks [0, m). tables [n + (m if m > 1 else 0), width], keys and lens alike:
    # the pages that all causal blocks see whole (all pages if m = 1) in n runs, then what is left of each list.
    # keys: how many a row holds; lens: the same, but 1 for an empty row, whose table entries are all page 0.
    "split_page_lists_": (
        "(Tensor state, Tensor pages, Tensor totals, Tensor(a!) tables, Tensor(b!) keys, Tensor(c!) lens, "
        "int causal_block_size, int window_tokens, int page_size) -> ()"
    ),
    # partials [n, rows, heads, head_dim], lse [n, rows, heads] fp32 (natural log, -inf: empty); any strides, the
    # last of partials and out is 1; out [rows, heads, head_dim]. Rows >= num_tokens (-1: none) and rows whose
    # partials are all empty become 0. keys int32 [>= n]: a partial of 0 keys is empty, whatever its lse. tail_lse
    # [blocks, size, heads]: the lse of one more partial (the last), whose row r is its [r // size, r % size].
    "merge_partials_": (
        "(Tensor partials, Tensor lse, Tensor(a!) out, int num_tokens=-1, Tensor? keys=None, Tensor? tail_lse=None)"
        " -> ()"
    ),
    # q [rows, heads, head_dim], k [rows, kv_heads, head_dim]; weights None (no norm), [head_dim] (per head) or
    # [heads * head_dim] (over all heads); cos, sin fp32 [rows, head_dim / 2] or None (no rotation). Computed in fp32
    # and rounded once. In place unless q_out / k_out are given. With layer_pool, the new K and v go to the slots (row
    # i to dst[i] and dst2[i], as scatter_kv_slots_ does) and k is left as it was.
    "qk_norm_rope_": (
        "(Tensor(a!) q, Tensor(b!) k, Tensor? q_weight, Tensor? k_weight, Tensor? cos, Tensor? sin, float eps, "
        "bool interleaved=True, Tensor(c!)? q_out=None, Tensor(d!)? k_out=None, Tensor? v=None, "
        "Tensor(e!)? layer_pool=None, Tensor? dst=None, Tensor? dst2=None, int num_tokens=-1, Tensor? lengths=None, "
        "Tensor(f!)? totals=None, int causal_block_size=0) -> ()"
    ),
    # x, delta, sum_out, norm_out [rows, dim] of one dtype; gate, scale, shift [1 or rows, dim], any float dtype.
    # sum_out = x + delta * gate (gate None: 1), computed in fp32 and rounded; norm_out = LayerNorm(sum) *
    # (scale_offset + scale) + shift, of the rounded sum, in fp32 and rounded once. Without delta the sum is x.
    # sum_out may be x or delta.
    "residual_norm_": (
        "(Tensor x, Tensor? delta, Tensor? gate, Tensor? scale, Tensor? shift, float scale_offset, float eps, "
        "Tensor(a!)? sum_out=None, Tensor(b!)? norm_out=None) -> ()"
    ),
}

library = torch.library.Library(NAMESPACE, "DEF")
for _name, _schema in SCHEMAS.items():
    library.define(_name + _schema)
