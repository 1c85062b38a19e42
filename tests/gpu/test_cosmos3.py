"""Cosmos3 on a CUDA device: grouped heads of 128, the prompt pinned, one captured graph over prompt changes."""

import pytest
import torch
from tiny_models import Cosmos3

from bc_diffusers import BlockCausalKVCache
from bc_diffusers.attention import CallShape, choose_backend
from bc_diffusers.models import adapter_class_for
from bc_diffusers.pipelines import RolloutConfig
from bc_diffusers.pipelines.resources import PAGE_SIZE, rollout_spec


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FRAMES, HEIGHT, WIDTH = 4, 16, 20
FAMILY = Cosmos3(head_dim=128, hidden_size=256, intermediate_size=256, rope_axes_dim=[24, 20, 20])


class Rollout:
    def __init__(self, model, backend):
        self.adapter = adapter_class_for("Cosmos3OmniTransformer")(model, FAMILY.format)
        layers = self.adapter.layer_geometry(model.config)
        self.backend, self.chunks = backend, 0
        per_frame = self.adapter.tokens_per_frame(model.config, HEIGHT, WIDTH)
        self.tokens, self.block = FRAMES * per_frame, per_frame
        config = RolloutConfig(chunk_frames=FRAMES, window_frames=7, clean_block_frames=1)
        spec = rollout_spec(config, per_frame, max_prompt_tokens=200)
        self.cache = BlockCausalKVCache(
            num_layers=layers.num_layers, num_kv_heads=layers.num_kv_heads, head_dim=layers.head_dim,
            pool_tokens=BlockCausalKVCache.pool_tokens_for(spec, PAGE_SIZE), page_size=PAGE_SIZE, dtype=torch.bfloat16,
            device=DEVICE)
        self.rotary = self.adapter.make_rotary(FRAMES, HEIGHT, WIDTH, DEVICE)
        self.prompt = self.conditions(101)
        self.cache.open(spec, 101)
        self.adapter.begin(self.cache, self.prompt)
        self.timestep = torch.full((1,), 700.0, device=DEVICE)
        self.latents = torch.zeros(1, 4, FRAMES, HEIGHT, WIDTH, device=DEVICE)

    @staticmethod
    def conditions(tokens):
        return {"prompt_ids": FAMILY.conditions(seed=tokens, tokens=tokens)["prompt_ids"].to(DEVICE)}

    def change_prompt(self, tokens):
        before, self.prompt = self.prompt, self.conditions(tokens)
        self.adapter.change_prompt(self.cache, before, self.prompt)

    def start_chunk(self):
        """Moves everything a forward reads to the next chunk, in place."""
        generator = torch.Generator().manual_seed(self.chunks)
        self.latents.copy_(torch.randn(self.latents.shape, generator=generator))
        self.rotary.set_start(self.chunks * FRAMES)
        self.plan = self.cache.plan(self.tokens, self.tokens)

    def denoise(self):
        return self.adapter.forward(self.latents, self.timestep, self.prompt, plan=self.plan, rotary=self.rotary,
                                    backend=self.backend)

    def finish_chunk(self):
        self.adapter.forward(self.latents, self.timestep, self.prompt, plan=self.cache.plan(self.tokens, self.block),
                             rotary=self.rotary, backend=self.backend, clean_frames=FRAMES)
        self.cache.commit()
        self.chunks += 1


@pytest.fixture(scope="module")
def model():
    return FAMILY.transformer().to(DEVICE, torch.bfloat16)


def fastest(model):
    layers = adapter_class_for("Cosmos3OmniTransformer").layer_geometry(model.config)
    shape = CallShape(DEVICE, torch.bfloat16, layers.num_heads, layers.num_kv_heads, layers.head_dim, PAGE_SIZE)
    return choose_backend("auto", shape).name


PROMPTS = {2: 37, 3: 200, 5: 128}  # before these chunks the prompt changes


@torch.no_grad()
def test_the_fastest_backend_agrees_with_the_reference(model):
    one, other = Rollout(model, fastest(model)), Rollout(model, "reference")
    for chunk in range(7):
        outs = []
        for rollout in (one, other):
            if chunk in PROMPTS:
                rollout.change_prompt(PROMPTS[chunk])
            rollout.start_chunk()
            outs.append(rollout.denoise())
            rollout.finish_chunk()
        bound = 0.03 * outs[1].abs().max().item()
        torch.testing.assert_close(*outs, rtol=0, atol=bound)


@torch.no_grad()
def test_one_captured_graph_serves_every_chunk_and_every_prompt(model):
    backend = fastest(model)
    if backend == "reference":
        pytest.skip("the reference backend cannot be captured")
    rollout = Rollout(model, backend)
    rollout.start_chunk()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            rollout.denoise()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = rollout.denoise()
    for chunk in range(7):
        if chunk in PROMPTS:
            rollout.change_prompt(PROMPTS[chunk])
        rollout.start_chunk()
        expected = rollout.denoise().clone()
        captured.zero_()
        graph.replay()
        torch.testing.assert_close(captured, expected, rtol=0, atol=1e-3)
        assert expected.abs().max() > 0.05
        rollout.finish_chunk()
