"""Which kernel attends over the pages. A backend says why it cannot serve a call; it never falls back silently."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..cache import ForwardPlan, LayerCache
from . import cudnn, fa4
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
BACKENDS = {
    "fa4": Backend("fa4", fa4.refuses, fa4.run),
    "cudnn": Backend("cudnn", cudnn.refuses, cudnn.run),
    "reference": Backend("reference", lambda shape: None, _run_reference),
}


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


def explain_backends(shape: CallShape) -> dict[str, str | None]:
    """Every backend, fastest first, with None or the reason why it cannot serve calls of this shape. "auto" takes the
    first that can."""
    return {name: backend.refuses(shape) for name, backend in BACKENDS.items()}


@functools.lru_cache(maxsize=1024)
def _remembered(name: str, *shape) -> str:
    return choose_backend(name, CallShape(*shape)).name


@torch.compiler.assume_constant_result  # traced code sees a name, not how it was found
def _chosen(name: str, *shape) -> str:
    return _remembered(name, *shape)


def resolve_backend(name: str, q: torch.Tensor, plan: ForwardPlan) -> Callable:
    cache = plan.cache
    chosen = _chosen(name, q.device, q.dtype, q.shape[-2], cache.num_kv_heads, cache.head_dim, cache.page_size)
    return BACKENDS[chosen].run


# diffusers' name of an attention backend -> ours; "native", its default, says nothing.
_PAGED = {"native": "auto", "_native_cudnn": "cudnn", "flash_4_hub": "fa4"}


def paged_backend(diffusers_name: str | None, name: str) -> str:
    """The backend of a cached forward on a transformer whose `set_attention_backend` was called.

    Raises:
        ValueError: if that one has no paged path, or another one was asked for.
    """
    if diffusers_name is None:
        return name
    diffusers_name = str(getattr(diffusers_name, "value", diffusers_name))
    if diffusers_name not in _PAGED:
        raise ValueError(f"set_attention_backend({diffusers_name!r}) has no paged path for cached attention: reset "
                         f"it, or use one of {', '.join(map(repr, _PAGED))}")
    wanted = _PAGED[diffusers_name]
    if "auto" not in (wanted, name) and wanted != name:
        raise ValueError(f"set_attention_backend({diffusers_name!r}) and attention backend {name!r} do not go "
                         "together")
    return name if wanted == "auto" else wanted
