"""LoRA files: merged, kept, refused."""

import pytest
import torch
from safetensors.torch import save_file

from bc_diffusers import BlockCausalVideoPipeline
from bc_diffusers.checkpoints import CheckpointError, convert_checkpoint, load_transformer
from bc_diffusers.checkpoints.convert import ADAPTER_FILE, transformer_config


RANK = 4
MODULES = {"self_attn.q": "attn1.to_q", "self_attn.o": "attn1.to_out.0", "cross_attn.v": "attn2.to_v",
           "ffn.0": "ffn.net.0.proj", "ffn.2": "ffn.net.2"}


@pytest.fixture
def factors(wan):
    """(down, up) by module under Wan's names, on every block."""
    generator = torch.Generator().manual_seed(5)
    result = {}
    for block in range(3):
        for module in MODULES:
            name = f"blocks.{block}.{module}"
            rows, columns = wan.get_submodule(name).weight.shape
            result[name] = (torch.randn(RANK, columns, generator=generator) * 0.1,
                            torch.randn(rows, RANK, generator=generator) * 0.1)
    return result


def lora_file(style, folder, factors):
    state = {}
    for name, (down, up) in factors.items():
        if style == "longlive":
            state[f"base_model.model.{name}.lora_A.weight"] = down
            state[f"base_model.model.{name}.lora_B.weight"] = up
        elif style == "peft":
            state[f"base_model.model.{name}.lora_A.default.weight"] = down
            state[f"base_model.model.{name}.lora_B.default.weight"] = up
        elif style == "comfy":
            state[f"diffusion_model.{name}.lora_down.weight"] = down
            state[f"diffusion_model.{name}.lora_up.weight"] = up
            state[f"diffusion_model.{name}.alpha"] = torch.tensor(2.0)
        elif style == "kohya":
            flat = "lora_unet_" + name.replace(".", "_")
            state[f"{flat}.lora_down.weight"], state[f"{flat}.lora_up.weight"] = down, up
            state[f"{flat}.alpha"] = torch.tensor(2.0)
        elif style == "diffusers":
            block, module = name.split(".", 2)[1:]
            state[f"transformer.blocks.{block}.{MODULES[module]}.lora_A.weight"] = down
            state[f"transformer.blocks.{block}.{MODULES[module]}.lora_B.weight"] = up
    file = folder / f"{style}.pt"
    torch.save({"generator_lora": state, "critic_lora": {"x": down}} if style == "longlive" else state, file)
    return file


@pytest.fixture
def checkpoint(tmp_path, wan):
    file = tmp_path / "base.pt"
    torch.save({"generator": {f"model.{key}": tensor for key, tensor in wan.state_dict().items()}}, file)
    return file


def check_merged(state, wan, factors, scale):
    original = wan.state_dict()
    for name, (down, up) in factors.items():
        block, module = name.split(".", 2)[1:]
        got = state[f"blocks.{block}.{MODULES[module]}.weight"]
        torch.testing.assert_close(got, original[f"{name}.weight"] + scale * up @ down, rtol=0, atol=1e-6)
    assert torch.equal(state["blocks.1.attn1.to_k.weight"], original["blocks.1.self_attn.k.weight"])
    assert torch.equal(state["blocks.1.ffn.net.2.bias"], original["blocks.1.ffn.2.bias"])


@pytest.mark.parametrize("style, alpha, scale", [
    ("longlive", None, 1.0), ("longlive", 8.0, 2.0), ("peft", None, 1.0), ("comfy", None, 0.5), ("comfy", 4.0, 1.0),
    ("kohya", None, 0.5), ("diffusers", None, 1.0)])
def test_merged(style, alpha, scale, tmp_path, base, checkpoint, wan, factors):
    file = lora_file(style, tmp_path, factors)
    model = load_transformer(checkpoint, base_config=transformer_config(base), lora=file, lora_alpha=alpha)
    check_merged(model.state_dict(), wan, factors, scale)


def test_a_wrapped_model_saved_whole(tmp_path, base, wan, factors):
    """PEFT's own names of a model with its adapter inside."""
    state = {}
    for key, tensor in wan.state_dict().items():
        module, _, kind = key.rpartition(".")
        state[f"model.{module}.base_layer.{kind}" if module in factors else f"model.{key}"] = tensor
    for name, (down, up) in factors.items():
        state[f"model.{name}.lora_A.default.weight"], state[f"model.{name}.lora_B.default.weight"] = down, up
    torch.save({"generator": state}, tmp_path / "whole.pt")
    model = load_transformer(tmp_path / "whole.pt", base_config=transformer_config(base))
    check_merged(model.state_dict(), wan, factors, 1.0)


@pytest.mark.parametrize("style, alpha", [("longlive", 8.0), ("kohya", None)])
def test_kept_as_an_adapter(style, alpha, tmp_path, base, checkpoint, factors):
    pytest.importorskip("peft")
    lora = lora_file(style, tmp_path, factors)
    merged = convert_checkpoint(checkpoint, base, tmp_path / "merged", preset="longlive", lora=lora, lora_alpha=alpha)
    kept = convert_checkpoint(checkpoint, base, tmp_path / "kept", preset="longlive", lora=lora, lora_alpha=alpha,
                              keep_lora=True)
    assert (kept / ADAPTER_FILE).exists() and not (merged / ADAPTER_FILE).exists()
    videos = []
    for folder in (merged, kept, kept):
        pipe = BlockCausalVideoPipeline.from_pretrained(folder)
        pipe.set_progress_bar_config(disable=True)
        if len(videos) == 1:
            pipe.load_lora_weights(folder)
        videos.append(pipe("a red circle", num_frames=9, height=64, width=64, seed=0, output_type="latent").frames)
    torch.testing.assert_close(videos[0], videos[1], rtol=0, atol=1e-4)
    assert (videos[0] - videos[2]).abs().max() > 0.01  # without it the video is another one


def test_refused(tmp_path, base, checkpoint, wan, factors):
    config = transformer_config(base)
    with pytest.raises(CheckpointError, match="is a LoRA: give it as `lora`"):
        load_transformer(lora_file("peft", tmp_path, factors), base_config=config)
    with pytest.raises(CheckpointError, match="not a LoRA.*\n.*unexpected: patch_embedding.weight"):
        load_transformer(checkpoint, base_config=config, lora=checkpoint)
    name, (down, up) = next(iter(factors.items()))
    save_file({f"{name}.lora_A.weight": down, "blocks.0.self_attn.q.diff_b": up[:, 0].contiguous()},
              tmp_path / "odd.safetensors")
    with pytest.raises(CheckpointError, match="unexpected: blocks.0.self_attn.q.diff_b\n.*one factor only: blocks.0"):
        load_transformer(checkpoint, base_config=config, lora=tmp_path / "odd.safetensors")
    save_file({f"{name}.lora_A.weight": down[:, :7].contiguous(), f"{name}.lora_B.weight": up},
              tmp_path / "small.safetensors")
    for keep in (False, True):
        with pytest.raises(CheckpointError, match=r"blocks.0.attn1.to_q: \[96, 4\] x \[4, 7\] for \[96, 96\]"):
            convert_checkpoint(checkpoint, base, tmp_path / "out", preset="longlive", keep_lora=keep,
                               lora=tmp_path / "small.safetensors")
    with pytest.raises(ValueError, match="`keep_lora` needs `lora`"):
        convert_checkpoint(checkpoint, base, tmp_path / "out", preset="longlive", keep_lora=True)
