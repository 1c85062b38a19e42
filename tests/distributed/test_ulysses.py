"""Ulysses on 2 and 4 ranks gives what one rank gives; the cases themselves are in ulysses_cases.py."""

import json
import re
from pathlib import Path

import pytest


CASES = re.findall(r"^@case\ndef (\w+)", Path(__file__).with_name("ulysses_cases.py").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def results(launch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    run = launch(2, "ulysses_cases.py", folder)
    files = [folder / f"rank{rank}.json" for rank in range(2)]
    assert all(file.exists() for file in files), run.output
    return run, [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks(results, name):
    run, ranks = results
    for rank, result in enumerate(ranks):
        assert name in result, f"an earlier case ended the launch:\n{run.output[-3000:]}"
        assert result[name] == "passed", f"rank {rank}: {result[name]}"


def test_every_case_ran(results):
    assert len(CASES) > 15
    run, ranks = results
    assert run.returncode == 0, run.output
    assert all(set(result) == set(CASES) for result in ranks)
