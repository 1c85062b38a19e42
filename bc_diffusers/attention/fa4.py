"""The fa4 backend: FlashAttention-4 (CuTe DSL) over pages of 128 slots, which its kernels fetch by TMA. The fastest on
Hopper. An optional extra: `pip install bc-diffusers[fa4]`."""

import functools
import importlib
import inspect
import warnings

import torch

from .. import ops
from .splits import Work, cut_lists, makespan


PAGE_SIZE = 128
_DTYPES = (torch.bfloat16, torch.float16)
# Tile rows -> time of one tile of that many packed rows over 128 keys, in microseconds on an H200 (head_dim 128).
_TILE_TIMES = {128: 1.40, 192: 2.10}
_BLOCK_OVERHEAD = 1.5  # tiles
_LAUNCHES, _MERGE_BYTES = 5.0, 4e6  # cutting and merging: microseconds, and bytes a microsecond


@functools.cache
def _load():
    """(`_flash_attn_fwd`, None) or (None, why not). It is not part of the package's public interface, which has no
    tile size; hence the check of its arguments, and the exact version that the extra asks for."""
    try:
        forward = importlib.import_module("flash_attn.cute.interface")._flash_attn_fwd
    except Exception as error:
        return None, (f"FlashAttention-4 cannot be imported ({type(error).__name__}: {error}); pip install "
                      "'bc-diffusers[fa4]'")
    wanted = {"cu_seqlens_q", "seqused_k", "page_table", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "pack_gqa",
              "tile_mn", "mma_pv_is_rs", "out", "lse", "return_lse"}
    missing = wanted - set(inspect.signature(forward).parameters)
    if missing:
        return None, f"this flash-attn-4 takes no {', '.join(sorted(missing))}: install 4.0.0b36"
    # Its compiler says so of an argument that is not used here, at every new geometry.
    warnings.filterwarnings("ignore", "Argument aux_data .* cannot be converted", UserWarning)
    return forward, None


def refuses(shape) -> str | None:
    if shape.device.type != "cuda":
        return f"it runs on CUDA devices, not on {shape.device.type}"
    capability = torch.cuda.get_device_capability(shape.device)
    if capability[0] != 9:
        return f"its tiles are chosen for Hopper (compute capability 9.0), this device has {capability[0]}." \
               f"{capability[1]}"
    if shape.dtype not in _DTYPES:
        return f"no kernel for {shape.dtype}: bfloat16 or float16"
    if shape.head_dim not in (64, 128):
        return f"head_dim {shape.head_dim} is neither 64 nor 128"
    if shape.page_size != PAGE_SIZE:
        return f"page_size {shape.page_size} is not {PAGE_SIZE}, the size its kernels fetch whole"
    return _load()[1]


@functools.lru_cache(maxsize=256)
def best_tile(work: Work, most: int = 4) -> tuple[int, int]:
    """(rows of a tile, runs that the keys are cut in; 0: not cut): the least time by the model of waves. Query heads
    that share a K/V head are packed into the rows of one tile."""
    group, best, least = work.heads // work.kv_heads, (128, 0), float("inf")
    for tile, time in _TILE_TIMES.items():
        if work.head_dim != 128 and tile != 192:  # the kernel's own choice for 64
            continue
        for runs in (0, *range(2, most + 1)) if work.causal_blocks == 1 else (0,):
            tiles = -(-min(work.rows, work.causal_block_size) * group // tile) * work.kv_heads
            pages = -(-work.list_length // max(1, runs))
            duration = time * (pages + _BLOCK_OVERHEAD)
            total = makespan([(tiles * max(work.causal_blocks, runs), duration)], work.processors)
            if runs:
                total += _LAUNCHES + (2 * runs + 1) * work.rows * work.heads * work.head_dim * 2 / _MERGE_BYTES
            if total < least * 0.99:
                best, least = (tile, runs), total
    return best


def run(q: torch.Tensor, layer, plan, scale: float, tile: int = 0, runs: int = 0) -> torch.Tensor:
    """q [rows, heads, head_dim] over the pages of `plan`; `tile` and `runs` as in `fa4_paged_attention`."""
    state = plan._state
    return fa4_paged_attention(q, layer.pool, plan.pages, plan.totals, state.state, plan.num_tokens,
                               plan.causal_block_size, state.geometry.spec.window_tokens, tile, runs, scale)


@functools.lru_cache(maxsize=256)
def _row_starts(work: Work, device: torch.device, *_) -> torch.Tensor:
    """int32 [causal blocks + 1]: where each causal block's rows begin; kept, since captured graphs read it. The first
    call of a geometry compiles its kernel besides, which a capture must not."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("FlashAttention-4 of a new geometry cannot be compiled during CUDA graph capture: run the "
                           "forward once before capturing it")
    starts = [*range(0, work.rows, work.causal_block_size), work.rows]
    return torch.tensor(starts, dtype=torch.int32, device=device)


@torch.library.custom_op("bc_diffusers::fa4_paged_attention", mutates_args=())
def fa4_paged_attention(q: torch.Tensor, layer_pool: torch.Tensor, pages: torch.Tensor, totals: torch.Tensor,
                        state: torch.Tensor, num_tokens: int, causal_block_size: int, window_tokens: int, tile: int,
                        runs: int, scale: float) -> torch.Tensor:
    """Attention over page lists by FlashAttention-4; see `reference_paged_attention` for the tensors.

    Args:
        tile: query rows of a tile, 128 or 192; 0 for what the model of waves says, `runs` included.
        runs: how many sequences the keys of a single causal block are cut over; 0: not (as with several ones).
    """
    forward, n = _load()[0], num_tokens
    heads, kv_heads, page = q.shape[1], layer_pool.shape[2], layer_pool.shape[3]
    work = Work.of(q, layer_pool, pages, n, causal_block_size, 0)
    if tile == 0:
        tile, runs = best_tile(work)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k, v = layer_pool[:, 0].transpose(1, 2), layer_pool[:, 1].transpose(1, 2)
    options = {"softmax_scale": scale, "pack_gqa": heads > kv_heads}
    if tile == 192 and q.shape[2] == 128:
        options |= {"tile_mn": (192, 128), "mma_pv_is_rs": False}
    starts = _row_starts(work, q.device, q.dtype, tile, runs)
    if runs == 0 or work.causal_blocks > 1:
        forward(q[:n], k, v, cu_seqlens_q=starts, seqused_k=totals, page_table=pages,
                max_seqlen_q=min(n, causal_block_size), max_seqlen_k=pages.shape[1] * page, out=out[:n], **options)
    else:
        cut = cut_lists(state, pages, totals, work, runs, window_tokens)
        partials = out.new_empty(runs, n, heads, q.shape[2])
        lse = torch.empty(runs, heads, n, dtype=torch.float32, device=q.device)
        forward(q[None, :n].expand(runs, -1, -1, -1), k, v, seqused_k=cut.lens, page_table=cut.tables,
                max_seqlen_k=cut.tables.shape[1] * page, out=partials, lse=lse, return_lse=True, **options)
        ops.merge_partials_(partials, lse.transpose(1, 2), out[:n], -1, cut.keys)
    if q.shape[0] > n:
        out[n:] = 0
    return out


@fa4_paged_attention.register_fake
def _(q, layer_pool, pages, totals, state, num_tokens, causal_block_size, window_tokens, tile, runs, scale):
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)
