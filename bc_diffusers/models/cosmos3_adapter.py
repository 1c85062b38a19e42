"""Cosmos3: the prompt's K and V, from the understanding stream, are the cache's fixed region."""

from dataclasses import dataclass

import torch

from ..attention.cosmos3_processor import Cosmos3BlockCausalAttnProcessor, PromptForward
from ..attention.mrope import ChunkMRope, text_tables
from ..attention.ulysses import SequenceEnds
from .base import BlockCausalAdapter, LayerGeometry


SYSTEM_PROMPT = "You are a helpful assistant who will generate videos from a give prompt."  # as the model was trained

NO_EMBEDS = "Cosmos3 takes no `prompt_embeds`: its transformer reads the prompt's tokens itself; give `prompt`"


@dataclass(frozen=True)
class PackedChunk:
    """The index tensors that describe a chunk without text to the transformer."""

    position_ids: torch.Tensor
    tokens: torch.Tensor
    noisy_tokens: torch.Tensor
    noisy_frames: torch.Tensor


class Cosmos3Rotary(ChunkMRope):
    """The rotary tables and, at addresses as fixed, the index tensors of every call made with them."""

    def __init__(self, *args):
        super().__init__(*args)
        self._chunks: dict[tuple[int, int], PackedChunk] = {}

    def packed(self, frames: int, clean_frames: int) -> PackedChunk:
        key = (frames, clean_frames)
        if key not in self._chunks:
            height, width = self._grid_cos.shape[1:3]
            stride, device = height * width, self.cos.device
            tokens = torch.arange(frames * stride, device=device)
            # The model makes tables of these positions, and the processors use their own: any will do.
            positions = torch.zeros(3, frames * stride, dtype=torch.long, device=device)
            self._chunks[key] = PackedChunk(positions, tokens, tokens[clean_frames * stride:],
                                            torch.arange(clean_frames, frames, device=device))
        return self._chunks[key]


class Cosmos3Adapter(BlockCausalAdapter):
    """Positions count from the video's first latent frame, and the prompt ends `unified_3d_mrope_temporal_modality_
    margin` + 1 before it, whatever its length: rotary attention sees differences only, and these are the model's own.
    A prompt of another length therefore fits to the history as one of the same length would.
    """

    family = "Cosmos3"
    transformer_classes = ("Cosmos3OmniTransformer",)
    component_names = {"tokenizer": "text_tokenizer"}
    forward_conditions = ()

    @classmethod
    def layer_geometry(cls, config) -> LayerGeometry:
        return LayerGeometry(config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads,
                             config.head_dim)

    @classmethod
    def patch_size(cls, config) -> tuple[int, int, int]:
        return 1, config.latent_patch_size, config.latent_patch_size

    @classmethod
    def latent_channels(cls, config) -> int:
        return config.latent_channel

    @classmethod
    def options_from(cls, stock_config) -> dict:
        return {"use_system_prompt": stock_config.get("default_use_system_prompt", True)}

    @classmethod
    def conditions_from_embeds(cls, config, prompt_embeds):
        raise ValueError(NO_EMBEDS)

    @classmethod
    def embeds_from_conditions(cls, conditions):
        raise ValueError(NO_EMBEDS)

    @classmethod
    def max_prompt_tokens(cls, config, max_sequence_length) -> int:
        return max_sequence_length

    def install(self, holder) -> list:
        processors = []
        for layer in self.transformer.layers:
            processor = Cosmos3BlockCausalAttnProcessor(holder, layer.self_attn.processor)
            layer.self_attn.set_processor(processor)
            processors.append(processor)
        return processors

    def sequence_ends(self) -> SequenceEnds:
        return SequenceEnds(self.transformer.layers[0], self.transformer.norm_moe_gen, position=1, name="gen_seq")

    # ------------------------------------------------------------------------------------------------ the prompt
    def encode_prompt(self, prompt, tokenizer, text_encoder, *, max_tokens, height, width, num_frames, device, dtype,
                      negative=False):
        if tokenizer is None:
            raise ValueError("this pipeline was loaded without a tokenizer, which Cosmos3 needs to read a prompt")
        verb = "is not" if negative else "is"
        facts = [f"This video {verb} of {height}x{width} resolution."]
        if num_frames is not None:  # an endless video has no duration
            seconds, fps = num_frames / self.format.fps, self.format.fps
            facts.insert(0, f"The video {verb} {seconds:.1f} seconds long and {verb} of {fps:.0f} FPS.")
        text = " ".join([f"{prompt.rstrip('.')}."] * bool(prompt.rstrip(".")) + facts)
        messages = [{"role": "user", "content": text}]
        if self.options.get("use_system_prompt", True):
            messages.insert(0, {"role": "system", "content": SYSTEM_PROMPT})
        ids = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, add_vision_id=False,
                                            return_dict=True)["input_ids"]
        ids = [*ids, tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|vision_start|>")]
        if len(ids) > max_tokens:
            raise ValueError(f"the prompt takes {len(ids)} tokens with what the model expects around it, and there is "
                             f"room for {max_tokens}: shorten it, or raise max_sequence_length")
        return {"prompt_ids": torch.tensor(ids, dtype=torch.long, device=device)}

    def prompt_tokens(self, conditions) -> int:
        return conditions["prompt_ids"].shape[0]

    def write_prompt(self, cache, conditions) -> None:
        ids = conditions["prompt_ids"]
        config, patch, device = self.transformer.config, self.transformer.config.latent_patch_size, ids.device
        order = torch.arange(ids.shape[0], dtype=torch.float64, device=device)
        time = order - ids.shape[0] - config.unified_3d_mrope_temporal_modality_margin
        space = order if config.unified_3d_mrope_reset_spatial_ids else time
        tables = text_tables(config.head_dim, config.rope_axes_dim, config.rope_theta, time, space)
        nothing = order.new_empty(0, dtype=torch.long)
        no_frames = torch.zeros(1, config.latent_channel, 0, patch, patch, dtype=self.transformer.dtype, device=device)
        # Through the model's own forward, so that offload hooks bring the weights. Never compiled: once a prompt, in
        # every length, and writing to the cache by position is host code that differs from layer to layer.
        eager = torch.compiler.set_stance("force_eager")
        with eager, self.holder.use(PromptForward(*tables), cache):
            self.transformer(
                input_ids=ids, text_indexes=order.long(), position_ids=order.long().expand(3, -1),
                und_len=ids.shape[0], sequence_length=ids.shape[0], vision_tokens=[no_frames],
                vision_token_shapes=[(0, 1, 1)], vision_sequence_indexes=nothing, vision_mse_loss_indexes=nothing,
                vision_timesteps=order.new_empty(0, dtype=torch.float32), vision_noisy_frame_indexes=[nothing],
                return_dict=False)

    # ------------------------------------------------------------------------------------------------ the video
    def make_rotary(self, frames, height, width, device) -> Cosmos3Rotary:
        config = self.transformer.config
        patch = config.latent_patch_size
        step = config.base_fps / self.format.fps if config.enable_fps_modulation else 1.0
        return Cosmos3Rotary(config.head_dim, config.rope_axes_dim, config.rope_theta, frames, height // patch,
                             width // patch, step, device)

    def velocity(self, latents, timestep, conditions, *, rotary, clean_frames, attention_kwargs):
        """Clean frames have no time embedding at all; their velocity is 0."""
        if attention_kwargs:
            raise ValueError(f"Cosmos3 takes no attention_kwargs, got {sorted(attention_kwargs)}")
        frames, patch = latents.shape[2], self.transformer.config.latent_patch_size
        chunk = rotary.packed(frames, clean_frames)
        nothing = chunk.tokens[:0]
        return self.transformer(
            input_ids=nothing, text_indexes=nothing, position_ids=chunk.position_ids, und_len=0,
            sequence_length=chunk.tokens.shape[0], vision_tokens=[latents.to(self.transformer.dtype)],
            vision_token_shapes=[(frames, latents.shape[3] // patch, latents.shape[4] // patch)],
            vision_sequence_indexes=chunk.tokens, vision_mse_loss_indexes=chunk.noisy_tokens,
            vision_timesteps=timestep.expand(chunk.noisy_tokens.shape[0]),
            vision_noisy_frame_indexes=[chunk.noisy_frames], return_dict=False)[0][0]
