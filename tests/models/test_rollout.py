"""Every family: a chunked rollout through the cache is the model's own forward over the whole video under a mask."""

import pytest
import torch
from model_rollout import CHUNK_FRAMES, Rollout, assert_close
from tiny_models import FAMILIES, LTX, Cosmos3, SkyReels, block_mask
from torch._dynamo.testing import CompileCounter

from bc_diffusers import ops
from bc_diffusers.attention import processor
from bc_diffusers.models import adapter_class_for


@pytest.mark.parametrize("clean_frames", [1, CHUNK_FRAMES], ids=["frame-causal", "chunk-full"])
@pytest.mark.parametrize("window_frames, sink_frames", [(5, 0), (3, 2), (40, 0)])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_rollout_is_the_models_own_forward_under_a_mask(family, window_frames, sink_frames, clean_frames):
    rollout = Rollout(family, clean_frames, window_frames, sink_frames)
    for frames in (CHUNK_FRAMES, CHUNK_FRAMES, CHUNK_FRAMES, 3):
        assert_close(rollout.chunk(frames))


@pytest.mark.parametrize("clean_frames", [1, CHUNK_FRAMES], ids=["frame-causal", "chunk-full"])
@pytest.mark.parametrize("family", [*FAMILIES, Cosmos3(hidden_act="relu2")], ids=lambda f: f.name)
def test_the_fused_operators_are_the_models_own_forward_too(family, clean_frames, monkeypatch):
    """Those that a GPU runs, here in their CPU implementations."""
    monkeypatch.setattr(processor, "FUSED_ON", {"cpu"})
    used = []
    for name in ("qk_norm_rope_", "residual_norm_"):
        monkeypatch.setattr(ops, name, lambda *a, op=getattr(ops, name), **k: (used.append(op), op(*a, **k)))
    rollout = Rollout(family, clean_frames, window_frames=3, sink_frames=1)
    for frames in (CHUNK_FRAMES, CHUNK_FRAMES, 3):
        assert_close(rollout.chunk(frames))
    assert bool(used) == (family.name != "ltx")


@pytest.mark.parametrize("tokens", [1, 8, 13, 20])
@pytest.mark.parametrize("page_size", [1, 16])
def test_prompts_in_the_cache_may_have_any_length(tokens, page_size):
    family = Cosmos3()
    rollout = Rollout(family, 1, window_frames=2, page_size=page_size, prompt=family.conditions(tokens=tokens))
    assert rollout.cache.committed == tokens
    for _ in range(3):
        assert_close(rollout.chunk())


VARIANTS = {
    "own norm of the prompt's keys": Cosmos3(qk_norm_for_text=False, use_und_k_norm_for_gen=True),
    "nemotron": Cosmos3(hidden_act="relu2"),
    "spatial positions count on": Cosmos3(unified_3d_mrope_reset_spatial_ids=False),
    "no fps modulation": Cosmos3(enable_fps_modulation=False),
    "other frame rate": Cosmos3(base_fps=12),  # half a position a frame: exact in the stock positions' float32
    "the model's own rotary angles": Cosmos3(exact=False, unified_3d_mrope_temporal_modality_margin=20),
    "ltx counting pixel frames": LTX(counts_pixel_frames=True),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name):
    rollout = Rollout(VARIANTS[name], 1, window_frames=5)
    for _ in range(3):
        assert_close(rollout.chunk())


@pytest.mark.parametrize("frames", [CHUNK_FRAMES, 1])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_clean_first_frame(family, frames):
    """A chunk that begins with a given picture: its first frame, which may be the only one, carries no noise."""
    rollout = Rollout(family, CHUNK_FRAMES, window_frames=5)
    latents = family.latents(frames, seed=3)
    tokens = frames * family.tokens_per_frame
    plan = rollout.cache.plan(tokens, CHUNK_FRAMES * family.tokens_per_frame)
    with torch.no_grad():
        cached = rollout.adapter.forward(latents, torch.tensor([600.0]), rollout.conditions, plan=plan,
                                         rotary=rollout.rotary, clean_frames=1)
    prompt = family.prompt_tokens(rollout.conditions)
    blocks = [(0, prompt)] * bool(prompt) + [(prompt, prompt + tokens)]
    expected = family.reference(rollout.stock, latents, 1, 600.0, rollout.conditions, block_mask(blocks, prompt, 99))
    torch.testing.assert_close(cached, expected, rtol=0, atol=1e-5)
    assert expected[:, :, -1].abs().max() > 0.05 or family.name == "cosmos3" and frames == 1  # says nothing of it


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_the_transformer_stays_stock(family):
    untouched = family.transformer()
    rollout = Rollout(family, 1, window_frames=3)
    rollout.chunk()
    args = family.latents(5, seed=9), 2, 500.0, family.conditions(seed=4)
    with_adapter = family.stock_call(rollout.adapter.transformer, *args)
    assert torch.equal(with_adapter, family.stock_call(untouched, *args))


@torch.no_grad()
def test_the_comparison_sees_what_the_mask_says():
    family = Cosmos3()
    rollout = Rollout(family, 1, window_frames=2)
    for _ in range(2):
        rollout.chunk()
    cached, expected = rollout.chunk()
    rollout.window += 1
    rollout.clean, rollout.chunks = rollout.clean[:, :, :2 * CHUNK_FRAMES], rollout.chunks[:2]
    other = rollout.expected(family.latents(CHUNK_FRAMES, seed=4), 700.0)
    assert (other - expected).abs().max() > 1e-3


def test_skyreels_own_causal_mask_gives_the_same_chunk_after_chunk():
    """Its block mask (autoregressive mode) over the whole video, all frames clean, against the clean passes."""
    family = SkyReels()
    stock = family.transformer(num_frame_per_block=CHUNK_FRAMES)
    rollout = Rollout(family, CHUNK_FRAMES, window_frames=40)
    rollout.adapter.transformer.register_to_config(num_frame_per_block=CHUNK_FRAMES)  # as its pipeline leaves it
    video = family.latents(3 * CHUNK_FRAMES, seed=1)
    outs = []
    for frames in video.split(CHUNK_FRAMES, 2):
        rollout.rotary.set_start(CHUNK_FRAMES * len(outs))
        plan = rollout.cache.plan(*[CHUNK_FRAMES * family.tokens_per_frame] * 2)
        with torch.no_grad():
            outs.append(rollout.adapter.forward(frames, torch.tensor([300.0]), rollout.conditions, plan=plan,
                                                rotary=rollout.rotary))
        rollout.cache.commit()
    with torch.no_grad():
        expected = stock(hidden_states=video, timestep=torch.tensor([300.0]), fps=[1],
                         encoder_hidden_states=rollout.conditions["prompt_embeds"], return_dict=False)[0]
    torch.testing.assert_close(torch.cat(outs, 2), expected, rtol=0, atol=1e-5)
    assert rollout.adapter.transformer.config.num_frame_per_block == CHUNK_FRAMES


def test_ltx_tables_are_the_models_but_for_its_rounding():
    """As LTXPipeline places the tokens. Angles reach 15,000, where float32 knows them to 5e-4."""
    family = LTX()
    rollout = Rollout(family, 1, window_frames=2)
    cos, sin = rollout.stock.rope(torch.zeros(1), 6, family.height, family.width, (8 / 24, 32, 32))
    rollout.rotary.set_start(2)
    skip = 2 * family.tokens_per_frame
    for ours, theirs in ((rollout.rotary.cos, cos), (rollout.rotary.sin, sin)):
        torch.testing.assert_close(ours, theirs[0, skip:, ::2], rtol=0, atol=2e-3)


@pytest.mark.parametrize("fused", [False, True], ids=["modules", "fused"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_compiled_blocks_are_one_graph_a_plan(family, fused, monkeypatch):
    """All layers share it, a prompt's length and the place in the video do not matter."""
    monkeypatch.setattr(processor, "FUSED_ON", {"cpu"} if fused else set())
    torch._dynamo.reset()
    eager, rollout = Rollout(family, 1, window_frames=3), Rollout(family, 1, window_frames=3)
    counter = CompileCounter()
    rollout.adapter.transformer.compile_repeated_blocks(fullgraph=True, backend=counter)
    for seed in (3, 4, 5):
        tokens = 5 + seed if family.name == "cosmos3" else 5  # cross-attention is compiled for one text length
        for one in (eager, rollout):
            before, one.conditions = one.conditions, family.conditions(seed, tokens)
            with torch.no_grad():
                one.adapter.change_prompt(one.cache, before, one.conditions)
        assert torch.equal(rollout.chunk()[0], eager.chunk()[0])
    # The denoising plan's and the clean one's. SkyReels-V2's patch embedding gives its first block a transposed view,
    # a fused block gives the next one a contiguous tensor.
    assert counter.frame_count == (4 if fused and family.name == "skyreels" else 2)
    torch._dynamo.reset()


def test_unknown_transformers_are_named():
    with pytest.raises(ValueError, match="FluxTransformer2DModel: supported transformers are .*Cosmos3Omni"):
        adapter_class_for("FluxTransformer2DModel")
