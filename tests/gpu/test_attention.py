"""The GPU backends against the fp32 reference over whole rollouts: cut over sequences and not, captured, compiled."""

import functools

import pytest
import torch
from cache_rollout import Rollout
from small_models import small_transformer

from bc_diffusers import BlockCausalKVCache, RolloutSpec, block_causal_attention
from bc_diffusers.attention import BACKENDS, CallShape, choose_backend, cudnn, fa4
from bc_diffusers.attention.backends import Backend
from bc_diffusers.models import WanAdapter


DEVICE = torch.device("cuda", 0)
# A window that divides nothing; the chunk is one causal block, or four of which the last can be short.
SPEC = RolloutSpec(window_tokens=1501, max_staged_tokens=392, causal_blocks={392: 1, 98: 4}, max_pin_tokens=140)
# cudnn by number of runs (0: not cut, -1: by the model of waves), fa4 by tile and runs.
VARIANTS = {**{f"cudnn-{runs}": (cudnn, {"runs": runs}) for runs in (-1, 0, 1, 2, 5)},
            **{f"fa4-{tile}-{runs}": (fa4, {"tile": tile, "runs": runs})
               for tile, runs in ((0, 0), (128, 0), (192, 0), (128, 3), (192, 2))}}


@pytest.fixture
def variant(request, monkeypatch):
    """A backend with its cut fixed, under a name of its own."""
    module, options = VARIANTS[request.param]
    shape = CallShape(DEVICE, torch.bfloat16, 8, 8, 128, 128)
    if module.refuses(shape):
        pytest.skip(module.refuses(shape))
    backend = Backend(request.param, module.refuses, functools.partial(module.run, **options))
    monkeypatch.setitem(BACKENDS, request.param, backend)
    return request.param


every_variant = pytest.mark.parametrize("variant", VARIANTS, indirect=True)
one_of_each = pytest.mark.parametrize("variant", ["cudnn-2", "fa4-0-0"], indirect=True)


def roll(rollout, chunks=9):
    """Denoising and clean passes until the window has slid, short chunks between."""
    for i in range(chunks):
        n = 300 if i % 4 == 2 else 392
        rollout.forward(n, 392, padding=5 * (i % 2))
        rollout.step(n, 98, padding=7 * (i % 3))
    assert rollout.cache.window_start > 140


def make(variant, spec=SPEC, pin=140, page=128, heads=8, kv_heads=8, **options):
    options = {"head_dim": 128, "dtype": torch.bfloat16, "layers": 1} | options
    return Rollout(spec, pin, page=page, device=DEVICE, heads=heads, kv_heads=kv_heads, backend=variant, **options)


@every_variant
def test_rollouts(variant):
    roll(make(variant))


@one_of_each
@pytest.mark.parametrize("heads,kv_heads", [(12, 12), (32, 8), (24, 24), (40, 40), (40, 8)])
def test_heads(variant, heads, kv_heads):
    roll(make(variant, heads=heads, kv_heads=kv_heads, layers=2), chunks=6)


@one_of_each
@pytest.mark.parametrize("head_dim,dtype", [(64, torch.bfloat16), (64, torch.float16), (128, torch.float16)])
def test_head_dims_and_dtypes(variant, head_dim, dtype):
    roll(make(variant, head_dim=head_dim, dtype=dtype), chunks=6)


@pytest.mark.parametrize("page", [4, 16, 32, 64, 256])
@pytest.mark.parametrize("variant", ["cudnn-0", "cudnn-2"], indirect=True)
def test_page_sizes(variant, page):
    roll(make(variant, page=page), chunks=6)


@every_variant
def test_every_visible_position_is_seen_once(variant):
    """V is one-hot by position and q is 0: the output counts the keys."""
    spec = RolloutSpec(window_tokens=333, max_staged_tokens=96, causal_blocks={96: 1, 24: 4}, max_pin_tokens=30)
    rollout = make(variant, spec, pin=30, data="coded")
    for _ in range(9):
        rollout.forward(96, 96)
        rollout.step(96, 24)


@one_of_each
def test_slots_that_nobody_may_see_are_not_read(variant):
    rollout = make(variant)
    roll(rollout, chunks=6)
    assert rollout.poison() > 0
    for size in (392, 98):
        rollout.forward(392, size)


@one_of_each
def test_packed_projections(variant):
    rollout = make(variant, heads=12, kv_heads=12)
    plan = rollout.cache.plan(392, 98)
    packed = torch.randn(1, 392, 3, 12, 128, device=DEVICE).to(torch.bfloat16)
    q, k, v = packed.unbind(2)
    expected = block_causal_attention(q.contiguous(), k, v, plan, 0, variant)
    assert torch.equal(block_causal_attention(q, k, v, plan, 0, variant), expected)
    head_major = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(block_causal_attention(head_major, k, v, plan, 0, variant), expected)


@every_variant
def test_a_graph_replays_over_commits_and_a_reopen(variant):
    """Captured before anything is committed, replayed until the window has slid and again with another pin."""
    rollout = make(variant, pin=100, heads=16, kv_heads=8)
    q, k, v = (torch.randn(1, 392, h, 128, device=DEVICE).to(torch.bfloat16) for h in (16, 8, 8))
    outs, graphs = {}, {}
    for size in (392, 98):
        plan = rollout.cache.plan(392, size)
        block_causal_attention(q, k, v, plan, 0, variant)
        graphs[size] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[size]):
            outs[size] = block_causal_attention(q, k, v, plan, 0, variant)
    for pin in (100, 140, 0):
        for _ in range(7):
            for size in (392, 98):
                for t in (q, k, v):
                    t.normal_()
                rollout.cache.plan(392, size)
                graphs[size].replay()
                rollout.reference.write(0, rollout.cache.committed, k[0], v[0])
                expected = rollout.reference.attend(0, q, 392, size)
                assert (outs[size].float() - expected).abs().max() < 2e-2
            rollout.commit(392)
        rollout.reopen(pin_tokens={100: 140, 140: 0}.get(pin, 0))


def wan_transformer():
    return small_transformer(attention_head_dim=64, num_attention_heads=2, num_layers=2).to(DEVICE, torch.bfloat16)


def wan_cache(frames=3, tokens=24):
    spec = RolloutSpec(frames * tokens, frames * tokens, {frames * tokens: 1, tokens: frames})
    return BlockCausalKVCache(num_layers=2, num_kv_heads=2, head_dim=64, page_size=128, dtype=torch.bfloat16,
                              pool_tokens=BlockCausalKVCache.pool_tokens_for(spec, 128), device=DEVICE).open(spec)


@torch.no_grad()
@pytest.mark.parametrize("backend", ["cudnn", "fa4"])
def test_compiled_wan_blocks_are_one_graph(backend):
    if BACKENDS[backend].refuses(CallShape(DEVICE, torch.bfloat16, 2, 2, 64, 128)):
        pytest.skip(backend)
    latents = torch.randn(1, 16, 3, 8, 12, device=DEVICE)
    prompt, time = torch.randn(1, 7, 32, device=DEVICE).to(torch.bfloat16), torch.tensor([500.0], device=DEVICE)
    outs = []
    for compiled in (False, True):
        transformer, cache = wan_transformer(), wan_cache()
        adapter = WanAdapter(transformer)
        if compiled:
            torch._dynamo.reset()
            transformer.compile_repeated_blocks(fullgraph=True)
        rotary = adapter.make_rotary(3, 8, 12, DEVICE)
        for _ in range(3):
            for size in (72, 24):
                out = adapter.forward(latents, time, {"prompt_embeds": prompt}, plan=cache.plan(72, size),
                                      rotary=rotary, backend=backend)
            cache.commit()
        outs.append(out.float())
    torch.testing.assert_close(outs[1], outs[0], atol=3e-2, rtol=3e-2)


@torch.no_grad()
@pytest.mark.parametrize("size", [72, 24])
def test_the_fused_operator_does_what_the_modules_do(size, monkeypatch):
    latents = torch.randn(1, 16, 3, 8, 12, device=DEVICE)
    prompt, time = torch.randn(1, 7, 32, device=DEVICE).to(torch.bfloat16), torch.tensor([500.0], device=DEVICE)
    outs = []
    for fused in (True, False):
        monkeypatch.setattr("bc_diffusers.attention.processor.FUSED_ON", {"cuda"} if fused else set())
        adapter, cache = WanAdapter(wan_transformer()), wan_cache()
        rotary = adapter.make_rotary(3, 8, 12, DEVICE)
        out = adapter.forward(latents, time, {"prompt_embeds": prompt}, plan=cache.plan(72, size), rotary=rotary)
        outs.append((out.float(), cache._pool.float()))
    torch.testing.assert_close(outs[0][0], outs[1][0], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(outs[0][1], outs[1][1], atol=3e-2, rtol=2e-2)


def test_auto_is_the_fastest_that_serves():
    def best(**changes):
        shape = {"device": DEVICE, "dtype": torch.bfloat16, "heads": 8, "kv_heads": 8, "head_dim": 128,
                 "page_size": 128} | changes
        return choose_backend("auto", CallShape(**shape)).name

    assert best() == ("cudnn" if fa4.refuses(CallShape(DEVICE, torch.bfloat16, 8, 8, 128, 128)) else "fa4")
    assert best(page_size=64) == "cudnn" and best(head_dim=96) == "cudnn"
    assert best(dtype=torch.float32) == best(page_size=2) == best(head_dim=20) == "reference"
    for name, changes, reason in (("cudnn", {"dtype": torch.float8_e4m3fn}, "no kernel for torch.float8_e4m3fn"),
                                  ("cudnn", {"page_size": 2}, "page_size 2 must be at least 4"),
                                  ("cudnn", {"head_dim": 20}, "head_dim 20 must be a multiple of 8"),
                                  ("fa4", {"page_size": 64}, "page_size 64 is not 128"),
                                  ("fa4", {"head_dim": 96}, "head_dim 96 is neither 64 nor 128")):
        shape = CallShape(**({"device": DEVICE, "dtype": torch.bfloat16, "heads": 8, "kv_heads": 8, "head_dim": 128,
                              "page_size": 128} | changes))
        with pytest.raises(ValueError, match=reason):
            choose_backend(name, shape)


@one_of_each
def test_a_new_geometry_is_refused_during_capture(variant):
    rollout = make(variant, heads=8)
    q, k = (torch.randn(1, 391, 8, 128, device=DEVICE).to(torch.bfloat16) for _ in range(2))
    plan = rollout.cache.plan(391, 392)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="during CUDA graph capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        block_causal_attention(q, k, k, plan, 0, variant)
    torch.cuda.synchronize()
    assert block_causal_attention(q, k, k, plan, 0, variant).isfinite().all()
