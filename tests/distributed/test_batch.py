"""Many prompts: files and resuming, the same videos by one process and by a grid of four."""

import dataclasses
import json

import pytest
import typer

from bc_diffusers.cli import app
from bc_diffusers.distributed import batch
from bc_diffusers.distributed.bulletin import Bulletin
from bc_diffusers.distributed.grid import ProcessGrid, check_degree
from bc_diffusers.distributed.prompts import VideoJob, read_jobs
from bc_diffusers.pipelines import PRESETS


PROMPTS = """a large red circle moves right slowly on a white background
{"prompt": "a small blue square on black", "seed": 7, "num_frames": 9}

a green triangle
{"prompt": "a yellow circle moves up", "height": 48, "width": 80}
a purple square
"""
SIZE = ("--height", "64", "--width", "64")  # small, for speed


def generate(*arguments) -> None:
    typer.main.get_command(app)(["generate", *map(str, arguments)], standalone_mode=False)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """(prompts file, folder of the videos that one process makes of it)"""
    folder = tmp_path_factory.mktemp("one_process")
    prompts = folder / "prompts.txt"
    prompts.write_text(PROMPTS)
    generate("--prompts", prompts, "-o", folder / "videos", "--num-frames", 17, "--seed", 4, *SIZE)
    return prompts, folder / "videos"


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_names_and_settings(one_process):
    prompts, videos = one_process
    assert sorted(path.name for path in videos.iterdir()) == [f"000{i}.mp4" for i in range(5)]
    fills = batch.BatchOptions(videos, num_frames=17, seed=4, height=64)
    jobs = [fills.fill(job, PRESETS["embedded"]) for job in read_jobs(prompts)]
    assert [(job.seed, job.num_frames) for job in jobs] == [(4, 17), (7, 9), (4, 17), (4, 17), (4, 17)]
    assert [job.height for job in jobs] == [64, 64, 64, 48, 64]
    assert [job.width for job in jobs] == [default := PRESETS["embedded"].default_width] * 3 + [80, default]
    assert all(batch.is_whole(fills.path(job), dataclasses.replace(job, width=80 if job.index == 3 else 64))
               for job in jobs)


def test_single_prompt_is_the_same_video(one_process, tmp_path):
    generate("a green triangle", "-o", tmp_path / "a.mp4", "--num-frames", 17, "--seed", 4, *SIZE)
    assert (tmp_path / "a.mp4").read_bytes() == (one_process[1] / "0002.mp4").read_bytes()


def test_four_processes_resume(launch, one_process, tmp_path):
    """2 data groups of 2 Ulysses ranks; one video is there, one is cut off, and a killed process left something."""
    prompts, reference = one_process
    want, videos = contents(reference), tmp_path / "videos"
    videos.mkdir()
    (videos / "0001.mp4").write_bytes(want["0001.mp4"])
    (videos / "0002.mp4").write_bytes(want["0002.mp4"][:len(want["0002.mp4"]) // 2])
    (videos / ".0003.0123abcd.partial.mp4").write_bytes(b"half")
    there = (videos / "0001.mp4").stat().st_mtime_ns
    cases = ["padded_frame_causal", "eviction_and_sink", "grouped_heads", "fewer_rows_than_ranks", "cache_is_shared",
             "ranks_agree_on_noise", "diffusers_parallelism_in_either_order"]
    run = launch(4, "cases_then_cli.py", tmp_path, ",".join(cases), "generate", "--prompts", prompts, "-o", videos,
                 "--num-frames", "17", "--seed", "4", *SIZE, "--ulysses", "2", "--resume")
    assert run.returncode == 0, run.output
    for rank in range(4):
        results = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert results == dict.fromkeys(cases, "passed"), f"rank {rank}"
    assert contents(videos) == want
    assert (videos / "0001.mp4").stat().st_mtime_ns == there
    assert run.output.count("1 of 5 videos are there already") == 1
    assert run.output.count("by 4 processes, 2 at a time") == 1


@pytest.mark.parametrize("how, shown", [("killed", "SIGKILL"), ("raises", "error: rank 1: the paint ran out")])
def test_a_rank_that_fails_ends_the_launch(launch, tmp_path, how, shown):
    run = launch(2, "cli_with_failure.py", tmp_path, how, "generate", "a red circle", "-o", tmp_path / "out.mp4",
                 "--num-frames", "33", "--ulysses", "2", *SIZE)
    assert run.returncode != 0
    assert run.ended - float((tmp_path / "failed_at").read_text()) < 20
    assert not (tmp_path / "out.mp4").exists()
    assert shown in run.output
    assert run.output.count("error: rank") == run.output.count("the paint ran out") == (how == "raises")


def test_refusals(tmp_path, one_process):
    with pytest.raises(ValueError, match="--ulysses 2 needs several processes: accelerate launch"):
        generate("a circle", "--ulysses", 2, "-o", tmp_path / "a.mp4")
    for arguments in (["a circle", "--prompts", one_process[0]], []):
        with pytest.raises(typer.BadParameter, match="either a prompt or --prompts"):
            generate(*arguments)
    with pytest.raises(ValueError, match=r"videos-0000-0000.avi.*must be one of"):
        generate("--prompts", one_process[0], "-o", tmp_path / "videos-0000.avi")


@pytest.mark.parametrize("text, name, message", [
    ("\n \n", "a.txt", "holds no prompts"),
    ('{"prompt": "a", "size": 3}', "a.txt", "line 1: unknown field 'size'; the fields are prompt, seed"),
    ('a\n{"prompt": "a", "seed": "7"}', "a.txt", "line 2: seed must be a int, got '7'"),
    ('{"prompt": "a", "seed": true}', "a.txt", "seed must be a int, got True"),
    ('{"seed": 7}', "a.txt", 'expected an object with a "prompt"'),
    ('{"prompt": "a"', "a.txt", "line 1 is not JSON"),
    ("a circle", "a.jsonl", "line 1 is not JSON"),
    ('{"prompt": " "}', "a.jsonl", "the prompt is empty"),
    ('{"prompt": "a", "num_frames": 0}', "a.jsonl", "num_frames must be at least 1, got 0"),
])
def test_prompts_files_are_checked(tmp_path, text, name, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError) as error:
        read_jobs(tmp_path / name)
    assert message in str(error.value)


def test_prompts_file(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text('\ufeff first \n\n{"prompt": "second", "width": 80}\n', encoding="utf-8")
    assert read_jobs(path) == [VideoJob(0, "first"), VideoJob(1, "second", width=80)]
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_jobs(path)


def test_output_names(tmp_path):
    job = VideoJob(12, "a circle")
    assert job.output(tmp_path / "clips.webm") == tmp_path / "clips-0012.webm"
    assert job.output(tmp_path / "clips") == tmp_path / "clips" / "0012.mp4"


def test_whole_needs_all_frames_and_size(one_process, tmp_path):
    path = one_process[1] / "0003.mp4"
    job = VideoJob(3, "", 4, 17, 48, 80)
    assert batch.is_whole(path, job)
    for other in (VideoJob(3, "", 4, 18, 48, 80), VideoJob(3, "", 4, 17, 64, 80)):
        assert not batch.is_whole(path, other)
    assert not batch.is_whole(tmp_path / "none.mp4", job)
    folder = tmp_path / "frames"
    folder.mkdir()
    (folder / "frame_000000.png").touch()
    assert batch.is_whole(folder, VideoJob(0, "", 0, 1, 64, 64)) and not batch.is_whole(folder, job)


@pytest.mark.parametrize("degree, processes, heads, kv_heads, message", [
    (3, 4, 12, 12, "does not divide the 4 processes; with 4 processes the degrees that work are 1, 2, 4"),
    (8, 8, 12, 12, "12 attention heads; with 8 processes the degrees that work are 1, 2, 4"),
    (4, 8, 32, 2, "2 K/V heads; with 8 processes the degrees that work are 1, 2"),
    (0, 2, 12, 12, "at least 1, got 0"),
])
def test_degrees_that_do_not_work(degree, processes, heads, kv_heads, message):
    with pytest.raises(ValueError) as error:
        check_degree(degree, processes, heads, kv_heads)
    assert message in str(error.value)


def test_grid_shares_any_count():
    grids = [ProcessGrid(6, rank, 2, "cpu", None) for rank in range(6)]
    shares = [grid.share("abcdefg") for grid in grids]
    assert shares[0::2] == shares[1::2] == [["a", "d", "g"], ["b", "e"], ["c", "f"]]
    assert [grid.has_frames for grid in grids] == [True, False] * 3
    assert [grid.is_main for grid in grids] == [True] + [False] * 5


def test_bulletin_of_one_process_counts_and_raises():
    bulletin = Bulletin(0)
    assert [bulletin.add("videos"), bulletin.add("videos", 2), bulletin.add("frames", 0)] == [1, 3, 0]
    bulletin.wait_for("videos", 3)
    with pytest.raises(KeyError), bulletin.failing_together():
        raise KeyError("as it is")
