"""What tells a captured forward that its model has changed; the graphs themselves are tested on a GPU."""

import pytest
import torch
from peft import LoraConfig
from small_models import small_transformer

from bc_diffusers.graphs import model_fingerprint, why_not
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
