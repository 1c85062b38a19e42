"""The CUDA graph runner on a small Wan transformer: the same numbers as eager forwards, over commits and reopens."""

import pytest
import torch
from small_models import small_transformer

from bc_diffusers import BlockCausalKVCache, RolloutSpec
from bc_diffusers.graphs import GraphRunner
from bc_diffusers.models import WanAdapter


DEVICE = torch.device("cuda", 0)
FRAMES, TOKENS = 3, 24
SPEC = RolloutSpec(4 * TOKENS + 5, FRAMES * TOKENS, {FRAMES * TOKENS: 1, TOKENS: FRAMES}, max_pin_tokens=30)


@pytest.fixture
def rollout():
    return SmallRollout()


class SmallRollout:
    def __init__(self):
        self.transformer = small_transformer(attention_head_dim=64, num_layers=2).to(DEVICE, torch.bfloat16)
        self.adapter = WanAdapter(self.transformer)
        self.caches = [BlockCausalKVCache(
            num_layers=2, num_kv_heads=2, head_dim=64, page_size=128, dtype=torch.bfloat16, device=DEVICE,
            pool_tokens=BlockCausalKVCache.pool_tokens_for(SPEC, 128)) for _ in range(2)]
        self.rotary = [self.adapter.make_rotary(FRAMES, 8, 12, DEVICE) for _ in range(2)]
        self.runner, self.frame = GraphRunner(), 0

    def open(self, pin):
        for cache in self.caches:
            cache.close()
            cache.open(SPEC, pin)
        self.frame = 0

    def forward(self, size, captured, latents, time, prompt):
        plan = self.caches[captured].plan(FRAMES * TOKENS, size)

        def call(latents, time, prompt):
            return self.adapter.forward(latents, time, {"prompt_embeds": prompt}, plan=plan,
                                        rotary=self.rotary[captured])

        inputs = {"latents": latents, "time": time, "prompt": prompt}
        return self.runner(plan.graph_key, call, inputs) if captured else call(**inputs)

    @torch.no_grad()
    def chunk(self):
        """One pass of each size, eager in one cache and captured in the other: equal to the bit."""
        for rotary in self.rotary:
            rotary.set_start(self.frame)
        for size in (FRAMES * TOKENS, TOKENS):
            inputs = (torch.randn(1, 16, FRAMES, 8, 12, device=DEVICE), torch.rand(1, device=DEVICE) * 1000,
                      torch.randn(1, 7, 32, device=DEVICE).to(torch.bfloat16))
            outs = [self.forward(size, captured, *inputs) for captured in (False, True)]
            assert torch.equal(*outs)
        for cache in self.caches:
            cache.commit()
        self.frame += FRAMES


def test_captured_in_the_first_chunk_it_serves_every_chunk_and_every_pin(rollout):
    for pin in (0, 30, 7):
        rollout.open(pin)
        for _ in range(6):
            rollout.chunk()
    assert rollout.runner.captures == 2 and rollout.runner.replays == 2 * 17


def test_graphs_are_dropped_when_the_model_changes(rollout):
    rollout.open(0)
    model, runner = rollout.transformer, rollout.runner
    runner.refresh(model)
    rollout.chunk()
    runner.refresh(model)
    assert len(runner) == 2
    with torch.no_grad():  # the graph reads the new values
        model.blocks[0].ffn.net[2].weight.mul_(1.5)
    runner.refresh(model)
    rollout.chunk()
    assert len(runner) == 2 and runner.captures == 2
    model.fuse_qkv_projections()
    runner.refresh(model)
    assert len(runner) == 0
    rollout.chunk()
    model.to("cpu")
    runner.refresh(model)
    assert len(runner) == 0


def test_a_replay_launches_one_graph(rollout, launches):
    rollout.open(0)
    rollout.chunk()
    inputs = (torch.randn(1, 16, FRAMES, 8, 12, device=DEVICE), torch.zeros(1, device=DEVICE),
              torch.randn(1, 7, 32, device=DEVICE).to(torch.bfloat16))
    with torch.no_grad():
        profile = launches(lambda: rollout.forward(FRAMES * TOKENS, True, *inputs))
    assert profile.synchronisations == [] and profile.host_to_device == []


def test_what_cannot_be_captured_is_run_and_leaves_no_trace(caplog):
    """A function that waits for the device: one warning, right results, and torch as it was."""
    runner, before = GraphRunner(), torch.cuda.current_stream()

    def waits(x):
        return x * x.sum().item()

    x = torch.ones(4, device=DEVICE)
    for _ in range(3):
        assert torch.equal(runner("waits", waits, {"x": x}), x * x.sum())
        x = x + 1
    assert torch.cuda.current_stream() == before and runner.captures == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cannot be captured in a CUDA graph" in caplog.text
    assert torch.randn(3, device=DEVICE).isfinite().all(), "the default generator still works"
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        y = torch.ones(1 << 20, device=DEVICE)
    y.record_stream(torch.cuda.current_stream())
    address = y.data_ptr()
    del y
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        assert torch.ones(1 << 20, device=DEVICE).data_ptr() == address, "freed memory comes back"
    assert torch.equal(runner("fits", lambda x: x * 3, {"x": x}), x * 3)
    assert torch.equal(runner("fits", lambda x: x * 3, {"x": x + 1}), (x + 1) * 3)
    assert runner.captures == runner.replays == 1
