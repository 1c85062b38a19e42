"""block_causal_attention: stage a forward's K and V, then attend over the fixed region, the window and the chunk."""

import torch

from .. import ops
from ..cache import ForwardPlan, LayerCache
from .backends import resolve_backend


def block_causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: ForwardPlan,
                           layer: int | LayerCache, backend: str = "auto",
                           scale: float | None = None) -> torch.Tensor:
    """Attention of one layer through the paged cache.

    Writes K and V of the plan's tokens at the staged positions (overwriting what an earlier pass staged there) and
    lets each causal block attend to exactly the keys it may see. Rows past `plan.num_tokens` are padding: not staged,
    not attended, zero in the output.

    Args:
        q (`torch.Tensor`): [1, rows, heads, head_dim]; rows >= `plan.num_tokens`, heads a multiple of kv_heads.
        k, v (`torch.Tensor`): [1, rows, kv_heads, head_dim] in the cache's dtype; any strides but the last.
        plan (`ForwardPlan`): from `cache.plan`.
        layer (`int` or `LayerCache`): the layer, or its view `cache.layer(i)` (which traced code should hold).
        backend (`str`, *optional*, defaults to `"auto"`): `"auto"` takes the fastest that can serve the call; a named
            backend that cannot serve it raises and says why.
        scale (`float`, *optional*): defaults to `head_dim ** -0.5`.

    Returns:
        `torch.Tensor`: [1, rows, heads, head_dim].
    """
    plan.check_open()
    view = layer if isinstance(layer, LayerCache) else plan.cache.layer(layer)
    _check(q, k, v, plan, view)
    attend = resolve_backend(backend, q, plan)
    view.write(k[0], v[0], plan)
    return attend(q[0], view, plan, q.shape[-1] ** -0.5 if scale is None else scale)[None]


def norm_rope_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_weight: torch.Tensor,
                        k_weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float, plan: ForwardPlan,
                        layer: LayerCache, backend: str = "auto", interleaved: bool = True) -> torch.Tensor:
    """`block_causal_attention` of projections whose RMSNorm and rotary embedding are still to come: both in one
    operator, in fp32 and rounded once, which with a single causal block stages K and V as well.

    Args:
        q, k, v: as for `block_causal_attention`; q and k are overwritten.
        q_weight, k_weight: [head_dim] (norm per head) or [heads * head_dim] (over all heads).
        cos, sin: float32 [rows, head_dim / 2].
        interleaved: whether neighbours rotate together, or elements that are head_dim / 2 apart.
    """
    plan.check_open()
    _check(q, k, v, plan, layer)
    attend = resolve_backend(backend, q, plan)
    norm_rope = (q[0], k[0], q_weight, k_weight, cos, sin, eps, interleaved)
    if plan.num_causal_blocks == 1:
        views, rows = plan._views, slice(0, min(q.shape[1], plan._views.geometry.rows))
        ops.qk_norm_rope_(*norm_rope, v=v[0], layer_pool=layer.pool, dst=views.dst[rows], dst2=views.dst2[rows],
                          num_tokens=plan.num_tokens, lengths=views.lengths, totals=views.totals,
                          causal_block_size=plan.causal_block_size)
    else:
        ops.qk_norm_rope_(*norm_rope)
        layer.write(k[0], v[0], plan)
    return attend(q[0], layer, plan, q.shape[-1] ** -0.5)[None]


def _check(q, k, v, plan, view):
    cache = plan.cache
    if view.cache is not cache:
        raise ValueError("layer is a view of another cache than the plan's")
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != 4 or t.shape[0] != 1:
            raise ValueError(f"{name} must be [1, rows, heads, head_dim] (a cache is one video), got {tuple(t.shape)}")
        if t.dtype != cache.dtype or t.device != cache.device:
            raise ValueError(f"{name} is {t.dtype} on {t.device}, the cache {cache.dtype} on {cache.device}")
        if t.shape[3] != cache.head_dim:
            raise ValueError(f"{name} has head_dim {t.shape[3]}, the cache {cache.head_dim}")
        if t.shape[1] != q.shape[1]:
            raise ValueError(f"{name} has {t.shape[1]} rows, q {q.shape[1]}")
        if torch.is_grad_enabled() and t.requires_grad:
            raise ValueError(f"{name} requires grad: cached attention is for inference, use torch.no_grad()")
    if q.shape[1] < plan.num_tokens:
        raise ValueError(f"the plan has {plan.num_tokens} tokens, q only {q.shape[1]} rows")
    if k.shape[2] != cache.num_kv_heads or v.shape[2] != cache.num_kv_heads:
        raise ValueError(f"k has {k.shape[2]} and v {v.shape[2]} heads, the cache holds {cache.num_kv_heads}")
    if q.shape[2] % cache.num_kv_heads:
        raise ValueError(f"{q.shape[2]} query heads are no multiple of {cache.num_kv_heads} K/V heads")
