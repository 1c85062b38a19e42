"""`bc-diffusers info`: from configs alone, for folders and repositories, without a weight being there."""

import json
import sys

import pytest
import torch
from small_models import small_wan_pipeline
from tiny_pipelines import STOCK

from bc_diffusers import BlockCausalVideoPipeline, cli, embedded_model
from bc_diffusers.cli_info import describe
from bc_diffusers.info import inspect_model


WAN_13B = {  # the published configs' numbers
    "model_index.json": {"_class_name": "WanPipeline", "_diffusers_version": "0.33.0.dev0",
                         "scheduler": ["diffusers", "UniPCMultistepScheduler"],
                         "text_encoder": ["transformers", "UMT5EncoderModel"],
                         "tokenizer": ["transformers", "T5TokenizerFast"],
                         "transformer": ["diffusers", "WanTransformer3DModel"],
                         "vae": ["diffusers", "AutoencoderKLWan"]},
    "transformer/config.json": {"_class_name": "WanTransformer3DModel", "num_layers": 30, "num_attention_heads": 12,
                                "attention_head_dim": 128, "ffn_dim": 8960, "text_dim": 4096, "freq_dim": 256,
                                "in_channels": 16, "out_channels": 16, "patch_size": [1, 2, 2], "eps": 1e-6,
                                "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads"},
    "vae/config.json": {"_class_name": "AutoencoderKLWan", "base_dim": 96, "z_dim": 16, "dim_mult": [1, 2, 4, 4],
                        "num_res_blocks": 2, "temperal_downsample": [False, True, True]},
    "text_encoder/config.json": {"model_type": "umt5", "architectures": ["UMT5EncoderModel"], "d_model": 4096,
                                 "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "vocab_size": 256384,
                                 "feed_forward_proj": "gated-gelu"},
}


def write(folder, files):
    for name, content in files.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(content))
    return folder


@pytest.fixture
def wan(tmp_path):
    return write(tmp_path / "wan", WAN_13B)


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["bc-diffusers", "info", *map(str, arguments)])
    code = 0
    try:
        cli.main()
    except SystemExit as end:
        code = end.code or 0
    return code, capsys.readouterr()


def test_wan_13b_fits_a_24_gb_card_with_its_text_encoder_offloaded(wan):
    report = inspect_model(wan, preset="self-forcing", dtype=torch.bfloat16, device="cpu")
    assert report["family"] == "Wan" and report["autoregressive"] is False
    assert report["transformer"] == {"class": "WanTransformer3DModel", "layers": 30, "heads": 12, "kv_heads": 12,
                                     "head_dim": 128, "patch": [1, 2, 2]}
    assert (report["tokens_per_frame"], report["tokens_per_chunk"]) == (1560, 4680)
    assert report["window"]["window"] == {"latent_frames": 18, "pixel_frames": 72, "seconds": 4.5, "tokens": 28080}
    assert report["window"]["visible"]["tokens"] == 32760
    parts = {name: round(part["parameters"] / 1e9, 2) for name, part in report["components"].items()}
    assert parts == {"transformer": 1.42, "text_encoder": 5.68, "vae": 0.13}
    tokens = report["memory"]["pool_bytes"] / (30 * 2 * 12 * 128 * 2)
    assert 32760 + 4680 <= tokens <= 38500  # a chunk is there twice: staged, and in private pages
    fits = report["memory"]["fits_cards"]
    assert (fits["12 GB"], fits["24 GB"], fits["48 GB"]) == ("no", "text encoder offloaded", "all of it")


def test_the_pool_is_the_one_that_a_stream_takes(tmp_path):
    small_wan_pipeline().save_pretrained(tmp_path)
    pipe = BlockCausalVideoPipeline.from_pretrained(tmp_path, preset="longlive", max_sequence_length=16)
    report = inspect_model(tmp_path, preset="longlive", height=32, width=48, device="cpu")
    with pipe.stream("dance", height=32, width=48) as stream:
        assert report["memory"]["pool_bytes"] == stream.cache.pool_bytes
    counted = {name: part["parameters"] for name, part in report["components"].items()}
    assert counted == {name: sum(p.numel() for p in getattr(pipe, name).parameters()) for name in counted}
    assert report["window"]["sink"]["latent_frames"] == 3


@pytest.mark.parametrize("family", STOCK)
def test_every_family(family, tmp_path):
    STOCK[family]().save_pretrained(tmp_path)
    for weights in tmp_path.rglob("*.safetensors"):
        weights.unlink()
    report = inspect_model(tmp_path, preset="self-forcing", height=64, width=64, device="cpu")
    assert report["memory"]["pool_bytes"] > 0 and report["components"]["transformer"]["parameters"] > 0
    assert report["transformer"]["kv_heads"] <= report["transformer"]["heads"]
    assert report["family"] in describe(report)


def test_a_folder_of_our_own_says_how_it_rolls_out():
    report = inspect_model(embedded_model(), device="cpu")
    assert report["autoregressive"] and report["preset"] == "embedded" and report["memory"]["fits"] == "all of it"
    assert report["attention"]["backend"] == "reference"
    assert json.loads(json.dumps(report)) == report


def test_a_refusing_backend_is_reported_with_its_reason_and_asked_for_it_is_an_error(monkeypatch):
    from bc_diffusers.attention import backends

    picky = backends.Backend("picky", lambda shape: f"it wants heads of 512, not {shape.head_dim}", None)
    monkeypatch.setattr(backends, "BACKENDS", {"picky": picky, **backends.BACKENDS})
    attention = inspect_model(embedded_model(), device="cpu")["attention"]
    assert attention["refused"]["picky"] == "it wants heads of 512, not 64" and attention["backend"] == "reference"
    with pytest.raises(ValueError, match="'picky' cannot serve this call: it wants heads of 512"):
        inspect_model(embedded_model(), device="cpu", attention_backend="picky")


def test_a_repository_by_its_name_fetches_configs_alone(tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--some--wan"
    write(repository / "snapshots" / commit, WAN_13B)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    report = inspect_model("some/wan", preset="longlive", device="cpu", cache_dir=tmp_path, local_files_only=True)
    assert report["model"] == "some/wan" and report["transformer"]["layers"] == 30
    assert report["window"]["window"]["latent_frames"] == 6


def test_weights_that_are_not_marked_autoregressive(wan, monkeypatch, capsys):
    code, out = run(monkeypatch, capsys, wan)
    assert code == 0 and "not marked autoregressive" in out.out and "self-forcing, causvid, longlive" in out.out
    assert "30 layers, 12 heads of 128" in out.out and "K/V cache" not in out.out
    code, out = run(monkeypatch, capsys, wan, "--preset", "self-forcing", "--dtype", "bfloat16")
    assert code == 0 and "not marked autoregressive" in out.out
    assert "18 latent frames = 72 frames = 4.50 s before the chunk stay visible" in out.out
    assert "24 GB: fits with the text encoder offloaded: pipe.enable_model_cpu_offload()" in out.out
    assert "reference (the fastest that serves this model here" in out.out


def test_json_is_one_object(wan, monkeypatch, capsys):
    code, out = run(monkeypatch, capsys, wan, "--json")
    report = json.loads(out.out)
    assert code == 0 and report["rollout"] is None and "self-forcing" in report["presets"]


@pytest.mark.parametrize("arguments,message", [
    (["/nowhere/at/all"], "/nowhere/at/all"),
    (["--preset", "magic"], "unknown preset 'magic'"),
    (["--backend", "magic"], "unknown attention backend 'magic'"),
    (["--height", "65"], "the nearest is 64"),
    (["--device", "cuda"], "no CUDA device"),
])
def test_mistakes_are_one_line(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out = run(monkeypatch, capsys, *arguments)
    assert code == 1 and message in out.err and "Traceback" not in out.err and out.out == ""


def test_models_that_cannot_run_are_refused(tmp_path, wan):
    index = dict(WAN_13B["model_index.json"])
    for change, message in (({"transformer": ["diffusers", "FluxTransformer2DModel"]}, "no block-causal adapter"),
                            ({"transformer": [None, None]}, "no transformer"),
                            ({"transformer_2": ["diffusers", "WanTransformer3DModel"]}, "two transformers")):
        write(wan, {"model_index.json": {**index, **change}})
        with pytest.raises(ValueError, match=message):
            inspect_model(wan, preset="self-forcing", device="cpu")
    write(wan, {"model_index.json": index})
    (wan / "vae" / "config.json").unlink()
    with pytest.raises(OSError):
        inspect_model(wan, preset="self-forcing", device="cpu")
