"""Norm, rotary embedding and slot write in one operator, residual sum and norm in another: as the model's modules."""

import pytest
import torch
from accelerate import cpu_offload
from diffusers import SkyReelsV2Transformer3DModel
from diffusers.hooks import apply_group_offloading
from small_models import small_transformer

from bc_diffusers import BlockCausalKVCache, RolloutSpec
from bc_diffusers.attention import processor
from bc_diffusers.models import WanAdapter, wan_blocks
from bc_diffusers.models.skyreels_adapter import SkyReelsAdapter


HEIGHT, WIDTH, FRAME = 6, 10, 15
PROMPT = torch.randn(1, 7, 32, generator=torch.Generator().manual_seed(5))


def open_cache(block):
    spec = RolloutSpec(4 * FRAME, 3 * FRAME, {3 * FRAME: 1, block * FRAME: 3 // block}, FRAME)
    return BlockCausalKVCache(num_layers=2, num_kv_heads=2, head_dim=12, page_size=16, dtype=torch.float32,
                              pool_tokens=BlockCausalKVCache.pool_tokens_for(spec, 16), device="cpu").open(spec, FRAME)


def roll(fused, block, monkeypatch, transformer, adapter=WanAdapter, clean_frames=0):
    monkeypatch.setattr(processor, "FUSED_ON", {"cpu"} if fused else set())
    adapter, cache, outs = adapter(transformer), open_cache(block), []
    rotary = adapter.make_rotary(3, HEIGHT, WIDTH, torch.device("cpu"))
    latents = torch.randn(1, 16, 9, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(1))
    for i, frames in enumerate((3, 3, 2)):
        rotary.set_start(3 * i)
        for size in (3 * FRAME, block * FRAME):
            outs.append(adapter.forward(latents[:, :, 3 * i:3 * i + frames], torch.tensor([300.0]),
                                        {"prompt_embeds": PROMPT}, plan=cache.plan(frames * FRAME, size),
                                        rotary=rotary, clean_frames=clean_frames))
        cache.commit()
    return outs


def small_skyreels():
    torch.manual_seed(0)
    return SkyReelsV2Transformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=16, out_channels=16,
        text_dim=32, freq_dim=16, ffn_dim=40, num_layers=2, cross_attn_norm=True, rope_max_seq_len=64).eval()


@torch.no_grad()
@pytest.mark.parametrize("block", [3, 1])
@pytest.mark.parametrize("clean_frames", [0, 1, 2])  # between: a time for each token
@pytest.mark.parametrize("make, adapter", [
    (lambda: small_transformer(cross_attn_norm=True), WanAdapter),
    (lambda: small_transformer(cross_attn_norm=False), WanAdapter),
    (small_skyreels, SkyReelsAdapter),
], ids=["wan", "wan without a norm for the text", "skyreels"])
def test_fused_equals_the_modules(make, adapter, block, clean_frames, monkeypatch):
    calls, op = [], wan_blocks.ops.residual_norm_
    monkeypatch.setattr(wan_blocks.ops, "residual_norm_", lambda *a, **k: (calls.append(1), op(*a, **k)))
    outs = []
    for fused in (True, False):
        transformer = make()
        for parameter in transformer.parameters():  # norms and modulations that do something
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
        outs.append(roll(fused, block, monkeypatch, transformer, adapter, clean_frames))
        assert len(calls) == 4 * 2 * 6  # operators, layers, forwards: none of them in the second rollout
    for a, b in zip(*outs, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=0)


@torch.no_grad()
def test_a_block_that_others_have_changed_runs_as_it_is(monkeypatch):
    monkeypatch.setattr(processor, "FUSED_ON", {"cpu"})
    monkeypatch.setattr(wan_blocks.ops, "residual_norm_", None)  # nobody may call it

    def hooked(transformer):
        transformer.blocks[0].norm1.register_forward_hook(lambda *_: None)
        transformer.blocks[1].norm3.forward = transformer.blocks[1].norm3.forward

    def other_norms(transformer):
        for block in transformer.blocks:
            block.norm2 = torch.nn.LayerNorm(24)

    for change in (hooked, other_norms):
        transformer = small_transformer(cross_attn_norm=True)
        change(transformer)
        assert all(torch.isfinite(out).all() for out in roll(True, 3, monkeypatch, transformer))


@torch.no_grad()
@pytest.mark.parametrize("offload", [
    lambda model: cpu_offload(model, execution_device=torch.device("cpu")),
    lambda model: apply_group_offloading(model, torch.device("cpu"), offload_type="leaf_level"),
    lambda model: apply_group_offloading(model, torch.device("cpu"), offload_type="block_level",
                                         num_blocks_per_group=1),
], ids=["sequential", "leaf", "block"])
def test_offloaded_weights_are_there_when_they_are_read(offload, monkeypatch):
    """Sequential offload keeps them on the meta device in between, so that one read too early ends the forward."""
    expected, offloaded = roll(False, 1, monkeypatch, small_transformer()), small_transformer()
    offload(offloaded)
    for got, want in zip(roll(True, 1, monkeypatch, offloaded), expected, strict=True):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=0)


@torch.no_grad()
def test_without_a_plan_a_fused_block_is_the_stock_one(monkeypatch):
    monkeypatch.setattr(processor, "FUSED_ON", {"cpu"})
    transformer = small_transformer(cross_attn_norm=True)
    given = {"hidden_states": torch.randn(1, 16, 3, HEIGHT, WIDTH), "timestep": torch.tensor([300.0]),
             "encoder_hidden_states": PROMPT}
    before = transformer(**given).sample
    WanAdapter(transformer)
    assert {type(block) for block in transformer.blocks} == {wan_blocks.WanTransformerBlock}
    assert torch.equal(transformer(**given).sample, before)
    assert type(transformer.blocks[0]).__name__ in transformer._repeated_blocks


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_feed_forward_with_its_activation_in_the_product(dtype):
    ffn = small_transformer().blocks[0].ffn.to(dtype)
    x = torch.randn(1, 9, 24, dtype=dtype)
    torch.testing.assert_close(wan_blocks._feed_forward(ffn, x), ffn(x), atol=2e-2, rtol=1e-2)
    ffn.net[0].proj.register_forward_hook(lambda *_: torch.zeros(1, 9, 32, dtype=dtype))
    assert torch.equal(wan_blocks._feed_forward(ffn, x), ffn.net[2].bias.expand(1, 9, -1))


def test_other_norms_stay_with_the_model():
    """Those that are hooked (offloading brings the weights in a hook), elsewhere, or no plain RMSNorm."""
    def plain(change=lambda attn: None):
        attn = small_transformer().blocks[0].attn1
        change(attn)
        return processor.has_plain_norms(attn.norm_q, attn.norm_k, torch.device("cpu"))

    assert plain()
    assert not plain(lambda attn: attn.norm_k.register_forward_hook(lambda *_: None))
    assert not plain(lambda attn: setattr(attn, "norm_q", torch.nn.LayerNorm(24)))
    assert not plain(lambda attn: attn.norm_q.to("meta"))
    assert not plain(lambda attn: setattr(attn.norm_q, "eps", 1e-3))
    assert not plain(lambda attn: cpu_offload(attn, execution_device=torch.device("cpu")))
    assert not plain(lambda attn: apply_group_offloading(attn, torch.device("cpu"), offload_type="leaf_level"))
