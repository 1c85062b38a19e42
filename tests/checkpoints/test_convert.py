"""Every published key layout at small size, and what must be refused."""

import json
import sys
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline, WanTransformer3DModel
from diffusers.utils import logging
from safetensors.torch import load_file, save_file

from bc_diffusers import BlockCausalVideoPipeline, cli
from bc_diffusers.checkpoints import CheckpointError, KeyMismatch, convert, convert_checkpoint, load_transformer
from bc_diffusers.pipelines import PRESETS


def prefixed(state, prefix="model."):
    return {prefix + key: tensor for key, tensor in state.items()}


def fsdp_names(state):
    """As a sharded, checkpointed, compiled trainer names them."""
    wrapped = {}
    for key, tensor in state.items():
        key = key.replace("blocks.", "blocks._fsdp_wrapped_module.", 1)
        parts = key.split(".")
        if "blocks" in parts:
            parts.insert(parts.index("blocks") + 3, "_checkpoint_wrapped_module")
        wrapped["_fsdp_wrapped_module.model._orig_mod." + ".".join(parts)] = tensor
    return wrapped


def write(layout, folder: Path, state, other, diffusers_state):
    """Writes `state` in a real layout (with `other` where the layout holds further weights); returns the file."""
    file = folder / ("checkpoint.safetensors" if layout.endswith("safetensors") else "checkpoint.pt")
    if layout == "self-forcing":  # the average's names carry the trainer's wrappers
        torch.save({"generator": prefixed(other), "critic": prefixed(other), "generator_ema": fsdp_names(state)}, file)
    elif layout == "causvid":
        torch.save({"generator": prefixed(state), "critic": prefixed(other)}, file)
    elif layout == "longlive":
        torch.save({"model": prefixed(state), "step": 3000}, file)
    elif layout == "nested":
        torch.save({"state_dict": {"generator": prefixed(state), "critic": prefixed(other)}}, file)
    elif layout == "data parallel":
        torch.save(prefixed(state, "module.model."), file)
    elif layout == "plain, with the rotary table":
        torch.save({**state, "freqs": torch.zeros(4, dtype=torch.complex64)}, file)
    elif layout == "legacy torch":
        torch.save({"generator": prefixed(state)}, file, _use_new_zipfile_serialization=False)
    elif layout == "krea safetensors":
        save_file(prefixed(state), file)
    elif layout == "comfy safetensors":
        save_file(prefixed(state, "model.diffusion_model."), file)
    elif layout == "diffusers safetensors":
        save_file(diffusers_state, file)
    elif layout in ("diffusers folder", "diffusers pipeline folder"):
        file = folder / "model"
        inner = file if layout == "diffusers folder" else file / "transformer"
        inner.mkdir(parents=True)
        names = sorted(diffusers_state)
        halves = {"a-00001.safetensors": names[::2], "a-00002.safetensors": names[1::2]}
        for name, keys in halves.items():
            save_file({key: diffusers_state[key] for key in keys}, inner / name)
        (inner / "a.safetensors.index.json").write_text(json.dumps(
            {"metadata": {}, "weight_map": {key: name for name, keys in halves.items() for key in keys}}))
    return file


LAYOUTS = ["self-forcing", "causvid", "longlive", "nested", "data parallel", "plain, with the rotary table",
           "legacy torch", "krea safetensors", "comfy safetensors", "diffusers safetensors", "diffusers folder",
           "diffusers pipeline folder"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, tmp_path, base, wan, other_wan, expected):
    file = write(layout, tmp_path, wan.state_dict(), other_wan.state_dict(), expected)
    folder = convert_checkpoint(file, base, tmp_path / "out", preset="self-forcing")
    got = WanTransformer3DModel.from_pretrained(folder, subfolder="transformer").state_dict()
    assert set(got) == set(expected)
    for key, tensor in expected.items():
        assert torch.equal(got[key], tensor), key


def test_the_folder_is_a_pipeline(tmp_path, base, wan):
    file = write("causvid", tmp_path, wan.state_dict(), {}, {})
    folder = convert_checkpoint(file, base, tmp_path / "out", preset="longlive")
    pipe = DiffusionPipeline.from_pretrained(folder)
    assert isinstance(pipe, BlockCausalVideoPipeline)
    assert pipe.rollout == PRESETS["longlive"]
    assert pipe.scheduler.config.shift == PRESETS["longlive"].shift
    pipe.set_progress_bar_config(disable=True)
    video = pipe("a red circle", num_frames=9, height=64, width=64).frames
    assert video.shape == (1, 9, 64, 64, 3)
    copied, stock = (Path(f) / "vae" / "diffusion_pytorch_model.safetensors" for f in (folder, base))
    assert copied.read_bytes() == stock.read_bytes()
    assert not (folder / "vae" / "config.json").samefile(base / "vae" / "config.json")


def test_from_original_checkpoint_makes_the_same_pipeline(tmp_path, base, wan, other_wan):
    """Also once it has saved itself."""
    file = write("self-forcing", tmp_path, wan.state_dict(), other_wan.state_dict(), {})
    folder = convert_checkpoint(file, base, tmp_path / "out", preset="self-forcing")
    pipes = [BlockCausalVideoPipeline.from_pretrained(folder),
             BlockCausalVideoPipeline.from_original_checkpoint(file, base, preset="self-forcing")]
    pipes[1].save_pretrained(tmp_path / "saved")
    pipes.append(BlockCausalVideoPipeline.from_pretrained(tmp_path / "saved"))
    assert pipes[0].config.preset == pipes[1].config.preset == pipes[2].config.preset == "self-forcing"
    states = [pipe.transformer.state_dict() for pipe in pipes]
    for key, tensor in states[0].items():
        assert torch.equal(tensor, states[1][key]) and torch.equal(tensor, states[2][key]), key
    videos = []
    for pipe in pipes:
        assert not pipe.transformer.training
        pipe.set_progress_bar_config(disable=True)
        videos.append(pipe("a red circle", num_frames=17, height=64, width=64, seed=3, output_type="latent").frames)
    torch.testing.assert_close(videos[0], videos[1], rtol=0, atol=1e-4)  # a mapped file aligns weights differently
    torch.testing.assert_close(videos[0], videos[2], rtol=0, atol=1e-4)


@pytest.mark.parametrize("weights", ["generator", "critic"])
def test_weights_by_name(weights, tmp_path, wan, other_wan, base):
    file = write("self-forcing", tmp_path, wan.state_dict(), other_wan.state_dict(), {})
    model = load_transformer(file, base_config=convert.transformer_config(base), weights=weights)
    assert torch.equal(model.state_dict()["patch_embedding.weight"], other_wan.state_dict()["patch_embedding.weight"])


def test_weights_that_are_not_there(tmp_path, wan):
    file = write("causvid", tmp_path, wan.state_dict(), wan.state_dict(), {})
    with pytest.raises(CheckpointError, match="no 'generator_ema'; choose one of generator, critic"):
        load_transformer(file, weights="generator_ema")
    flat = write("data parallel", tmp_path, wan.state_dict(), {}, {})
    with pytest.raises(CheckpointError, match="one model only"):
        load_transformer(flat, weights="generator")


def test_every_difference_is_listed_and_nothing_is_written(tmp_path, base, wan):
    state = dict(wan.state_dict())
    lost = ["blocks.0.self_attn.q.weight", "blocks.2.ffn.0.bias", "time_projection.1.weight"]
    for key in lost:
        del state[key]
    state["blocks.1.cross_attn.k.weight"] = torch.zeros(5, 96)
    state["head.modulation"] = torch.zeros(1, 3, 96)
    state["_cls_pred_branch.1.weight"] = torch.zeros(2, 2)
    state["blocks.1.self_attn.gate.weight"] = torch.zeros(2, 2)
    file = write("causvid", tmp_path, state, {}, {})
    before = set(tmp_path.rglob("*"))
    with pytest.raises(KeyMismatch) as caught:
        convert_checkpoint(file, base, tmp_path / "out", preset="self-forcing")
    error = caught.value
    assert set(error.missing) == {"blocks.0.attn1.to_q.weight", "blocks.2.ffn.net.0.proj.bias",
                                  "condition_embedder.time_proj.weight"}
    assert set(error.unexpected) == {"_cls_pred_branch.1.weight", "blocks.1.self_attn.gate.weight"}
    assert error.misshaped == {"blocks.1.attn2.to_k.weight": ((5, 96), (96, 96)),
                               "scale_shift_table": ((1, 3, 96), (1, 2, 96))}
    for key in (*error.missing, *error.unexpected, *error.misshaped):
        assert key in str(error)
    assert set(tmp_path.rglob("*")) == before


def test_a_failure_while_writing_leaves_nothing(tmp_path, base, wan, monkeypatch):
    file = write("causvid", tmp_path, wan.state_dict(), {}, {})
    before = set(tmp_path.rglob("*"))
    seen = []

    def full_disk(tensors, path, metadata):
        if seen:
            raise OSError(28, "No space left on device")
        seen.append(Path(path))
        save_file(tensors, path, metadata)

    monkeypatch.setattr(convert, "save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        convert_checkpoint(file, base, tmp_path / "out", preset="self-forcing", max_shard_size="200KB")
    assert ".out.partial-" in str(seen[0]) and seen[0].parents[2] == tmp_path  # beside the folder, to be renamed
    assert set(tmp_path.rglob("*")) == before


def test_an_existing_folder_is_not_touched(tmp_path, base, wan):
    file = write("causvid", tmp_path, wan.state_dict(), {}, {})
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    with pytest.raises(FileExistsError):
        convert_checkpoint(file, base, tmp_path / "out", preset="self-forcing")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine"]


def test_shards(tmp_path, base, wan, expected):
    file = write("causvid", tmp_path, wan.state_dict(), {}, {})
    folder = convert_checkpoint(file, base, tmp_path / "out", preset="self-forcing", max_shard_size="300KB")
    shards = sorted((folder / "transformer").glob("diffusion_pytorch_model-*.safetensors"))
    assert len(shards) >= 5
    assert all(shard.stat().st_size < 400_000 for shard in shards)
    got = WanTransformer3DModel.from_pretrained(folder, subfolder="transformer").state_dict()
    assert all(torch.equal(got[key], expected[key]) for key in expected)


def test_dtype(tmp_path, base, wan):
    file = write("causvid", tmp_path, wan.state_dict(), {}, {})
    folder = convert_checkpoint(file, base, tmp_path / "out", preset="self-forcing", dtype=torch.bfloat16)
    stored = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    kept = {key for key, tensor in stored.items() if tensor.dtype == torch.float32}
    assert {key for key, tensor in stored.items() if tensor.dtype == torch.bfloat16} == set(stored) - kept
    assert "scale_shift_table" in kept and "condition_embedder.time_embedder.linear_1.weight" in kept
    assert "blocks.0.attn1.to_q.weight" not in kept
    # What is in memory afterwards is what diffusers itself makes of the weights in float32.
    whole = convert_checkpoint(file, base, tmp_path / "whole", preset="self-forcing")
    want = WanTransformer3DModel.from_pretrained(whole, subfolder="transformer", dtype=torch.bfloat16).state_dict()
    model = load_transformer(file, base_config=convert.transformer_config(base), dtype=torch.bfloat16).state_dict()
    for got in (stored, model):
        for key, tensor in want.items():
            assert got[key].dtype == tensor.dtype and torch.equal(got[key], tensor), key


def test_without_a_config_the_shapes_say_it(tmp_path, wan):
    from self_forcing_oracle import SIZE_1_3B, Wan, WanSize

    size = WanSize(dim=256, heads=2, ffn=96, layers=2, text_dim=40, freq_dim=32, channels=4)
    torch.save({"generator": prefixed(Wan(size).state_dict())}, tmp_path / "a.pt")
    config = load_transformer(tmp_path / "a.pt").config
    assert (config.num_layers, config.num_attention_heads, config.attention_head_dim) == (2, 2, 128)
    assert (config.ffn_dim, config.text_dim, config.freq_dim, config.in_channels) == (96, 40, 32, 4)
    assert SIZE_1_3B.dim // SIZE_1_3B.heads == 128
    torch.save({"generator": prefixed(wan.state_dict())}, tmp_path / "b.pt")
    with pytest.raises(CheckpointError, match="96 wide, no multiple of heads of 128"):
        load_transformer(tmp_path / "b.pt")


def test_a_base_of_another_size_is_named(tmp_path, base):
    from self_forcing_oracle import Wan, WanSize

    size = WanSize(dim=120, heads=5, ffn=160, layers=4, text_dim=64, freq_dim=64, channels=8)
    torch.save({"generator": prefixed(Wan(size).state_dict())}, tmp_path / "a.pt")
    with pytest.raises(KeyMismatch, match="4 layers of width 120, the base folder's transformer 3 of width 96"):
        convert_checkpoint(tmp_path / "a.pt", base, tmp_path / "out", preset="self-forcing")


class Evil:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def test_files_that_are_refused(tmp_path, base, wan):
    def refused(name, match, content=None):
        file = tmp_path / name
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(CheckpointError, match=match):
            convert_checkpoint(file, base, tmp_path / "out", preset="self-forcing")
        assert not (tmp_path / "out").exists()

    torch.save({"generator": prefixed(wan.state_dict()), "hook": Evil(tmp_path / "ran")}, tmp_path / "evil.pt")
    refused("evil.pt", "could run code")
    assert not (tmp_path / "ran").exists()
    whole = write("causvid", tmp_path, wan.state_dict(), {}, {}).read_bytes()
    refused("cut.pt", "damaged", whole[: len(whole) // 2])
    refused("pointer.pt", "git lfs pull", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    refused("page.pt", "neither a torch nor a safetensors file", b"<html>not found</html>")
    save_file({"conv1.weight": torch.zeros(3), "conv1.bias": torch.zeros(3)}, tmp_path / "vae.safetensors")
    refused("vae.safetensors", "no transformer of the Wan family.*conv1")
    state = dict(wan.state_dict())
    state["blocks.0.ffn.0.weight"] = state["blocks.0.ffn.0.weight"].to(torch.float8_e4m3fn)
    save_file(state, tmp_path / "fp8.safetensors")
    refused("fp8.safetensors", "quantized")
    twice = {**prefixed(wan.state_dict()), "model._orig_mod.patch_embedding.bias": torch.zeros(96)}
    torch.save({"generator": twice}, tmp_path / "twice.pt")
    refused("twice.pt", "are both patch_embedding.bias")
    torch.save({"optimizer": {"a": torch.zeros(1)}, "critic": prefixed(wan.state_dict())}, tmp_path / "critic.pt")
    refused("critic.pt", "choose one of optimizer, critic")
    with pytest.raises(FileNotFoundError, match="nowhere.pt"):
        convert_checkpoint(tmp_path / "nowhere.pt", base, tmp_path / "out", preset="self-forcing")


def test_bases_that_are_refused(tmp_path, base, wan, monkeypatch):
    file = write("causvid", tmp_path, wan.state_dict(), {}, {})
    with pytest.raises(FileNotFoundError, match="no base folder"):
        convert_checkpoint(file, tmp_path / "nothing", tmp_path / "out", preset="self-forcing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no model_index.json"):
        convert_checkpoint(file, tmp_path / "empty", tmp_path / "out", preset="self-forcing")
    (tmp_path / "empty" / "model_index.json").write_text((base / "model_index.json").read_text())
    with pytest.raises(CheckpointError, match="lacks tokenizer, text_encoder, vae"):
        convert_checkpoint(file, tmp_path / "empty", tmp_path / "out", preset="self-forcing")
    with pytest.raises(ValueError, match="give a preset, one of self-forcing, causvid"):
        convert_checkpoint(file, base, tmp_path / "out")
    with pytest.raises(ValueError, match="unknown preset 'selfforcing'"):
        convert_checkpoint(file, base, tmp_path / "out", preset="selfforcing")
    asked = {}

    def fetched(name, allow_patterns):
        asked.update(name=name, patterns=allow_patterns)
        return str(base)

    monkeypatch.setattr(convert, "snapshot_download", fetched)
    convert_checkpoint(file, "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", tmp_path / "out", preset="self-forcing")
    assert asked["name"] == "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
    assert "transformer/config.json" in asked["patterns"] and "transformer/*" not in asked["patterns"]


def test_command(tmp_path, base, wan, other_wan, monkeypatch, capfd):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["bc-diffusers", "convert", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, *capfd.readouterr()

    file = write("self-forcing", tmp_path, wan.state_dict(), other_wan.state_dict(), {})
    logging.enable_progress_bar()
    code, out, errors = run(file, "--base", base, "--preset", "self-forcing", "--weights", "generator", "-o",
                            tmp_path / "out")
    assert not code and str(tmp_path / "out") in out
    assert "transformer: 100%" in errors
    got = load_file(tmp_path / "out" / "transformer" / "diffusion_pytorch_model.safetensors")
    assert torch.equal(got["patch_embedding.weight"], other_wan.state_dict()["patch_embedding.weight"])
    code, out, errors = run(file, "--base", base, "--preset", "nope", "-o", tmp_path / "two")
    assert code == 1 and "unknown preset 'nope'" in errors and "Traceback" not in errors
    assert not (tmp_path / "two").exists()
