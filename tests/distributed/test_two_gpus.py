"""The cases of ulysses_cases.py on two GPUs, through NCCL: equal to one GPU within rounding."""

import json
import re
from pathlib import Path

import pytest
import torch


HERE = Path(__file__).parent
CASES = re.findall(r"^@(?:cuda_)?case\ndef (\w+)", (HERE / "ulysses_cases.py").read_text(), re.MULTILINE)
pytestmark = [pytest.mark.gpu,
              pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]


@pytest.fixture(scope="module")
def results(launch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_gpus")
    run = launch(2, "ulysses_cases.py", folder, "cuda", cuda=True)
    files = [folder / f"rank{rank}.json" for rank in range(2)]
    assert all(file.exists() for file in files), run.output
    return run, [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("name", CASES)
def test_two_gpus(results, name):
    run, ranks = results
    for rank, result in enumerate(ranks):
        assert name in result, f"an earlier case ended the launch:\n{run.output[-3000:]}"
        assert result[name] == "passed", f"rank {rank}: {result[name]}"


def test_two_gpus_write_the_videos_of_a_list(launch, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle\na blue square\na green triangle\n")
    for ulysses in ("1", "2"):
        run = launch(2, "cases_then_cli.py", tmp_path, "broadcasts", "generate", "--prompts", prompts, "-o",
                     tmp_path / ulysses, "--num-frames", "33", "--ulysses", ulysses, cuda=True)
        assert run.returncode == 0, run.output
        assert len(list((tmp_path / ulysses).glob("000?.mp4"))) == 3
