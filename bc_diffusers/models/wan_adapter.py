"""Wan 2.1 / 2.2: text by cross-attention, which stays stock."""

import torch
from diffusers.loaders import WanLoraLoaderMixin
from diffusers.pipelines.wan.pipeline_wan import prompt_clean

from ..attention.processor import BlockCausalAttnProcessor
from ..attention.rotary import ChunkRotary
from ..attention.ulysses import SequenceEnds
from .base import BlockCausalAdapter, LayerGeometry
from .text import encode_text
from .wan_blocks import fuse_block


class WanAdapter(BlockCausalAdapter):
    family = "Wan"
    transformer_classes = ("WanTransformer3DModel",)
    takes_enable_parallelism = True
    lora_loader = WanLoraLoaderMixin

    @classmethod
    def layer_geometry(cls, config) -> LayerGeometry:
        heads = config.num_attention_heads
        return LayerGeometry(config.num_layers, heads, heads, config.attention_head_dim)

    @classmethod
    def patch_size(cls, config) -> tuple[int, int, int]:
        return tuple(config.patch_size)

    def install(self, holder) -> list:
        processors = []
        for block in self.transformer.blocks:
            processor = BlockCausalAttnProcessor(holder, block.attn1.processor)
            block.attn1.set_processor(processor)
            processors.append(processor)
            fuse_block(block)
        return processors

    rotary_dtype = torch.float32

    def make_rotary(self, frames, height, width, device) -> ChunkRotary:
        config = self.transformer.config
        patch_t, patch_h, patch_w = config.patch_size
        side = 2 * (config.attention_head_dim // 6)
        axes = (config.attention_head_dim - 2 * side, side, side)
        return ChunkRotary(axes, frames // patch_t, height // patch_h, width // patch_w, device,
                           dtype=self.rotary_dtype)

    def sequence_ends(self) -> SequenceEnds:
        return SequenceEnds(self.transformer.blocks[0], self.transformer.proj_out)

    def encode_prompt(self, prompt, tokenizer, text_encoder, *, max_tokens, height, width, num_frames, device, dtype,
                      negative=False):
        embeds, mask = encode_text(prompt_clean(prompt), tokenizer, text_encoder, max_tokens, device)
        return {"prompt_embeds": (embeds * mask[..., None]).to(device=device, dtype=dtype)}

    def velocity(self, latents, timestep, conditions, *, rotary, clean_frames, attention_kwargs):
        if clean_frames:
            timestep = self._with_clean_frames(timestep, latents, clean_frames)
        # A tuple, because under a context-parallel plan diffusers' hooks refuse output objects.
        return self.transformer(hidden_states=latents.to(self.transformer.dtype), timestep=timestep,
                                encoder_hidden_states=conditions["prompt_embeds"],
                                attention_kwargs=attention_kwargs, return_dict=False)[0]

    def _with_clean_frames(self, timestep: torch.Tensor, latents: torch.Tensor, clean_frames: int) -> torch.Tensor:
        """[1, tokens] with 0 for the tokens of the clean first frames; [1] if all are clean."""
        if clean_frames == latents.shape[2]:
            return torch.zeros_like(timestep)
        stride = self.tokens_per_frame(self.transformer.config, *latents.shape[3:])
        row = timestep.expand(latents.shape[2] * stride).clone()
        row[:clean_frames * stride] = 0
        return row[None]
