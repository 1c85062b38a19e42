"""Calls that every operator must refuse, on every device: (operator, args, kwargs, a part of the message)."""

import torch
from op_cases import int32, noise


_state = torch.zeros(5, dtype=torch.int64)


def _rotate(rows, shift):
    return "rotate_rows_", (rows, shift), {}


def _advance(state, *counts):
    return "advance_state_", (state, *counts), {}


def _layout(**changed):
    lists = {"fixed": 1, "ring": 4, "sizes": None, "private_pages": 4, "pages": 8, "lengths": 1, "copy_src": 6,
             "copy_dst": 6, "scatter_src": 5, "scatter_dst": 5, "scatter_dst2": 5}
    call = {"state": torch.zeros(5, dtype=torch.int64)}
    call |= {name: torch.zeros(n or 11, dtype=torch.int32) for name, n in lists.items()}
    call["sizes"] = call["sizes"].view(1, 11)
    call |= {"page_size": 4, "window_tokens": 8, "copied_slots": 6} | changed
    return "block_causal_layout_", tuple(call.values()), {}


def _commit(pool=(1, 9, 2, 1, 4, 3), num_tokens=3, **changed):
    _, (state, *lists, page, window, copied), _ = _layout(**changed)
    return "commit_", (noise(*pool), state, *lists, num_tokens, page, window, copied), {}


def _scatter(k=(6, 2, 8), v=(6, 2, 8), pool=(5, 2, 2, 4, 8), dst=6, dtype=torch.float32, **kwargs):
    k, v, pool = (noise(*x) if isinstance(x, tuple) else x for x in (k, v, pool))
    dst = torch.arange(dst, dtype=torch.int32) if isinstance(dst, int) else dst
    return "scatter_kv_slots_", (k.to(dtype), v, pool, dst), kwargs


def _copy(pool=(2, 5, 2, 2, 4, 8), src=3, dst=3):
    return "copy_kv_slots_", (noise(*pool), *(torch.arange(n, dtype=torch.int32) for n in (src, dst))), {}


def _merge(partials=(2, 3, 4, 8), lse=(2, 3, 4), out=(3, 4, 8), num_tokens=-1, kind=torch.float32, **kwargs):
    partials, lse, out = (noise(*x) if isinstance(x, tuple) else x for x in (partials, lse, out))
    return "merge_partials_", (partials.to(kind), lse, out), {"num_tokens": num_tokens, **kwargs}


def _split(pages=(2, 8), totals=2, tables=(5, 4), keys=5, lens=5, size=3, page=4):
    pages, tables = (torch.zeros(x, dtype=torch.int32) if isinstance(x, tuple) else x for x in (pages, tables))
    lists = (torch.zeros(n, dtype=torch.int32) for n in (totals, keys, lens))
    totals, keys, lens = lists
    return "split_page_lists_", (_state, pages, totals, tables, keys, lens, size, 8, page), {}


def _norm(q=(6, 4, 8), k=(6, 2, 8), q_weight=None, k_weight=None, cos=None, sin=None, kind=torch.float32, **kwargs):
    tensors = (noise(*x) if isinstance(x, tuple) else x for x in (q, k, q_weight, k_weight, cos, sin))
    q, k, *others = tensors
    return "qk_norm_rope_", (q.to(kind), k, *others, 1e-6), kwargs


def _write(**changed):
    given = {"v": noise(6, 2, 8), "layer_pool": noise(5, 2, 2, 4, 8), "dst": torch.arange(6, dtype=torch.int32)}
    return given | changed


def _residual(x=(6, 8), delta=(6, 8), gate=None, scale=None, shift=None, kind=torch.float32, **outs):
    x, delta, gate, scale, shift = (noise(*t) if isinstance(t, tuple) else t for t in (x, delta, gate, scale, shift))
    outs = outs or {"sum_out": noise(6, 8), "norm_out": noise(6, 8)}
    return "residual_norm_", (x.to(kind), delta, gate, scale, shift, 1.0, 1e-6), outs


_one = torch.tensor(1)
REFUSALS = [
    (*_rotate(noise(2, 2, 2), _one), r"rows must be \[n\] or \[m, n\], got \(2, 2, 2\)"),
    (*_rotate(noise(4).to(torch.complex128), _one), "no element size of 16 bytes"),
    (*_rotate(noise(4, 6)[:, ::2], _one), r"last stride must be 1, got \(6, 2\)"),
    (*_rotate(noise(4).expand(3, 4), _one), r"rows overlap, strides \(0, 1\)"),
    (*_rotate(noise(4), torch.tensor(1.0)), r"shift must be one int64, got torch.float32 \(\)"),
    (*_rotate(noise(4), torch.tensor([1, 2])), r"shift must be one int64, got torch.int64 \(2,\)"),
    (*_advance(int32([0] * 5), 1, 1, 4), r"state must be contiguous int64 \[5\], got torch.int32 \(5,\)"),
    (*_advance(_state, -1, 3, 4), r"negative count \(-1, 3\)"),
    (*_advance(_state, 1, 3, 12), "page_size 12 is not a power of two"),
    (*_layout(state=_state[:4]), r"state must be contiguous int64 \[5\]"),
    (*_layout(pages=torch.zeros(8)), r"pages must be a contiguous int32 list, got torch.float32 \(8,\) \(1,\)"),
    (*_layout(ring=int32([[1, 2]])), r"ring must be a contiguous int32 list, got torch.int32 \(1, 2\)"),
    (*_layout(copy_dst=int32([1])), "copy_dst must have 6 entries, got 1"),
    (*_layout(scatter_dst2=int32([1])), "scatter_dst2 must have 5 entries, got 1"),
    (*_layout(ring=int32([])), "ring is empty"),
    (*_layout(copied_slots=-2), "copied_slots -2 is negative"),
    (*_layout(sizes=torch.zeros(1, 10, dtype=torch.int32)), r"sizes must be contiguous int32 \[num_sizes, 11\]"),
    (*_layout(page_size=3), "page_size 3 is not a power of two"),
    (*_commit(num_tokens=-1), r"negative count \(-1, 8\)"),
    (*_commit(lengths=torch.zeros(1)), "lengths must be a contiguous int32 list, got torch.float32"),
    (*_commit(pool=(1, 9, 3, 1, 4, 3)), r"pool must be \[layers, pages, 2, kv_heads, page_size, head_dim\]"),
    (*_commit(pool=(1, 9, 2, 1, 8, 3)), "page_size 4, but the pool's is 8"),
    (*_scatter(pool=(5, 3, 2, 4, 8)), r"layer_pool must be \[pages, 2, kv_heads, page_size, head_dim\]"),
    (*_scatter(pool=(5, 2, 2, 6, 8)), "page_size 6 is not a power of two"),
    (*_scatter(k=(6, 3, 8)), r"k must be \[rows, 2, 8\] to fit the pool, got \(6, 3, 8\)"),
    (*_scatter(k=noise(6, 2, 16)[..., ::2]), "the last stride of k must be 1"),
    (*_scatter(dtype=torch.bfloat16), "k is torch.bfloat16, the pool torch.float32"),
    (*_scatter(v=(5, 2, 8)), "k has 6 rows, v 5"),
    (*_scatter(dst=torch.arange(6)), "dst must be a contiguous int32 list, got torch.int64"),
    (*_scatter(dst2=int32([1])), "dst2 must have 6 entries, got 1"),
    (*_scatter(src=int32([1])), "src must have 6 entries, got 1"),
    (*_scatter(num_tokens=7), "num_tokens 7 is not within the 6 rows"),
    (*_scatter(lengths=int32([1])), "lengths and totals go together"),
    (*_scatter(lengths=int32([1]), totals=int32([1, 2]), causal_block_size=1), "totals must have 1 entries, got 2"),
    (*_scatter(lengths=int32([1]), totals=int32([1])), "totals need a causal_block_size > 0, got 0"),
    (*_copy(pool=(2, 5, 1, 2, 4, 8)), r"pool must be \[layers, pages, 2, kv_heads, page_size, head_dim\]"),
    (*_copy(pool=(2, 5, 2, 2, 5, 8)), "page_size 5 is not a power of two"),
    (*_copy(dst=2), "dst must have 3 entries, got 2"),
    (*_merge(partials=(3, 4, 8)), r"partials must be \[n, rows, heads, head_dim\] with last stride 1, got \(3, 4,"),
    (*_merge(out=(3, 5, 8)), r"out must be \(3, 4, 8\), got \(3, 5, 8\)"),
    (*_merge(lse=(2, 4, 3)), r"lse must be float32 \(2, 3, 4\), got torch.float32 \(2, 4, 3\)"),
    (*_merge(kind=torch.float64), "no kernel for torch.float64 -> torch.float32"),
    (*_merge(num_tokens=4), "num_tokens 4 is not within the 3 rows"),
    (*_merge(keys=int32([1])), "keys has 1 entries for 2 partials"),
    (*_merge(tail_lse=noise(1, 3, 4)), r"lse must be float32 \(1, 3, 4\), got torch.float32 \(2, 3, 4\)"),
    (*_merge(lse=(1, 3, 4), tail_lse=noise(2, 1, 4)), r"tail_lse must be float32 \[blocks, size, 4\] with .* >= 3"),
    (*_split(pages=torch.zeros(2, 8)), r"pages must be contiguous int32 \[rows, entries\], got torch.float32"),
    (*_split(tables=(2, 4), keys=2, lens=2), "2 rows of tables for 2 causal blocks"),
    (*_split(totals=1), "totals must have 2 entries, got 1"),
    (*_split(lens=4), "lens must have 5 entries, got 4"),
    (*_split(size=0), "causal_block_size must be > 0, got 0"),
    (*_split(page=6), "page_size 6 is not a power of two"),
    (*_norm(q=(6, 8)), r"q must be floating \[rows, heads, head_dim\] with last stride 1, got \(6, 8\)"),
    (*_norm(kind=torch.float64), "q must be floating"),
    (*_norm(q_out=noise(6, 4, 7)), r"q_out must be torch.float32 \(6, 4, 8\), got torch.float32 \(6, 4, 7\)"),
    (*_norm(k=(5, 2, 8)), r"k torch.float32 \(5, 2, 8\) does not go with q torch.float32 \(6, 4, 8\)"),
    (*_norm(q_weight=(64,)), "q_weight has 64 entries; 4 heads of 8 take 8 .* or 32 .*tensor-parallel rank"),
    (*_norm(k_weight=noise(8).double()), "no kernel for a k_weight of torch.float64"),
    (*_norm(cos=(6, 4)), "cos and sin go together"),
    (*_norm(q=(6, 4, 7), k=(6, 2, 7), cos=(6, 3), sin=(6, 3)), "head_dim 7 is odd and cannot be rotated"),
    (*_norm(cos=(6, 4), sin=(6, 8)), r"sin must be contiguous float32 \[6, 4\], got torch.float32 \(6, 8\)"),
    (*_norm(v=noise(6, 2, 8)), "v, layer_pool and dst go together"),
    (*_norm(k_out=noise(6, 2, 8), **_write()), "k goes to k_out or to the pool, not both"),
    (*_norm(**_write(dst=torch.arange(7, dtype=torch.int32))), "7 slots for 6 rows"),
    (*_norm(**_write(v=noise(6, 3, 8))), r"v must be \[rows, 2, 8\] to fit the pool"),
    (*_residual(x=(6, 2, 8)), r"x must be floating \[rows, up to 8192\] with last stride 1, got torch.float32"),
    (*_residual(x=noise(6, 8193)), "x must be floating"),
    (*_residual(kind=torch.float64), "x must be floating"),
    (*_residual(delta=(5, 8)), r"delta must be torch.float32 \(6, 8\), got torch.float32 \(5, 8\)"),
    (*_residual(norm_out=noise(6, 8).half()), r"norm_out must be torch.float32 \(6, 8\), got torch.float16 \(6, 8\)"),
    (*_residual(gate=(2, 8)), r"gate must be floating \[1 or 6, 8\], got torch.float32 \(2, 8\)"),
    (*_residual(shift=noise(1, 8).double()), r"shift must be floating \[1 or 6, 8\], got torch.float64 \(1, 8\)"),
    (*_residual(delta=None), "delta and sum_out go together"),
    (*_residual(delta=None, gate=(1, 8), norm_out=noise(6, 8)), "gate without delta"),
    (*_residual(scale=(1, 8)), "scale, shift and norm_out go together"),
    (*_residual(scale=(1, 8), shift=(1, 8), sum_out=noise(6, 8)), "scale, shift and norm_out go together"),
]
