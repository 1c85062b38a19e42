"""What makes a diffusers transformer block-causal: one adapter a family."""

from dataclasses import dataclass

import torch
from diffusers.loaders.lora_pipeline import CosmosLoraLoaderMixin

from ..attention import CachedForward, PlanHolder
from ..attention.ulysses import SequenceEnds, UlyssesGroup
from ..cache import BlockCausalKVCache, ForwardPlan


@dataclass(frozen=True)
class LayerGeometry:
    """The self-attention that the cache serves."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class VideoFormat:
    """What some families tell their transformer of the video besides its latents: frames a second, and how many pixel
    frames and pixels along an edge a latent frame and a latent pixel stand for."""

    fps: float = 16.0
    scale_factor_temporal: int = 4
    scale_factor_spatial: int = 8


class BlockCausalAdapter:
    """Between the rollout and one transformer. A family's adapter says how a prompt and latents become what the
    transformer takes, and where the tokens lie in time; it holds no state of a rollout.

    Args:
        transformer: the diffusers model; its self-attention processors are replaced when the adapter is made (once, a
            second adapter on the same transformer shares them).
        video_format (`VideoFormat`, *optional*).
        options (`dict`, *optional*): what `options_from` read in the stock folder.
    """

    family = ""
    transformer_classes: tuple[str, ...] = ()
    # Our component -> what the family's own pipeline calls it, where the names differ.
    component_names: dict[str, str] = {}
    # The diffusers mixin whose `lora_state_dict` reads the family's LoRA files; this one knows diffusers' format only.
    lora_loader: type = CosmosLoraLoaderMixin
    # The conditions that `velocity` reads (a CUDA graph keeps copies of these at fixed addresses).
    forward_conditions: tuple[str, ...] = ("prompt_embeds",)
    # Whether diffusers' own `enable_parallelism` cuts this family's sequence as the processors expect.
    takes_enable_parallelism = False

    def __init__(self, transformer: torch.nn.Module, video_format: VideoFormat | None = None,
                 options: dict | None = None):
        self.transformer, self.format, self.options = transformer, video_format or VideoFormat(), options or {}
        holder = getattr(transformer, "_block_causal_holder", None)
        if holder is None:
            holder = PlanHolder()
            holder.processors = self.install(holder)
            transformer._block_causal_holder = holder
        self.holder: PlanHolder = holder

    # What a family must define --------------------------------------------------------------------------------------
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
        """What a chunk of up to `frames` x `height` x `width` latent pixels needs at fixed addresses: float32 tables
        `cos` and `sin` [tokens, ...], moved by `set_start(first latent frame)`, and whatever else `velocity` reads.
        It lives as long as the cache it is used with."""
        raise NotImplementedError

    def encode_prompt(self, prompt: str, tokenizer, text_encoder, *, max_tokens: int, height: int, width: int,
                      num_frames: int | None, device: torch.device, dtype: torch.dtype, negative: bool = False
                      ) -> dict[str, torch.Tensor]:
        """The conditions of a prompt.

        Args:
            max_tokens (`int`): the longest prompt; longer ones are cut or refused, as the family does it.
            height, width (`int`), num_frames (`int`, *optional*): of the video, in pixels; `None`: endless.
            negative (`bool`, *optional*, defaults to `False`): what guidance leads away from; may be empty then.
        """
        raise NotImplementedError

    def velocity(self, latents: torch.Tensor, timestep: torch.Tensor, conditions: dict[str, torch.Tensor], *, rotary,
                 clean_frames: int, attention_kwargs: dict | None) -> torch.Tensor:
        """One call of the transformer: the velocity (noise - clean) [1, C, f, h, w].

        Args:
            latents: [1, C, f, h, w].
            timestep: [1], 0 to 1000.
            rotary: from `make_rotary`.
            clean_frames: the first frames that carry no noise; `f` in a clean pass without context noise.
        """
        raise NotImplementedError

    # What a family may redefine -------------------------------------------------------------------------------------
    @classmethod
    def latent_channels(cls, config) -> int:
        return config.in_channels

    @classmethod
    def options_from(cls, stock_config: dict) -> dict:
        """What the stock folder's pipeline config says and the adapter needs: JSON-ready."""
        return {}

    @classmethod
    def conditions_from_embeds(cls, config, prompt_embeds: torch.Tensor) -> dict[str, torch.Tensor]:
        """The conditions of a caller who has the embeddings already.

        Raises:
            ValueError: for a wrong shape, or if the family has none.
        """
        wide = config.text_dim
        if prompt_embeds.ndim != 3 or prompt_embeds.shape[0] != 1 or prompt_embeds.shape[2] != wide:
            raise ValueError(f"`prompt_embeds` must be [1, tokens, {wide}], got {list(prompt_embeds.shape)}")
        return {"prompt_embeds": prompt_embeds}

    @classmethod
    def embeds_from_conditions(cls, conditions: dict[str, torch.Tensor]) -> torch.Tensor:
        """The way back: what a caller may keep of a prompt and give to `conditions_from_embeds`."""
        return conditions["prompt_embeds"]

    @classmethod
    def max_prompt_tokens(cls, config, max_sequence_length: int) -> int:
        """The most tokens of a prompt that go into the cache; 0 where text comes by cross-attention."""
        return 0

    def prompt_tokens(self, conditions: dict[str, torch.Tensor]) -> int:
        """How many tokens of this prompt go into the cache."""
        return 0

    def write_prompt(self, cache: BlockCausalKVCache, conditions: dict[str, torch.Tensor]) -> None:
        """Writes the prompt's K and V of every layer at positions [0, `prompt_tokens`)."""

    def sequence_ends(self) -> SequenceEnds | None:
        """Where the ranks that share a video split the tokens, and where they join them. None: the family cannot."""
        return None

    # What all share -------------------------------------------------------------------------------------------------
    @classmethod
    def tokens_per_frame(cls, config, height: int, width: int) -> int:
        """Tokens of one latent frame of `height` x `width` latent pixels."""
        _, patch_height, patch_width = cls.patch_size(config)
        return (height // patch_height) * (width // patch_width)

    def begin(self, cache: BlockCausalKVCache, conditions: dict[str, torch.Tensor]) -> None:
        """Commits the prompt's tokens, where the family has any, in a cache that was just opened."""
        tokens = self.prompt_tokens(conditions)
        if tokens:
            self.write_prompt(cache, conditions)
            cache.commit(tokens)

    def change_prompt(self, cache: BlockCausalKVCache, before: dict[str, torch.Tensor],
                      after: dict[str, torch.Tensor]) -> None:
        """Puts another prompt in the place of `before`, between two chunks. It may have another length: the pin is
        the prompt's own length (and the sink frames'), so it moves, and no forward sees padding."""
        old, new = self.prompt_tokens(before), self.prompt_tokens(after)
        if new != old:
            cache.resize_prefix(old, new)
        if new:
            self.write_prompt(cache, after)

    def ulysses_group(self) -> UlyssesGroup | None:
        """The ranks that share this transformer's videos.

        Raises:
            ValueError: if diffusers' `enable_parallelism` was asked for something that is not supported.
        """
        config = getattr(self.transformer, "_parallel_config", None)
        if getattr(config, "tensor_parallel_config", None) is not None:
            raise ValueError("cached attention does not run under tensor parallelism: use the pipeline's "
                             "enable_context_parallel(ulysses_degree=...)")
        if config is not None and not self.takes_enable_parallelism:
            raise ValueError(f"cached attention of {self.family} does not run under diffusers' enable_parallelism: "
                             "use the pipeline's enable_context_parallel(ulysses_degree=...)")
        return self.holder.ulysses

    def place_hooks(self) -> None:
        """Sees that our own hooks are where they belong, if the sequence is shared by them."""
        group = self.ulysses_group()
        if group is not None and group.pads:
            self.holder.place_hooks(self.transformer, self.sequence_ends())

    def forward(self, latents: torch.Tensor, timestep: torch.Tensor, conditions: dict, *, plan: ForwardPlan,
                rotary, backend: str = "auto", clean_frames: int = 0, attention_kwargs: dict | None = None
                ) -> torch.Tensor:
        """One cached forward: stages the chunk's K and V in `plan.cache` and returns the velocity [1, C, f, h, w].
        See `velocity` for the arguments."""
        rows = plan.num_tokens
        cos, sin = (None, None) if rotary is None else (rotary.cos[:rows], rotary.sin[:rows])
        self.place_hooks()
        with self.holder.use(CachedForward(plan, cos, sin, backend), plan.cache):
            return self.velocity(latents, timestep, conditions, rotary=rotary, clean_frames=clean_frames,
                                 attention_kwargs=attention_kwargs)
