"""Block-causal (autoregressive) video diffusion for diffusers: an exact sliding window over one paged K/V cache.

Names are imported at their first use, so `import bc_diffusers` itself loads neither torch nor diffusers. It makes
`DiffusionPipeline.from_pretrained` find `BlockCausalVideoPipeline` in folders that this package saved.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from . import _diffusers_hook, _layout


__version__ = "0.1.0"

if TYPE_CHECKING:
    from .attention import BlockCausalAttnProcessor, block_causal_attention
    from .cache import BlockCausalKVCache, ForwardPlan, RolloutSpec
    from .pipelines import BlockCausalVideoPipeline, VideoChunk, VideoStream

_HOME = {
    "RolloutSpec": "cache",
    "BlockCausalKVCache": "cache",
    "ForwardPlan": "cache",
    "block_causal_attention": "attention",
    "BlockCausalAttnProcessor": "attention",
    "BlockCausalVideoPipeline": "pipelines",
    "VideoStream": "pipelines",
    "VideoChunk": "pipelines",
}
__all__ = [
    "BlockCausalAttnProcessor",
    "BlockCausalKVCache",
    "BlockCausalVideoPipeline",
    "ForwardPlan",
    "RolloutSpec",
    "VideoChunk",
    "VideoStream",
    "block_causal_attention",
    "embedded_model",
]


def embedded_model() -> Path:
    """The folder of the tiny text-to-video pipeline that ships inside this package (`from_pretrained` takes it)."""
    return _layout.PACKAGE / "embedded_model"


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_HOME[name]}", __name__), name)
    return value


def __dir__():
    return sorted({*globals(), *_HOME})


_layout.install()
_diffusers_hook.install()
