"""LTX-Video: packed tokens, text by cross-attention under a mask, rotary positions in seconds and pixels."""

import torch
from diffusers.loaders import LTXVideoLoraLoaderMixin

from ..attention.ltx_processor import LTXBlockCausalAttnProcessor, LTXChunkRotary
from ..attention.ulysses import SequenceEnds
from .base import BlockCausalAdapter, LayerGeometry
from .text import encode_text


class LTXAdapter(BlockCausalAdapter):
    """`LTXPipeline` places latent frame f at f * ratio / fps seconds. `LTXConditionPipeline` (0.9.5 and later) counts
    pixel frames, of which the first latent frame has one: max(0, f * ratio + 1 - ratio) / fps."""

    family = "LTX-Video"
    transformer_classes = ("LTXVideoTransformer3DModel",)
    lora_loader = LTXVideoLoraLoaderMixin
    forward_conditions = ("prompt_embeds", "prompt_attention_mask")

    @classmethod
    def layer_geometry(cls, config) -> LayerGeometry:
        heads = config.num_attention_heads
        return LayerGeometry(config.num_layers, heads, heads, config.attention_head_dim)

    @classmethod
    def patch_size(cls, config) -> tuple[int, int, int]:
        return config.patch_size_t, config.patch_size, config.patch_size

    @classmethod
    def latent_channels(cls, config) -> int:
        return config.in_channels // (config.patch_size_t * config.patch_size**2)

    @classmethod
    def options_from(cls, stock_config) -> dict:
        return {"counts_pixel_frames": stock_config.get("_class_name") == "LTXConditionPipeline"}

    @classmethod
    def conditions_from_embeds(cls, config, prompt_embeds):
        wide = config.caption_channels
        if prompt_embeds.ndim != 3 or prompt_embeds.shape[0] != 1 or prompt_embeds.shape[2] != wide:
            raise ValueError(f"`prompt_embeds` must be [1, tokens, {wide}], without padding; got "
                             f"{list(prompt_embeds.shape)}")
        mask = torch.ones(prompt_embeds.shape[:2], dtype=torch.bool, device=prompt_embeds.device)
        return {"prompt_embeds": prompt_embeds, "prompt_attention_mask": mask}

    @classmethod
    def embeds_from_conditions(cls, conditions):
        return conditions["prompt_embeds"][:, conditions["prompt_attention_mask"][0]]

    def install(self, holder) -> list:
        processors = []
        for block in self.transformer.transformer_blocks:
            processor = LTXBlockCausalAttnProcessor(holder, block.attn1.processor)
            block.attn1.set_processor(processor)
            processors.append(processor)
        return processors

    def make_rotary(self, frames, height, width, device) -> LTXChunkRotary:
        rope, (patch_t, patch, _) = self.transformer.rope, self.patch_size(self.transformer.config)
        ratio, pixels, fps = self.format.scale_factor_temporal, self.format.scale_factor_spatial, self.format.fps
        lead = (ratio - 1) / fps if self.options.get("counts_pixel_frames") else 0.0
        return LTXChunkRotary(
            rope.dim, rope.theta, frames // patch_t, height // patch, width // patch, (ratio * patch_t / fps, lead),
            pixels * patch, pixels * patch, (rope.base_num_frames, rope.base_height, rope.base_width), device)

    def sequence_ends(self) -> SequenceEnds:
        return SequenceEnds(self.transformer.transformer_blocks[0], self.transformer.proj_out)

    def encode_prompt(self, prompt, tokenizer, text_encoder, *, max_tokens, height, width, num_frames, device, dtype,
                      negative=False):
        embeds, mask = encode_text(prompt, tokenizer, text_encoder, max_tokens, device, masked=False)
        return {"prompt_embeds": embeds.to(device=device, dtype=dtype), "prompt_attention_mask": mask.bool()}

    def velocity(self, latents, timestep, conditions, *, rotary, clean_frames, attention_kwargs):
        patch_t, patch, _ = self.patch_size(self.transformer.config)
        frames, height, width = (n // p for n, p in zip(latents.shape[2:], (patch_t, patch, patch)))
        if clean_frames == latents.shape[2]:
            timestep = torch.zeros_like(timestep)
        elif clean_frames:
            timestep = timestep.repeat(frames * height * width)
            timestep[:clean_frames // patch_t * height * width] = 0
            timestep = timestep[None]
        cells = latents.unflatten(4, (width, patch)).unflatten(3, (height, patch)).unflatten(2, (frames, patch_t))
        tokens = cells.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)
        # The grid only sizes the model's own rotary tables; the processors use those of the chunk's place in time.
        out = self.transformer(
            hidden_states=tokens.to(self.transformer.dtype), encoder_hidden_states=conditions["prompt_embeds"],
            encoder_attention_mask=conditions["prompt_attention_mask"], timestep=timestep, num_frames=frames,
            height=height, width=width, attention_kwargs=attention_kwargs, return_dict=False)[0]
        cells = out.unflatten(1, (frames, height, width)).unflatten(4, (-1, patch_t, patch, patch))
        return cells.permute(0, 4, 1, 5, 2, 6, 3, 7).flatten(6).flatten(4, 5).flatten(2, 3)
