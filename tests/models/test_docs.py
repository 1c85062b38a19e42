"""The page that tells how to add a model: its example runs as it stands."""

import re
from pathlib import Path

import pytest
import torch

from bc_diffusers import models


PAGE = Path(__file__).parents[2] / "docs" / "adding_a_model.md"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.setattr(models, "ADAPTERS", list(models.ADAPTERS))  # the example registers one
    code = "\n\n".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.S | re.M))
    names = {"__name__": "adding_a_model"}
    exec(compile(code, str(PAGE), "exec"), names)
    return names


def test_the_example_proves_itself(example):
    assert models.adapter_class_for("ToyTransformer") is example["ToyAdapter"]
    assert len(example["chunks"]) == 4
    history = (torch.cat(example["chunks"], 2) - example["expected"]).abs().max()
    assert history < 1e-5


def test_the_example_sees_a_wrong_position(example):
    """The proof is one: the same rollout with tables that stay at frame 0 does not pass it."""
    adapter, cache, rotary = example["adapter"], example["cache"], example["rotary"]
    cache.close()
    cache.open(example["spec"])
    rotary.set_start(0)
    outs = []
    for frames in example["video"].split(2, 2):
        plan = cache.plan(12, 12)
        with torch.no_grad():
            outs.append(adapter.forward(frames, torch.tensor([500.0]), {"prompt_embeds": example["text"]}, plan=plan,
                                        rotary=rotary))
        cache.commit()
    assert (torch.cat(outs, 2) - example["expected"]).abs().max() > 1e-3


def test_every_hook_of_the_interface_is_on_the_page():
    text = PAGE.read_text()
    own = [name for name in vars(models.BlockCausalAdapter) if not name.startswith("_")]
    shared = {"tokens_per_frame", "begin", "change_prompt", "forward", "place_hooks"}  # what a family does not define
    assert [name for name in own if name not in text and name not in shared] == []


def test_adapters_must_say_what_they_serve():
    class Nameless(models.BlockCausalAdapter):
        pass

    with pytest.raises(ValueError, match="Nameless names no transformer_classes"):
        models.register_adapter(Nameless)
