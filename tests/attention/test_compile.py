"""torch.compile: one graph a plan, whatever the layer, the chunk or how far the rollout is."""

import pytest
import torch
import torch._dynamo.testing
from small_models import FRAME, HEIGHT, PROMPT, WIDTH, open_cache, small_transformer

from bc_diffusers.attention import processor
from bc_diffusers.models import WanAdapter


@torch.no_grad()
@pytest.mark.parametrize("fused", [False, True])
def test_blocks_compile_to_one_full_graph_a_plan_over_layers_commits_and_reopen(fused, monkeypatch):
    monkeypatch.setattr(processor, "FUSED_ON", {"cpu"} if fused else set())
    layers = 10  # more than dynamo's limit of 8 recompilations
    torch._dynamo.reset()
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled, eager = (WanAdapter(small_transformer(num_layers=layers)) for _ in range(2))
    for block in compiled.transformer.blocks:
        block.compile(backend=graphs, fullgraph=True)
    caches = [open_cache(3, 1, 4, 1, layers=layers) for _ in range(2)]
    rotary = compiled.make_rotary(3, HEIGHT, WIDTH, torch.device("cpu"))
    for reopened in range(2):
        for chunk in range(4):
            rotary.set_start(3 * chunk)
            latents = torch.randn(1, 16, 3, HEIGHT, WIDTH)
            for time, size in ((700.0, 3 * FRAME), (0.0, FRAME)):
                got, expected = (
                    adapter.forward(latents, torch.tensor([time]), {"prompt_embeds": PROMPT}, rotary=rotary,
                                    plan=cache.plan(3 * FRAME, size))
                    for adapter, cache in zip((compiled, eager), caches))
                torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)
            for cache in caches:
                cache.commit()
        for cache in caches:
            spec = cache.spec
            cache.close()
            cache.open(spec, FRAME * (1 - reopened))
    assert graphs.frame_count == 2  # a denoising pass and a clean pass
