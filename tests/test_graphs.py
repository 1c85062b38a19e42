"""What tells a captured forward that its model has changed; the graphs themselves are tested on a GPU."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from small_models import small_transformer

from bc_diffusers import graphs
from bc_diffusers.graphs import GraphRunner, model_fingerprint, why_not
from bc_diffusers.models import WanAdapter


@pytest.fixture
def model():
    transformer = small_transformer()
    WanAdapter(transformer)
    return transformer


def add_lora(model, name="style"):
    model.add_adapter(LoraConfig(r=2, lora_alpha=4, target_modules=["to_q", "to_v"]), adapter_name=name)


CHANGES = {
    "dtype": lambda m: m.to(torch.bfloat16),
    "fuse_qkv_projections": lambda m: m.fuse_qkv_projections(),
    "replaced weight": lambda m: setattr(m.proj_out, "weight", torch.nn.Parameter(m.proj_out.weight.clone())),
    "moved data": lambda m: setattr(m.proj_out.weight, "data", m.proj_out.weight.data.clone()),
    "replaced module": lambda m: setattr(m, "proj_out", torch.nn.Linear(24, 64)),
    "set_attention_backend": lambda m: m.set_attention_backend("_native_math"),
    "processor": lambda m: m.blocks[0].attn2.set_processor(type(m.blocks[0].attn2.processor)()),
    "hook": lambda m: m.blocks[1].register_forward_hook(lambda *_: None),
    "compile": lambda m: m.compile(),
    "compile_repeated_blocks": lambda m: m.compile_repeated_blocks(),
    "train": lambda m: m.train(),
    "LoRA": add_lora,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_shows(model, change):
    before = model_fingerprint(model)
    CHANGES[change](model)
    assert model_fingerprint(model) != before


def test_every_change_of_a_lora_shows(model):
    add_lora(model)
    seen = {model_fingerprint(model)}
    for change in (lambda: model.set_adapters("style", 0.5), lambda: model.disable_adapters(),
                   lambda: model.enable_adapters() or add_lora(model, "other"),
                   lambda: model.set_adapters(["style", "other"], [0.5, 0.1]), lambda: model.fuse_lora(),
                   lambda: model.delete_adapters("other")):
        change()
        seen.add(model_fingerprint(model))
    assert len(seen) == 7


@torch.no_grad()
def test_forwards_and_updates_in_place_do_not_count(model):
    before = model_fingerprint(model)
    latents, text = torch.randn(1, 16, 1, 4, 4), torch.randn(1, 5, 32)
    model(latents, torch.tensor([3.0]), text)
    model.proj_out.weight.mul_(2)
    assert model_fingerprint(model) == before == model_fingerprint(model)


def test_offloading_and_other_hooks_are_named(model):
    from accelerate import cpu_offload
    from diffusers.hooks import FirstBlockCacheConfig

    assert why_not(model) is None
    model.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    assert "hooks run in it: " in why_not(model)
    offloaded = small_transformer()
    cpu_offload(offloaded, execution_device=torch.device("cpu"))
    assert why_not(offloaded) == "CPU offloading moves its weights"


@pytest.fixture
def fake_capture(monkeypatch):
    """Captures that run their function, and replay nothing; `errors` is what they end with, one each."""
    errors = []

    @contextlib.contextmanager
    def capturing(graph, pool, device):
        yield
        error = errors.pop(0) if errors else None
        if error is not None:
            raise error

    monkeypatch.setattr(graphs, "capturing", capturing)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    return errors


class Ranks:
    """A group of which the others answer `others`."""

    def __init__(self, others):
        self.others, self.asked = others, []

    def all_agree(self, yes, device):
        self.asked.append(yes)
        return yes and self.others


@pytest.mark.parametrize("here, others", [(True, True), (True, False), (False, True), (False, False)])
def test_a_key_is_replayed_only_if_all_ranks_captured_it(model, fake_capture, caplog, here, others):
    runner, ranks, calls = GraphRunner(), Ranks(others), []
    if not here:
        fake_capture.append(RuntimeError("a wait\nin a capture"))
    runner.refresh(model, ranks)
    for i in range(3):
        out = runner("pass", lambda x: (calls.append(1), x + 1)[1], {"x": torch.tensor([i])})
        assert runner.replays or out.tolist() == [i + 1]  # the replays do nothing here
    assert ranks.asked == [here], "asked once, also by the rank that failed"
    agreed = here and others
    assert (runner.captures, runner.replays) == ((1, 2) if agreed else (0, 0))
    assert len(calls) == (2 if agreed else 4)  # the first call and its capture, then every call that is no replay
    warning = "" if agreed else "another rank" if here else "a wait"
    assert warning in caplog.text and bool(caplog.text) == (not agreed)


def test_out_of_memory_in_a_capture_is_raised(model, fake_capture):
    runner, ranks = GraphRunner(), Ranks(True)
    fake_capture.append(torch.OutOfMemoryError("none left"))
    runner.refresh(model, ranks)
    with pytest.raises(torch.OutOfMemoryError):
        runner("pass", lambda x: x, {"x": torch.zeros(1)})
    assert ranks.asked == [] and len(runner) == 0


def test_graphs_go_with_their_group(model, fake_capture):
    runner, ranks = GraphRunner(), Ranks(True)
    for group, kept in ((ranks, 0), (ranks, 1), (Ranks(True), 0), (None, 0), (None, 1)):
        runner.refresh(model, group)
        assert len(runner) == kept
        runner("pass", lambda x: x, {"x": torch.zeros(1)})
