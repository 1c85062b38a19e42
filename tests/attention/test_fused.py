"""The processor with norm, rotary embedding and slot write in one operator: what the model's own modules do."""

import pytest
import torch
from small_models import small_transformer

from bc_diffusers import BlockCausalKVCache, RolloutSpec
from bc_diffusers.attention import processor
from bc_diffusers.models import WanAdapter


HEIGHT, WIDTH, FRAME = 6, 10, 15
PROMPT = torch.randn(1, 7, 32, generator=torch.Generator().manual_seed(5))


def open_cache(block):
    spec = RolloutSpec(4 * FRAME, 3 * FRAME, {3 * FRAME: 1, block * FRAME: 3 // block}, FRAME)
    return BlockCausalKVCache(num_layers=2, num_kv_heads=2, head_dim=12, page_size=16, dtype=torch.float32,
                              pool_tokens=BlockCausalKVCache.pool_tokens_for(spec, 16), device="cpu").open(spec, FRAME)


def roll(fused, block, monkeypatch, **model):
    monkeypatch.setattr(processor, "FUSED_ON", {"cpu"} if fused else set())
    transformer = small_transformer(**model)
    adapter, cache, outs = WanAdapter(transformer), open_cache(block), []
    rotary = adapter.make_rotary(3, HEIGHT, WIDTH, torch.device("cpu"))
    latents = torch.randn(1, 16, 9, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(1))
    for i, frames in enumerate((3, 3, 2)):
        rotary.set_start(3 * i)
        for size in (3 * FRAME, block * FRAME):
            outs.append(adapter.forward(latents[:, :, 3 * i:3 * i + frames], torch.tensor([300.0]),
                                        {"prompt_embeds": PROMPT}, plan=cache.plan(frames * FRAME, size),
                                        rotary=rotary))
        cache.commit()
    return outs


@torch.no_grad()
@pytest.mark.parametrize("block", [3, 1])
def test_fused_equals_the_modules(block, monkeypatch):
    for a, b in zip(*(roll(fused, block, monkeypatch) for fused in (True, False)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_other_norms_stay_with_the_model():
    attn = small_transformer().blocks[0].attn1
    assert processor.has_plain_norms(attn)
    attn.norm_k.register_forward_hook(lambda *_: None)
    assert not processor.has_plain_norms(attn)
    attn = small_transformer().blocks[0].attn1
    attn.norm_q = torch.nn.LayerNorm(24)
    assert not processor.has_plain_norms(attn)
