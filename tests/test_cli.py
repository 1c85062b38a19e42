"""`bc-diffusers generate`, as a user types it."""

import json
import re
import sys

import imageio.v3 as iio
import numpy as np
import pytest
import torch
from small_models import small_wan_pipeline

from bc_diffusers import cli


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["bc-diffusers", *map(str, arguments)])
    try:
        cli.main()
    except SystemExit as end:
        return end.code or 0
    return 0


def test_generate_writes_the_video_and_ends_with_one_line_of_figures(monkeypatch, capsys, tmp_path):
    target = tmp_path / "new" / "circle.mp4"
    assert run(monkeypatch, "generate", "a red circle moves right", "-o", target, "--seconds", "1.5") == 0
    frames = iio.imread(target)
    assert frames.shape == (18, 96, 96, 3)  # 1.5 s at the model's 12 frames a second
    out = capsys.readouterr().out.strip().splitlines()
    assert len(out) == 1
    assert re.search(r"circle.mp4: 18 frames at [\d.]+ frames/s \(decode included\), first after [\d.]+ s, "
                     r"peak memory [\d.]+ GiB", out[0])


def test_same_seed_same_video_and_other_seed_another(monkeypatch, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        given = ["a red circle", "-o", tmp_path / name, "--num-frames", 5, "--seed", seed]
        assert run(monkeypatch, "generate", *given) == 0
    a, b, c = ([p.read_bytes() for p in sorted((tmp_path / name).iterdir())] for name in "abc")
    assert len(a) == 5 and a == b and a != c


def test_a_stock_folder_with_a_preset(monkeypatch, tmp_path):
    small_wan_pipeline().save_pretrained(tmp_path / "stock")
    given = ["generate", "dance", "--model", tmp_path / "stock", "-o", tmp_path / "out.gif", "--height", 32,
             "--width", 48, "--num-frames", 9]
    assert run(monkeypatch, *given) == 1
    assert not (tmp_path / "out.gif").exists()
    assert run(monkeypatch, *given, "--preset", "self-forcing") == 0
    assert iio.imread(tmp_path / "out.gif").shape == (9, 32, 48, 3)


@pytest.mark.parametrize("name", ["out.mp4", "out.webm", "out.gif", "frames"])
def test_the_outputs_name_says_what_it_is_and_json_is_for_scripts(monkeypatch, capsys, tmp_path, name):
    target = tmp_path / name
    assert run(monkeypatch, "generate", "a red circle", "-o", target, "--num-frames", 14, "--json", "--quiet") == 0
    captured = capsys.readouterr()
    line = json.loads(captured.out)
    assert line["output"] == str(target) and line["prompt"] == "a red circle" and line["seed"] == 0
    assert (line["frames"], line["chunks"], line["height"], line["width"], line["fps"]) == (14, 2, 96, 96, 12)
    assert line["seconds"] > line["first_frame_seconds"] > 0 and line["peak_memory_bytes"] > 2**20
    assert line["frames_per_second"] == pytest.approx(14 / line["seconds"]) and "chunk" not in captured.err
    if target.is_dir():
        assert [p.name for p in sorted(target.iterdir())] == [f"frame_{i:06d}.png" for i in range(14)]
    else:
        assert iio.imread(target).shape == (14, 96, 96, 3)


def test_the_progress_bar_names_the_chunks(monkeypatch, capsys, tmp_path):
    assert run(monkeypatch, "generate", "a red circle", "-o", tmp_path / "frames", "--num-frames", 14) == 0
    assert "chunk 2/2" in capsys.readouterr().err


def test_image_is_the_first_frame(monkeypatch, tmp_path):
    picture = np.full((32, 32, 4), (40, 90, 220, 255), np.uint8)
    iio.imwrite(tmp_path / "blue.png", picture)
    target = tmp_path / "frames"
    assert run(monkeypatch, "generate", "a large blue square", "-o", target, "--num-frames", 5, "--image",
               tmp_path / "blue.png") == 0
    first = iio.imread(target / "frame_000000.png")
    assert np.abs(first.mean((0, 1)) - (40, 90, 220)).max() < 25
    (tmp_path / "text.png").write_text("no picture")
    assert run(monkeypatch, "generate", "dance", "-o", tmp_path / "x.gif", "--image", tmp_path / "text.png") == 1
    assert run(monkeypatch, "generate", "dance", "-o", tmp_path / "x.gif", "--image", tmp_path / "none.png") == 2
    assert not (tmp_path / "x.gif").exists()


def test_out_of_memory_is_told_in_words(monkeypatch, capsys, tmp_path):
    def full(*_, **__):
        raise torch.OutOfMemoryError("simulated")

    monkeypatch.setattr("bc_diffusers.pipelines.resources.RolloutResources", full)
    assert run(monkeypatch, "generate", "dance", "-o", tmp_path / "x.gif") == 1
    error = capsys.readouterr().err
    assert "simulated" in error and "GiB of keys and values" in error and "Traceback" not in error


@pytest.mark.parametrize("arguments,message", [
    (["dance", "-o", "x.avi"], "suffix must be one of .mp4, .webm, .gif"),
    (["dance", "--model", "/nowhere/at/all"], "/nowhere/at/all"),
    (["dance", "--preset", "magic"], "unknown preset 'magic'"),
    (["", "-o", "x.mp4"], "`prompt` is empty"),
    (["dance", "--height", "65"], "the nearest is 64"),
])
def test_a_users_mistake_is_one_line_and_exit_code_1(monkeypatch, capsys, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "generate", *arguments) == 1
    captured = capsys.readouterr()
    assert message in captured.err and "Traceback" not in captured.err
    assert list(tmp_path.iterdir()) == []


def test_bad_options_end_with_code_2_and_help_reads_well(monkeypatch, capsys):
    assert run(monkeypatch, "generate", "dance", "--num-frames", 9, "--seconds", 2) == 2
    assert run(monkeypatch, "generate", "dance", "--num-frames", "many") == 2
    capsys.readouterr()
    assert run(monkeypatch, "generate", "--help") == 0
    assert "Write a video while it is generated" in capsys.readouterr().out
