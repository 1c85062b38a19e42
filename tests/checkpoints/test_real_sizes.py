"""1.3B and 14B at their real shapes (no memory: the meta device), and what a conversion takes of real memory."""

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from self_forcing_oracle import SIZE_1_3B, SIZE_14B, Wan, WanSize

from bc_diffusers.checkpoints import convert_checkpoint
from bc_diffusers.checkpoints.files import Checkpoint
from bc_diffusers.checkpoints.lora import read_lora
from bc_diffusers.checkpoints.transformer import TransformerWeights, check_keys, empty_transformer


@pytest.fixture(scope="module", params=[SIZE_1_3B, SIZE_14B], ids=["1.3B", "14B"])
def real(request):
    with torch.device("meta"):
        return request.param, Wan(request.param).state_dict()


# (layers, heads, head width, feed-forward), parameters: as in the configs of the published models.
PUBLISHED = {SIZE_1_3B: ((30, 12, 128, 8960), 1_418_996_800), SIZE_14B: ((40, 40, 128, 13824), 14_288_491_584)}


def test_keys_and_shapes(real):
    size, state = real
    weights = TransformerWeights(Checkpoint("real.pt", None, state, {}))
    config = weights.config()
    shape, parameters = PUBLISHED[size]
    assert (config["num_layers"], config["num_attention_heads"], config["attention_head_dim"],
            config["ffn_dim"]) == shape
    model = empty_transformer(config)
    check_keys(weights, model)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert sum(weights.nbytes(name) for name in weights) == 4 * parameters
    assert model.config.text_dim == 4096 and model.config.in_channels == model.config.out_channels == 16


def test_a_lora_on_every_linear_layer_of_every_block(real):
    """As LongLive's: rank 256 on attention and feed-forward."""
    size, state = real
    factors = {}
    for key, weight in state.items():
        if key.startswith("blocks.") and weight.ndim == 2:
            module = key.removesuffix(".weight")
            rows, columns = weight.shape
            factors[f"{module}.lora_A.weight"] = torch.empty(256, columns, device="meta")
            factors[f"{module}.lora_B.weight"] = torch.empty(rows, 256, device="meta")
    lora = read_lora(Checkpoint("lora.pt", None, {}, factors))
    assert len(lora) == size.layers * 10
    TransformerWeights(Checkpoint("real.pt", None, state, {}), lora)  # raises if one fits no weight


def kilobytes(field: str) -> int:
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's peak memory counter")
def test_memory_stays_near_one_copy(tmp_path, base):
    """A file of three models of 50 MB each, converted: no more than one of them in memory."""
    size = WanSize(dim=256, heads=2, ffn=1024, layers=12, text_dim=64, freq_dim=64, channels=8)
    state = {f"model.{key}": tensor for key, tensor in Wan(size).state_dict().items()}
    one = sum(tensor.nbytes for tensor in state.values())
    names = ("critic", "generator", "generator_ema")
    torch.save({name: {key: tensor.clone() for key, tensor in state.items()} for name in names}, tmp_path / "big.pt")
    del state
    stock = tmp_path / "stock"
    shutil.copytree(base, stock, ignore=shutil.ignore_patterns("transformer"))
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = kilobytes("VmRSS")
    convert_checkpoint(tmp_path / "big.pt", stock, tmp_path / "out", preset="self-forcing", max_shard_size="10MB")
    peak = (kilobytes("VmHWM") - before) * 1024
    assert one > 50e6 and len(list((tmp_path / "out" / "transformer").glob("*.safetensors"))) >= 4
    assert peak < 1.3 * one
