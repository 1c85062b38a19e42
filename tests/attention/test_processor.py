"""The processor inside a stock transformer: a chunked rollout is one forward under an explicit mask."""

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from small_models import FRAME, HEIGHT, PROMPT, WIDTH, open_cache, small_transformer

from bc_diffusers import BlockCausalAttnProcessor, RolloutSpec
from bc_diffusers.models import WanAdapter


class MaskedProcessor(WanAttnProcessor):
    """The stock processor under a mask that it is given here, since the block passes none."""

    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        return super().__call__(attn, hidden_states, encoder_hidden_states, self.mask, rotary_emb)


def masked_forward(latents, timesteps, mask, **model):
    """One stock forward over all frames. timesteps [frames], mask bool [tokens, tokens]."""
    transformer = small_transformer(**model)
    for block in transformer.blocks:
        block.attn1.set_processor(MaskedProcessor(mask))
    per_token = timesteps.repeat_interleave(FRAME)[None]
    return transformer(latents, per_token, PROMPT, return_dict=False)[0]


def visible(frames_in_block, window_frames, sink_frames, total_frames):
    """bool [tokens, tokens]: what each token may see when every causal block has `frames_in_block` frames."""
    frame = torch.arange(total_frames).repeat_interleave(FRAME)
    start = frame // frames_in_block * frames_in_block
    end = start + frames_in_block
    x = frame[None]
    return (x < end[:, None]) & ((x >= start[:, None] - window_frames) | (x < sink_frames))


@torch.no_grad()
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("chunk,block,window,sink", [(3, 3, 18, 0), (3, 3, 4, 0), (3, 1, 5, 1), (2, 1, 3, 2),
                                                     (4, 2, 0, 0), (1, 1, 2, 1)])
def test_chunked_rollout_is_one_forward_under_a_mask(chunk, block, window, sink, fused):
    total = 4 * chunk
    latents = torch.randn(1, 16, total, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(chunk))
    transformer = small_transformer()
    if fused:
        transformer.fuse_qkv_projections()
    adapter = WanAdapter(transformer)
    cache = open_cache(chunk, block, window, sink)
    rotary = adapter.make_rotary(chunk, HEIGHT, WIDTH, torch.device("cpu"))
    clean_mask = visible(block, window, sink, total)
    clean = masked_forward(latents, torch.zeros(total), clean_mask)
    for i in range(total // chunk):
        frames = slice(i * chunk, (i + 1) * chunk)
        rotary.set_start(i * chunk)
        given = {"conditions": {"prompt_embeds": PROMPT}, "rotary": rotary}
        plan = cache.plan(chunk * FRAME, chunk * FRAME)
        noisy = adapter.forward(latents[:, :, frames], torch.tensor([700.0]), plan=plan, **given)
        # A denoising pass: the chunk at its noise level, one causal block, over the clean history.
        seen = slice(0, frames.stop)
        mask = clean_mask[:frames.stop * FRAME, :frames.stop * FRAME].clone()
        mask[frames.start * FRAME:] = visible(chunk, window, sink, frames.stop)[frames.start * FRAME:]
        times = torch.zeros(frames.stop)
        times[frames] = 700.0
        expected = masked_forward(latents[:, :, seen], times, mask)[:, :, frames]
        torch.testing.assert_close(noisy, expected, atol=1e-5, rtol=0)
        out = adapter.forward(latents[:, :, frames], torch.zeros(1), plan=cache.plan(chunk * FRAME, block * FRAME),
                              **given)
        torch.testing.assert_close(out, clean[:, :, frames], atol=1e-5, rtol=0)
        cache.commit()


@torch.no_grad()
def test_rotary_tables_are_the_models_own_and_go_on_past_its_1024_frames():
    transformer = small_transformer()
    adapter = WanAdapter(transformer)
    cos, sin = transformer.rope(torch.empty(1, 16, 9, HEIGHT, WIDTH))
    rotary = adapter.make_rotary(3, HEIGHT, WIDTH, torch.device("cpu"))
    address = rotary.cos.data_ptr()
    for start in (0, 3, 6):
        rotary.set_start(start)
        rows = slice(start * FRAME, (start + 3) * FRAME)
        assert torch.equal(rotary.cos, cos[0, rows, 0, 0::2]) and torch.equal(rotary.sin, sin[0, rows, 0, 1::2])
    rotary.set_start(3000)
    assert rotary.cos.data_ptr() == address
    wide = small_transformer(rope_max_seq_len=3003).rope
    far_cos = wide.freqs_cos[3000:3003, 0:wide.t_dim:2]
    torch.testing.assert_close(rotary.cos.view(3, FRAME, -1)[:, 0, :wide.t_dim // 2], far_cos, atol=0, rtol=0)


def test_installing_twice_keeps_one_processor_a_layer_and_what_diffusers_set():
    transformer = small_transformer()
    transformer.set_attention_backend("native")
    first, second = WanAdapter(transformer), WanAdapter(transformer)
    assert first.holder is second.holder
    for block in transformer.blocks:
        assert isinstance(block.attn1.processor, BlockCausalAttnProcessor)
        assert type(block.attn2.processor) is WanAttnProcessor
        assert isinstance(block.attn1.processor.fallback, WanAttnProcessor)
        assert block.attn1.processor._attention_backend == "native"


@torch.no_grad()
def test_without_a_plan_the_transformer_is_stock_bit_for_bit():
    latents, time = torch.randn(1, 16, 3, HEIGHT, WIDTH), torch.tensor([500.0])
    expected = small_transformer()(latents, time, PROMPT, return_dict=False)[0]
    transformer = small_transformer()
    adapter = WanAdapter(transformer)
    assert torch.equal(transformer(latents, time, PROMPT, return_dict=False)[0], expected)
    cache = open_cache(3, 3, 3, 0)
    rotary = adapter.make_rotary(3, HEIGHT, WIDTH, torch.device("cpu"))
    adapter.forward(latents, time, {"prompt_embeds": PROMPT}, plan=cache.plan(3 * FRAME, 3 * FRAME), rotary=rotary)
    assert torch.equal(transformer(latents, time, PROMPT, return_dict=False)[0], expected)


@torch.no_grad()
def test_a_cached_forward_refuses_what_it_cannot_do():
    transformer = small_transformer()
    adapter = WanAdapter(transformer)
    cache = open_cache(3, 3, 3, 0, layers=3)
    rotary = adapter.make_rotary(3, HEIGHT, WIDTH, torch.device("cpu"))
    latents, given = torch.randn(1, 16, 3, HEIGHT, WIDTH), {"conditions": {"prompt_embeds": PROMPT}, "rotary": rotary}
    with pytest.raises(ValueError, match="3 layers, the transformer 2"):
        adapter.forward(latents, torch.zeros(1), plan=cache.plan(3 * FRAME, 3 * FRAME), **given)
    cache = open_cache(3, 3, 3, 0)
    plan = cache.plan(3 * FRAME, 3 * FRAME)
    with pytest.raises(ValueError, match="unknown attention backend 'magic'"):
        adapter.forward(latents, torch.zeros(1), plan=plan, backend="magic", **given)
    assert adapter.holder.active is None  # a failed forward leaves the transformer stock
    cache.close()
    with pytest.raises(RuntimeError, match="no longer open"):
        adapter.forward(latents, torch.zeros(1), plan=plan, **given)
    with torch.enable_grad(), pytest.raises(ValueError, match="requires grad"):
        adapter.forward(latents, torch.zeros(1), plan=cache.open(cache_spec()).plan(3 * FRAME, 3 * FRAME), **given)


def cache_spec():
    return RolloutSpec(3 * FRAME, 3 * FRAME, {3 * FRAME: 1})
