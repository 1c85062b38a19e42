"""The reference backend: gathers each causal block's listed keys and runs scaled_dot_product_attention over them."""

import torch
import torch.nn.functional as F


@torch.library.custom_op("bc_diffusers::reference_paged_attention", mutates_args=())
def reference_paged_attention(q: torch.Tensor, layer_pool: torch.Tensor, pages: torch.Tensor, totals: torch.Tensor,
                              num_tokens: int, causal_block_size: int, scale: float) -> torch.Tensor:
    """Attention over page lists on any device.

    Args:
        q: [rows, heads, head_dim]; rows >= `num_tokens` are padding and give 0.
        layer_pool: [pages, 2, kv_heads, page_size, head_dim], heads a multiple of kv_heads.
        pages: int32 [causal blocks, list length]. totals: int32 [causal blocks], keys of each, own tokens included.

    Returns:
        [rows, heads, head_dim].
    """
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the reference backend reads key counts on the host and cannot be captured in a CUDA "
                           "graph: choose another attention backend")
    page_size = layer_pool.shape[3]
    out = q.new_zeros(q.shape)
    for j, total in enumerate(totals.tolist()):
        rows = slice(j * causal_block_size, min((j + 1) * causal_block_size, num_tokens))
        listed = layer_pool.index_select(0, pages[j, :-(-total // page_size)])
        k, v = listed.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, None, :, :total]
        block = F.scaled_dot_product_attention(q[None, rows].transpose(1, 2), k, v, scale=scale,
                                               enable_gqa=k.shape[1] != q.shape[1])
        out[rows] = block[0].transpose(0, 1)
    return out


@reference_paged_attention.register_fake
def _(q, layer_pool, pages, totals, num_tokens, causal_block_size, scale):
    return q.new_empty(q.shape)
