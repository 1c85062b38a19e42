"""Which kernel attends over the pages. A backend says why it cannot serve a call; it never falls back silently."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..cache import ForwardPlan, LayerCache
from .reference import reference_paged_attention


@dataclass(frozen=True)
class CallShape:
    """What decides whether a backend can serve a call."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int


@dataclass(frozen=True)
class Backend:
    """`refuses(shape)` is None or the reason; `run(q [rows, heads, head_dim], layer, plan, scale)` attends."""

    name: str
    refuses: Callable[[CallShape], str | None]
    run: Callable[[torch.Tensor, LayerCache, ForwardPlan, float], torch.Tensor]


def _run_reference(q, layer, plan, scale):
    return reference_paged_attention(q, layer.pool, plan.pages, plan.totals, plan.num_tokens, plan.causal_block_size,
                                     scale)


# Fastest first: "auto" takes the first that serves the call.
BACKENDS = {"reference": Backend("reference", lambda shape: None, _run_reference)}


def choose_backend(name: str, shape: CallShape) -> Backend:
    """The backend that serves calls of this shape.

    Raises:
        ValueError: for an unknown name, or a named backend that cannot serve the call (with the reason).
    """
    if name == "auto":
        return next(b for b in BACKENDS.values() if b.refuses(shape) is None)
    if name not in BACKENDS:
        raise ValueError(f"unknown attention backend {name!r}: choose auto or one of {', '.join(BACKENDS)}")
    reason = BACKENDS[name].refuses(shape)
    if reason is not None:
        raise ValueError(f"attention backend {name!r} cannot serve this call: {reason}")
    return BACKENDS[name]


def resolve_backend(name: str, q: torch.Tensor, plan: ForwardPlan) -> Callable:
    cache = plan.cache
    shape = CallShape(q.device, q.dtype, q.shape[-2], cache.num_kv_heads, cache.head_dim, cache.page_size)
    return choose_backend(name, shape).run
