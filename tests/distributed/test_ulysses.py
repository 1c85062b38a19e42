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
    assert run.returncode == 0, run.output
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks(results, name):
    for rank, result in enumerate(results):
        assert result[name] == "passed", f"rank {rank}: {result[name]}"


def test_every_case_ran(results):
    assert len(CASES) > 15
    assert all(set(result) == set(CASES) for result in results)
