"""A rollout of a tiny model through the cache, and the same video through the stock model."""

import copy

import torch
from tiny_models import block_mask, cut

from bc_diffusers import BlockCausalKVCache, RolloutSpec
from bc_diffusers.models import adapter_class_for


CHUNK_FRAMES = 4


def make_adapter(family, transformer=None):
    transformer = family.transformer() if transformer is None else transformer
    return adapter_class_for(type(transformer).__name__)(transformer, family.format, family.options)


class Rollout:
    """A rollout through the cache, and the same video through the stock model, chunk by chunk."""

    def __init__(self, family, clean_frames, window_frames, sink_frames=0, page_size=8, prompt=None, max_prompt=20):
        self.family, self.adapter = family, make_adapter(family)
        self.stock = copy.deepcopy(family.transformer())
        tokens = family.tokens_per_frame
        self.window, self.sink, self.block = window_frames * tokens, sink_frames * tokens, clean_frames * tokens
        chunk = CHUNK_FRAMES * tokens
        spec = RolloutSpec(self.window, chunk, {chunk: 1, self.block: -(-CHUNK_FRAMES // clean_frames)},
                           max_pin_tokens=max_prompt + self.sink)
        layers = self.adapter.layer_geometry(self.stock.config)
        self.cache = BlockCausalKVCache(
            num_layers=layers.num_layers, num_kv_heads=layers.num_kv_heads, head_dim=layers.head_dim,
            pool_tokens=BlockCausalKVCache.pool_tokens_for(spec, page_size), page_size=page_size, dtype=torch.float32,
            device="cpu")
        self.conditions = family.conditions() if prompt is None else prompt
        self.rotary = self.adapter.make_rotary(CHUNK_FRAMES, family.height, family.width, torch.device("cpu"))
        self.cache.open(spec, self.adapter.prompt_tokens(self.conditions) + self.sink)
        self.clean, self.chunks, self.prompts = None, [], []
        with torch.no_grad():
            self.adapter.begin(self.cache, self.conditions)

    @property
    def frames(self):
        return 0 if self.clean is None else self.clean.shape[2]

    @torch.no_grad()
    def chunk(self, frames=CHUNK_FRAMES, timestep=700.0):
        """Denoises one chunk once, then makes it history. Returns (cached, stock) velocities of the noisy chunk."""
        family, index = self.family, len(self.chunks)
        tokens = frames * family.tokens_per_frame
        noisy, clean = family.latents(frames, seed=2 * index), family.latents(frames, seed=2 * index + 1)
        self.rotary.set_start(self.frames)
        plan = self.cache.plan(tokens, CHUNK_FRAMES * family.tokens_per_frame)
        cached = self.adapter.forward(noisy, torch.tensor([timestep]), self.conditions, plan=plan, rotary=self.rotary)
        expected = self.expected(noisy, timestep)

        plan = self.cache.plan(tokens, self.block)
        self.adapter.forward(clean, torch.tensor([0.0]), self.conditions, plan=plan, rotary=self.rotary,
                             clean_frames=frames)
        self.cache.commit()
        self.clean = clean if self.clean is None else torch.cat((self.clean, clean), 2)
        self.chunks.append(frames)
        return cached, expected

    def expected(self, noisy, timestep):
        family, prompt = self.family, self.family.prompt_tokens(self.conditions)
        video = noisy if self.clean is None else torch.cat((self.clean, noisy), 2)
        blocks = [(0, prompt)] if prompt else []
        start = prompt
        for frames in self.chunks:
            end = start + frames * family.tokens_per_frame
            blocks += cut(start, end, self.block)
            start = end
        blocks.append((start, start + noisy.shape[2] * family.tokens_per_frame))
        mask = block_mask(blocks, prompt + self.sink, self.window)
        out = family.reference(self.stock, video, self.frames, timestep, self.conditions, mask)
        return out[:, :, self.frames:]


def assert_close(pair):
    cached, expected = pair
    assert expected.abs().max() > 0.05
    torch.testing.assert_close(cached, expected, rtol=0, atol=1e-5)
