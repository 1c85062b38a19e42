"""What every implementation of an operator refuses, with the reason. Shapes, dtypes, strides and devices only: no
value of a tensor is read, so the same checks serve the CPU implementations and the fakes."""

import torch


FLOATS = (torch.float32, torch.float16, torch.bfloat16)
MOST_CHANNELS = 8192  # of a row of `residual_norm_`


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def same_device(op: str, **tensors: torch.Tensor | None) -> None:
    given = {name: t for name, t in tensors.items() if t is not None}
    devices = {t.device for t in given.values()}
    if len(devices) > 1:
        listed = ", ".join(f"{name} on {t.device}" for name, t in given.items())
        raise ValueError(f"{op}: all tensors must be on one device, got {listed}")


def int32_list(op: str, name: str, t: torch.Tensor, size: int | None = None) -> None:
    if t.dtype != torch.int32 or t.dim() != 1 or t.stride(0) != 1 and t.shape[0] > 1:
        raise ValueError(f"{op}: {name} must be a contiguous int32 list, got {t.dtype} {tuple(t.shape)} {t.stride()}")
    if size is not None and t.shape[0] != size:
        raise ValueError(f"{op}: {name} must have {size} entries, got {t.shape[0]}")


def rotate_rows_(rows, shift):
    require(rows.dim() in (1, 2), f"rotate_rows_: rows must be [n] or [m, n], got {tuple(rows.shape)}")
    require(rows.element_size() in (1, 2, 4, 8), f"rotate_rows_: no element size of {rows.element_size()} bytes")
    require(rows.shape[-1] <= 1 or rows.stride(-1) == 1, f"rotate_rows_: last stride must be 1, got {rows.stride()}")
    require(rows.dim() == 1 or rows.shape[0] <= 1 or rows.stride(0) >= rows.shape[1],
            f"rotate_rows_: rows overlap, strides {rows.stride()}")
    require(shift.dtype == torch.int64 and shift.numel() == 1,
            f"rotate_rows_: shift must be one int64, got {shift.dtype} {tuple(shift.shape)}")
    same_device("rotate_rows_", rows=rows, shift=shift)


def advance_state_(state, num_tokens, window_tokens, page_size):
    require(state.dtype == torch.int64 and tuple(state.shape) == (5,) and state.is_contiguous(),
            f"advance_state_: state must be contiguous int64 [5], got {state.dtype} {tuple(state.shape)}")
    require(num_tokens >= 0 and window_tokens >= 0, f"advance_state_: negative count ({num_tokens}, {window_tokens})")
    power_of_two("advance_state_", page_size)


def power_of_two(op: str, page_size: int) -> None:
    require(page_size > 0 and page_size & (page_size - 1) == 0, f"{op}: page_size {page_size} is not a power of two")


def block_causal_layout_(state, fixed, ring, sizes, private_pages, pages, lengths, copy_src, copy_dst, scatter_src,
                         scatter_dst, scatter_dst2, page_size, window_tokens, copied_slots):
    op = "block_causal_layout_"
    advance_state_(state, 0, window_tokens, page_size)
    lists = {"fixed": fixed, "ring": ring, "private_pages": private_pages, "pages": pages, "lengths": lengths,
             "copy_src": copy_src, "copy_dst": copy_dst, "scatter_src": scatter_src, "scatter_dst": scatter_dst,
             "scatter_dst2": scatter_dst2}
    for name, t in lists.items():
        int32_list(op, name, t)
    int32_list(op, "copy_dst", copy_dst, copy_src.shape[0])
    int32_list(op, "scatter_dst", scatter_dst, scatter_src.shape[0])
    int32_list(op, "scatter_dst2", scatter_dst2, scatter_src.shape[0])
    require(ring.shape[0] > 0, f"{op}: ring is empty")
    require(copied_slots >= 0, f"{op}: copied_slots {copied_slots} is negative")
    require(sizes.dtype == torch.int32 and sizes.dim() == 2 and sizes.shape[1] == 11 and sizes.is_contiguous(),
            f"{op}: sizes must be contiguous int32 [num_sizes, 11], got {sizes.dtype} {tuple(sizes.shape)}")
    same_device(op, state=state, sizes=sizes, **lists)


def _kv_and_pool(op, k, v, layer_pool):
    require(layer_pool.dim() == 5 and layer_pool.shape[1] == 2 and layer_pool.stride(-1) == 1,
            f"{op}: layer_pool must be [pages, 2, kv_heads, page_size, head_dim], got {tuple(layer_pool.shape)}")
    power_of_two(op, layer_pool.shape[3])
    heads, dim = layer_pool.shape[2], layer_pool.shape[4]
    for name, t in (("k", k), ("v", v)):
        require(t.dim() == 3 and tuple(t.shape[1:]) == (heads, dim),
                f"{op}: {name} must be [rows, {heads}, {dim}] to fit the pool, got {tuple(t.shape)}")
        require(dim <= 1 or t.stride(-1) == 1, f"{op}: the last stride of {name} must be 1, got {t.stride()}")
        require(t.dtype == layer_pool.dtype, f"{op}: {name} is {t.dtype}, the pool {layer_pool.dtype}")
    require(k.shape[0] == v.shape[0], f"{op}: k has {k.shape[0]} rows, v {v.shape[0]}")
    same_device(op, k=k, v=v, layer_pool=layer_pool)


def _entries(op, rows, layer_pool, dst, dst2, src, num_tokens, lengths, totals, causal_block_size):
    int32_list(op, "dst", dst)
    for name, t in (("dst2", dst2), ("src", src)):
        if t is not None:
            int32_list(op, name, t, dst.shape[0])
    require(-1 <= num_tokens <= rows, f"{op}: num_tokens {num_tokens} is not within the {rows} rows")
    require((lengths is None) == (totals is None), f"{op}: lengths and totals go together")
    if totals is not None:
        int32_list(op, "lengths", lengths)
        int32_list(op, "totals", totals, lengths.shape[0])
        require(causal_block_size > 0, f"{op}: totals need a causal_block_size > 0, got {causal_block_size}")
    same_device(op, layer_pool=layer_pool, dst=dst, dst2=dst2, src=src, lengths=lengths, totals=totals)


def scatter_kv_slots_(k, v, layer_pool, dst, dst2=None, src=None, num_tokens=-1, lengths=None, totals=None,
                      causal_block_size=0):
    _kv_and_pool("scatter_kv_slots_", k, v, layer_pool)
    _entries("scatter_kv_slots_", k.shape[0], layer_pool, dst, dst2, src, num_tokens, lengths, totals,
             causal_block_size)


def copy_kv_slots_(pool, src, dst):
    require(pool.dim() == 6 and pool.shape[2] == 2 and pool.stride(-1) == 1, "copy_kv_slots_: pool must be "
            f"[layers, pages, 2, kv_heads, page_size, head_dim], got {tuple(pool.shape)}")
    power_of_two("copy_kv_slots_", pool.shape[4])
    int32_list("copy_kv_slots_", "src", src)
    int32_list("copy_kv_slots_", "dst", dst, src.shape[0])
    same_device("copy_kv_slots_", pool=pool, src=src, dst=dst)


def commit_(pool, state, fixed, ring, sizes, private_pages, pages, lengths, copy_src, copy_dst, scatter_src,
            scatter_dst, scatter_dst2, num_tokens, page_size, window_tokens, copied_slots):
    advance_state_(state, num_tokens, window_tokens, page_size)
    block_causal_layout_(state, fixed, ring, sizes, private_pages, pages, lengths, copy_src, copy_dst, scatter_src,
                         scatter_dst, scatter_dst2, page_size, window_tokens, copied_slots)
    copy_kv_slots_(pool, copy_src, copy_dst)
    require(pool.shape[4] == page_size, f"commit_: page_size {page_size}, but the pool's is {pool.shape[4]}")


def split_page_lists_(state, pages, totals, tables, keys, lens, causal_block_size, window_tokens, page_size):
    op = "split_page_lists_"
    advance_state_(state, 0, window_tokens, page_size)
    for name, t in (("pages", pages), ("tables", tables)):
        require(t.dtype == torch.int32 and t.dim() == 2 and t.is_contiguous() and t.shape[1] > 0,
                f"{op}: {name} must be contiguous int32 [rows, entries], got {t.dtype} {tuple(t.shape)}")
    blocks, rows = pages.shape[0], tables.shape[0]
    tails = blocks if blocks > 1 else 0
    require(blocks > 0 and rows > tails, f"{op}: {rows} rows of tables for {blocks} causal blocks")
    int32_list(op, "totals", totals, blocks)
    int32_list(op, "keys", keys, rows)
    int32_list(op, "lens", lens, rows)
    require(causal_block_size > 0, f"{op}: causal_block_size must be > 0, got {causal_block_size}")
    same_device(op, state=state, pages=pages, totals=totals, tables=tables, keys=keys, lens=lens)


def merge_partials_(partials, lse, out, num_tokens=-1, keys=None, tail_lse=None):
    op = "merge_partials_"
    require(partials.dim() == 4 and partials.stride(-1) == 1,
            f"{op}: partials must be [n, rows, heads, head_dim] with last stride 1, got {tuple(partials.shape)}")
    n, rows, heads, _ = partials.shape
    require(tuple(out.shape) == tuple(partials.shape[1:]) and out.stride(-1) == 1,
            f"{op}: out must be {tuple(partials.shape[1:])}, got {tuple(out.shape)}")
    n = n if tail_lse is None else n - 1
    require(tuple(lse.shape) == (n, rows, heads) and lse.dtype == torch.float32,
            f"{op}: lse must be float32 {(n, rows, heads)}, got {lse.dtype} {tuple(lse.shape)}")
    if keys is not None:
        int32_list(op, "keys", keys)
        require(keys.shape[0] >= n, f"{op}: keys has {keys.shape[0]} entries for {n} partials")
    if tail_lse is not None:
        blocks, size, own = tail_lse.shape if tail_lse.dim() == 3 else (0, 0, 0)
        require(tail_lse.dtype == torch.float32 and own == heads and blocks * size >= rows,
                f"{op}: tail_lse must be float32 [blocks, size, {heads}] with blocks * size >= {rows}, got "
                f"{tail_lse.dtype} {tuple(tail_lse.shape)}")
    require(partials.dtype in FLOATS and out.dtype in FLOATS, f"{op}: no kernel for {partials.dtype} -> {out.dtype}")
    require(-1 <= num_tokens <= rows, f"{op}: num_tokens {num_tokens} is not within the {rows} rows")
    same_device(op, partials=partials, lse=lse, out=out, keys=keys, tail_lse=tail_lse)


def qk_norm_rope_(q, k, q_weight, k_weight, cos, sin, eps, interleaved=True, q_out=None, k_out=None, v=None,
                  layer_pool=None, dst=None, dst2=None, num_tokens=-1, lengths=None, totals=None, causal_block_size=0):
    op = "qk_norm_rope_"
    for name, x, out in (("q", q, q_out), ("k", k, k_out)):
        require(x.dim() == 3 and x.stride(-1) == 1 and x.dtype in FLOATS,
                f"{op}: {name} must be floating [rows, heads, head_dim] with last stride 1, got {tuple(x.shape)}")
        if out is not None:
            require(out.shape == x.shape and out.dtype == x.dtype and out.stride(-1) == 1,
                    f"{op}: {name}_out must be {x.dtype} {tuple(x.shape)}, got {out.dtype} {tuple(out.shape)}")
    rows, dim = q.shape[0], q.shape[2]
    require(k.shape[0] == rows and k.shape[2] == dim and k.dtype == q.dtype,
            f"{op}: k {k.dtype} {tuple(k.shape)} does not go with q {q.dtype} {tuple(q.shape)}")
    for name, x, w in (("q", q, q_weight), ("k", k, k_weight)):
        if w is None:
            continue
        full = x.shape[1] * dim
        require(w.dim() == 1 and w.is_contiguous() and w.shape[0] in (dim, full),
                f"{op}: {name}_weight has {w.numel()} entries; {x.shape[1]} heads of {dim} take {dim} (per head) or "
                f"{full} (over all heads). A norm over all heads cannot run on one tensor-parallel rank's slice.")
        require(w.dtype in FLOATS, f"{op}: no kernel for a {name}_weight of {w.dtype}")
    require((cos is None) == (sin is None), f"{op}: cos and sin go together")
    if cos is not None:
        require(dim % 2 == 0, f"{op}: head_dim {dim} is odd and cannot be rotated")
        for name, t in (("cos", cos), ("sin", sin)):
            require(t.dtype == torch.float32 and tuple(t.shape) == (rows, dim // 2) and t.is_contiguous(),
                    f"{op}: {name} must be contiguous float32 [{rows}, {dim // 2}], got {t.dtype} {tuple(t.shape)}")
    given = [t is not None for t in (v, layer_pool, dst)]
    require(all(given) or not any(given), f"{op}: v, layer_pool and dst go together")
    if layer_pool is not None:
        require(k_out is None, f"{op}: k goes to k_out or to the pool, not both")
        _kv_and_pool(op, k, v, layer_pool)
        _entries(op, rows, layer_pool, dst, dst2, None, num_tokens, lengths, totals, causal_block_size)
        require(dst.shape[0] <= rows, f"{op}: {dst.shape[0]} slots for {rows} rows")
    same_device(op, q=q, k=k, q_weight=q_weight, k_weight=k_weight, cos=cos, sin=sin, q_out=q_out, k_out=k_out)


def residual_norm_(x, delta, gate, scale, shift, scale_offset, eps, sum_out=None, norm_out=None):
    op = "residual_norm_"
    require(x.dim() == 2 and x.dtype in FLOATS and (x.shape[1] <= 1 or x.stride(1) == 1)
            and x.shape[1] <= MOST_CHANNELS,
            f"{op}: x must be floating [rows, up to {MOST_CHANNELS}] with last stride 1, got {x.dtype} "
            f"{tuple(x.shape)} {x.stride()}")
    rows, dim = x.shape
    for name, t in (("delta", delta), ("sum_out", sum_out), ("norm_out", norm_out)):
        if t is not None:
            require(t.shape == x.shape and t.dtype == x.dtype and (dim <= 1 or t.stride(1) == 1),
                    f"{op}: {name} must be {x.dtype} {tuple(x.shape)}, got {t.dtype} {tuple(t.shape)}")
    for name, t in (("gate", gate), ("scale", scale), ("shift", shift)):
        if t is not None:
            require(t.dim() == 2 and t.shape[0] in (1, rows) and t.shape[1] == dim and t.dtype in FLOATS
                    and (dim <= 1 or t.stride(1) == 1),
                    f"{op}: {name} must be floating [1 or {rows}, {dim}], got {t.dtype} {tuple(t.shape)}")
    require((delta is None) == (sum_out is None), f"{op}: delta and sum_out go together")
    require(delta is not None or gate is None, f"{op}: gate without delta")
    require((scale is None) == (shift is None) and (norm_out is not None or scale is None),
            f"{op}: scale, shift and norm_out go together")
    same_device(op, x=x, delta=delta, gate=gate, scale=scale, shift=shift, sum_out=sum_out, norm_out=norm_out)
