"""SkyReels-V2: Wan's attention, with a frame-rate embedding and a causal mask of its own, which the cache replaces."""

import contextlib
import warnings

import torch
from diffusers.loaders import SkyReelsV2LoraLoaderMixin

from ..attention.rotary import ChunkRotary
from .wan_adapter import WanAdapter


class SkyReelsRotary(ChunkRotary):
    """Wan's tables, and the frame-rate id that models with `inject_sample_info` embed: 0 for 16 fps, 1 otherwise."""

    def __init__(self, axes, frames, height, width, device, fps: float):
        super().__init__(axes, frames, height, width, device)
        self.fps = torch.tensor([0 if fps == 16 else 1], device=device)


class SkyReelsAdapter(WanAdapter):
    family = "SkyReels-V2"
    transformer_classes = ("SkyReelsV2Transformer3DModel",)
    lora_loader = SkyReelsV2LoraLoaderMixin

    def make_rotary(self, frames, height, width, device) -> SkyReelsRotary:
        config = self.transformer.config
        patch_t, patch_h, patch_w = config.patch_size
        side = 2 * (config.attention_head_dim // 6)
        axes = (config.attention_head_dim - 2 * side, side, side)
        return SkyReelsRotary(axes, frames // patch_t, height // patch_h, width // patch_w, device, self.format.fps)

    def velocity(self, latents, timestep, conditions, *, rotary, clean_frames, attention_kwargs):
        per_frame = 0 < clean_frames < latents.shape[2]
        if clean_frames == latents.shape[2]:
            timestep = torch.zeros_like(timestep)
        elif per_frame:
            if self.ulysses_group() is not None:
                raise ValueError("SkyReels-V2 with a first frame given has a time for each frame, which ranks that "
                                 "share a video do not support: use ulysses_degree=1, or no first frame")
            timestep = timestep.repeat(latents.shape[2])[None]
            timestep[:, :clean_frames] = 0
        fps = rotary.fps if self.transformer.config.inject_sample_info else None
        with self._without_own_mask(), warnings.catch_warnings():
            # The model copies `fps` with torch.tensor: from a list that is an upload for every forward, from a tensor
            # a copy on the device, but torch then recommends another way to do it.
            warnings.filterwarnings("ignore", message="To copy construct from a tensor")
            return self.transformer(hidden_states=latents.to(self.transformer.dtype), timestep=timestep,
                                    encoder_hidden_states=conditions["prompt_embeds"], fps=fps,
                                    enable_diffusion_forcing=per_frame, attention_kwargs=attention_kwargs,
                                    return_dict=False)[0]

    @contextlib.contextmanager
    def _without_own_mask(self):
        """The model builds a causal mask over its input when `num_frame_per_block` > 1 (its pipeline's autoregressive
        mode leaves it so). Visibility comes from the plan, so it is switched off for the call."""
        frames = self.transformer.config.num_frame_per_block
        if frames == 1:
            yield
            return
        self.transformer.register_to_config(num_frame_per_block=1)
        try:
            yield
        finally:
            self.transformer.register_to_config(num_frame_per_block=frames)
