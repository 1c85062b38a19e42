"""What makes a diffusers transformer block-causal: one adapter a family."""

from dataclasses import dataclass

import torch

from ..attention import CachedForward, PlanHolder
from ..cache import BlockCausalKVCache, ForwardPlan


@dataclass(frozen=True)
class LayerGeometry:
    """The self-attention that the cache serves."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


class BlockCausalAdapter:
    """Between the rollout and one transformer. A family's adapter says how latents become tokens, what the rotary
    positions are and how the transformer is called; it holds no state of a rollout.

    Args:
        transformer: the diffusers model; its self-attention processors are replaced when the adapter is made (once, a
            second adapter on the same transformer shares them).
    """

    family = ""
    transformer_classes: tuple[str, ...] = ()

    def __init__(self, transformer: torch.nn.Module):
        self.transformer = transformer
        holder = getattr(transformer, "_block_causal_holder", None)
        if holder is None:
            holder = PlanHolder()
            holder.processors = self.install(holder)
            transformer._block_causal_holder = holder
        self.holder: PlanHolder = holder

    # What a family defines ------------------------------------------------------------------------------------------
    @classmethod
    def layer_geometry(cls, config) -> LayerGeometry:
        """From the transformer's config alone, so that it is known before any weight is loaded."""
        raise NotImplementedError

    @classmethod
    def patch_size(cls, config) -> tuple[int, int, int]:
        """(frames, height, width) of latent pixels in one token."""
        raise NotImplementedError

    def install(self, holder: PlanHolder) -> list:
        """Puts a processor on every self-attention module; returns them in layer order."""
        raise NotImplementedError

    def make_rotary(self, frames: int, height: int, width: int, device: torch.device):
        """Fixed-address tables for a chunk of `frames` x `height` x `width` latent pixels, with `cos`, `sin` and
        `set_start(frame)`."""
        raise NotImplementedError

    def velocity(self, latents: torch.Tensor, timestep: torch.Tensor, conditions: dict, attention_kwargs: dict | None
                 ) -> torch.Tensor:
        """One call of the transformer. latents [1, C, f, h, w]; timestep [1], or [1, tokens] per token."""
        raise NotImplementedError

    def sequence_modules(self) -> tuple[torch.nn.Module, torch.nn.Module] | None:
        """(first block, last projection): the tokens are whole before the one and after the other, and may be shared
        among ranks in between. None: this family cannot."""
        return None

    # What all share -------------------------------------------------------------------------------------------------
    @classmethod
    def tokens_per_frame(cls, config, height: int, width: int) -> int:
        """Tokens of one latent frame of `height` x `width` latent pixels."""
        _, patch_height, patch_width = cls.patch_size(config)
        return (height // patch_height) * (width // patch_width)

    def forward(self, latents: torch.Tensor, timestep: torch.Tensor, conditions: dict, *, plan: ForwardPlan,
                rotary, backend: str = "auto", attention_kwargs: dict | None = None) -> torch.Tensor:
        """One cached forward: stages the chunk's K and V in `plan.cache` and returns the velocity [1, C, f, h, w]."""
        rows = plan.num_tokens
        cos, sin = (None, None) if rotary is None else (rotary.cos[:rows], rotary.sin[:rows])
        cache: BlockCausalKVCache = plan.cache
        group = self.holder.ulysses
        if group is not None and group.pads:
            self.holder.place_hooks((self.transformer, *self.sequence_modules()))
        with self.holder.use(CachedForward(plan, cos, sin, backend), cache):
            return self.velocity(latents, timestep, conditions, attention_kwargs)
