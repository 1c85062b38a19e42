"""Wan 2.1 / 2.2 and SkyReels-V2: text by cross-attention, which stays stock."""

from ..attention.processor import BlockCausalAttnProcessor
from ..attention.rotary import ChunkRotary
from .base import BlockCausalAdapter, LayerGeometry


class WanAdapter(BlockCausalAdapter):
    family = "Wan"
    transformer_classes = ("WanTransformer3DModel", "SkyReelsV2Transformer3DModel")

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
        return processors

    def make_rotary(self, frames, height, width, device) -> ChunkRotary:
        config = self.transformer.config
        patch_t, patch_h, patch_w = config.patch_size
        side = 2 * (config.attention_head_dim // 6)
        axes = (config.attention_head_dim - 2 * side, side, side)
        return ChunkRotary(axes, frames // patch_t, height // patch_h, width // patch_w, device)

    def sequence_modules(self):
        return self.transformer.blocks[0], self.transformer.proj_out

    def velocity(self, latents, timestep, conditions, attention_kwargs):
        # A tuple, because under a context-parallel plan diffusers' hooks refuse output objects.
        return self.transformer(hidden_states=latents.to(self.transformer.dtype), timestep=timestep,
                                encoder_hidden_states=conditions["prompt_embeds"],
                                attention_kwargs=attention_kwargs, return_dict=False)[0]
