"""Tiny random models of every family, and what their own code computes for a whole video under an explicit mask.

A `Family` calls the stock transformer as the model's own pipeline does: over all frames at once, the history clean and
the last chunk noisy. Nothing in here goes through the adapters.
"""

import contextlib
from types import SimpleNamespace
from unittest import mock

import torch
from diffusers import (
    Cosmos3OmniPipeline,
    Cosmos3OmniTransformer,
    LTXVideoTransformer3DModel,
    SkyReelsV2Transformer3DModel,
    WanTransformer3DModel,
)
from diffusers.models.transformers import (
    transformer_cosmos3,
    transformer_ltx,
    transformer_skyreels_v2,
    transformer_wan,
)

from bc_diffusers.models import VideoFormat


def block_mask(blocks, pin_tokens, window_tokens):
    """bool [n, n]: which keys each causal block [start, end) of a sequence sees."""
    total = blocks[-1][1]
    mask = torch.zeros(total, total, dtype=torch.bool)
    for start, end in blocks:
        mask[start:end, max(0, start - window_tokens):end] = True
        mask[start:end, :min(pin_tokens, end)] = True
    return mask


def cut(start, end, size):
    return [(s, min(s + size, end)) for s in range(start, end, size)]


class Family:
    """One model family at its smallest: `transformer()`, `latents(frames)`, `conditions()`, and `reference(...)`."""

    name = ""
    module = None  # where the stock processors look up dispatch_attention_fn
    channels, height, width, tokens_per_frame = 16, 4, 6, 6
    format = VideoFormat()
    options = None

    def latents(self, frames, seed):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(1, self.channels, frames, self.height, self.width, generator=generator)

    def conditions(self, seed=0, tokens=5):
        generator = torch.Generator().manual_seed(seed)
        return {"prompt_embeds": torch.randn(1, tokens, 32, generator=generator)}

    def prompt_tokens(self, conditions):
        return 0

    def exact_rope(self, transformer):
        """The model's rotary embedding with its angles in float64, where its own are too coarse to compare with."""
        return contextlib.nullcontext()

    @torch.no_grad()
    def reference(self, transformer, latents, clean_frames, timestep, conditions, mask):
        """The velocity of all frames; `mask` is over the prompt's tokens (if it has any) and the video's."""
        stock = self.module.dispatch_attention_fn
        prompt = self.prompt_tokens(conditions)
        seen = mask[prompt:]
        used = []

        def masked(query, key, value, attn_mask=None, is_causal=False, **kwargs):
            if not is_causal and (query.shape[1], key.shape[1]) == tuple(seen.shape):
                attn_mask = seen[None, None]
                used.append(1)
            return stock(query, key, value, attn_mask=attn_mask, is_causal=is_causal, **kwargs)

        with mock.patch.object(self.module, "dispatch_attention_fn", masked), self.exact_rope(transformer):
            out = self.stock_call(transformer, latents, clean_frames, timestep, conditions)
        assert used, "no attention call took the mask"
        return out


class Wan(Family):
    name, module = "wan", transformer_wan

    def transformer(self):
        torch.manual_seed(0)
        return WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=16, out_channels=16,
            text_dim=32, freq_dim=16, ffn_dim=32, num_layers=2).eval()

    def stock_call(self, transformer, latents, clean_frames, timestep, conditions):
        rows = torch.full((1, latents.shape[2] * self.tokens_per_frame), float(timestep))
        rows[:, :clean_frames * self.tokens_per_frame] = 0
        return transformer(hidden_states=latents, timestep=rows, encoder_hidden_states=conditions["prompt_embeds"],
                           return_dict=False)[0]


class SkyReels(Family):
    name, module, format = "skyreels", transformer_skyreels_v2, VideoFormat(fps=24)

    def transformer(self, **kwargs):
        torch.manual_seed(0)
        return SkyReelsV2Transformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=16, out_channels=16,
            text_dim=32, freq_dim=16, ffn_dim=32, num_layers=2, inject_sample_info=True, **kwargs).eval()

    def stock_call(self, transformer, latents, clean_frames, timestep, conditions):
        frames = torch.full((1, latents.shape[2]), float(timestep))
        frames[:, :clean_frames] = 0
        return transformer(hidden_states=latents, timestep=frames, encoder_hidden_states=conditions["prompt_embeds"],
                           enable_diffusion_forcing=True, fps=[1], return_dict=False)[0]


class Cosmos3(Family):
    name, module = "cosmos3", transformer_cosmos3
    channels, format = 4, VideoFormat(fps=24.0, scale_factor_temporal=4, scale_factor_spatial=16)

    def __init__(self, exact=True, **config):
        self.exact, self.config = exact, config

    def transformer(self):
        torch.manual_seed(0)
        config = {
            "head_dim": 16, "hidden_size": 48, "intermediate_size": 64, "latent_channel": 4, "patch_latent_dim": 16,
            "num_attention_heads": 4, "num_hidden_layers": 3, "num_key_value_heads": 2, "vocab_size": 80,
            "rope_axes_dim": [4, 2, 2], "rope_theta": 500.0}
        model = Cosmos3OmniTransformer(**{**config, **self.config}).eval()
        for name, parameter in model.named_parameters():  # norms of 1 would hide a norm that is left out
            if "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        return model

    def conditions(self, seed=0, tokens=7):
        generator = torch.Generator().manual_seed(seed)
        return {"prompt_ids": torch.randint(80, (tokens,), generator=generator)}

    def prompt_tokens(self, conditions):
        return len(conditions["prompt_ids"])

    @contextlib.contextmanager
    def exact_rope(self, transformer):
        if not self.exact:
            yield
            return
        rope, config = transformer.rotary_emb, transformer.config
        powers = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim

        def forward(position_ids, device, dtype):
            angles = position_ids.double()[..., None] * config.rope_theta ** -powers
            angles = rope.apply_interleaved_mrope(angles, rope.rope_axes_dim)
            angles = torch.cat((angles, angles), -1)
            return angles.cos().to(dtype), angles.sin().to(dtype)

        with mock.patch.object(rope, "forward", forward):
            yield

    def stock_call(self, transformer, latents, clean_frames, timestep, conditions):
        pipe = SimpleNamespace(transformer=transformer, vae_scale_factor_temporal=4)
        text = Cosmos3OmniPipeline._prepare_text_segment(pipe, conditions["prompt_ids"].tolist(), "cpu")
        video = Cosmos3OmniPipeline._prepare_vision_segment(
            pipe, latents, has_image_condition=False, mrope_offset=text.pop("vision_start_temporal_offset"),
            vision_fps=self.format.fps, curr=text["und_len"], device="cpu",
            condition_frame_indexes=list(range(clean_frames)))
        positions = torch.cat([text.pop("text_mrope_ids"), video.pop("vision_mrope_ids")], 1)
        timesteps = torch.full((video.pop("num_noisy_vision_tokens"),), float(timestep))
        length = text["und_len"] + video.pop("num_vision_tokens")
        return transformer(**text, **video, position_ids=positions, sequence_length=length, vision_tokens=[latents],
                           vision_timesteps=timesteps, return_dict=False)[0][0]


class LTX(Family):
    name, module = "ltx", transformer_ltx
    channels, height, width, tokens_per_frame = 8, 2, 3, 6
    format = VideoFormat(fps=24.0, scale_factor_temporal=8, scale_factor_spatial=32)

    def __init__(self, counts_pixel_frames=False):
        self.options = {"counts_pixel_frames": counts_pixel_frames}

    def transformer(self):
        torch.manual_seed(0)
        return LTXVideoTransformer3DModel(  # 4 dimensions of 40 are not rotated, as 2 of 2048 in the real one
            in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=20, cross_attention_dim=40,
            num_layers=2, caption_channels=32).eval()

    def conditions(self, seed=0, tokens=5):
        mask = torch.arange(tokens)[None] < tokens - 2
        return {**super().conditions(seed, tokens), "prompt_attention_mask": mask}

    @contextlib.contextmanager
    def exact_rope(self, transformer):
        rope = transformer.rope
        count = rope.dim // 6

        def forward(hidden_states, num_frames=None, height=None, width=None, scale=None, video_coords=None):
            coordinates = video_coords.double() / torch.tensor(
                [rope.base_num_frames, rope.base_height, rope.base_width])[:, None]
            frequencies = rope.theta ** (torch.arange(count) / (count - 1.0)).double() * torch.pi / 2
            angles = (coordinates[..., None] * 2 - 1) * frequencies  # [1, 3, tokens, count]
            angles = angles.permute(0, 2, 3, 1).flatten(2).repeat_interleave(2, -1)
            pad = torch.zeros(*angles.shape[:2], rope.dim % 6)
            return torch.cat((pad + 1, angles.cos()), -1).float(), torch.cat((pad, angles.sin()), -1).float()

        with mock.patch.object(rope, "forward", forward):
            yield

    def video_coords(self, frames):
        grid = torch.meshgrid(torch.arange(frames).double(), torch.arange(self.height).double(),
                              torch.arange(self.width).double(), indexing="ij")
        time, row, column = (axis.flatten() for axis in grid)
        pixel = time * 8
        if self.options["counts_pixel_frames"]:
            pixel = (pixel - 7).clamp(min=0)
        return torch.stack((pixel / self.format.fps, row * 32, column * 32))[None]

    def stock_call(self, transformer, latents, clean_frames, timestep, conditions):
        tokens = latents.flatten(2).transpose(1, 2)
        rows = torch.full(tokens.shape[:2], float(timestep))
        rows[:, :clean_frames * self.tokens_per_frame] = 0
        out = transformer(
            hidden_states=tokens, encoder_hidden_states=conditions["prompt_embeds"], timestep=rows,
            encoder_attention_mask=conditions["prompt_attention_mask"], video_coords=self.video_coords(
                latents.shape[2]), return_dict=False)[0]
        return out.transpose(1, 2).reshape(latents.shape)


FAMILIES = [Wan(), SkyReels(), Cosmos3(), LTX()]
