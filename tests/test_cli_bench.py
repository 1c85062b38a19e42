"""`bc-diffusers bench`: every benchmark is there, is run with its options, and its exit code is passed on."""

import subprocess
import sys
from pathlib import Path

import pytest

from bc_diffusers import cli_bench


ROOT = Path(__file__).resolve().parents[1]


def bench(*args):
    return subprocess.run([sys.executable, "-m", "bc_diffusers.cli", "bench", *args], cwd=ROOT, capture_output=True,
                          text=True)


@pytest.mark.parametrize("name", cli_bench.SCRIPTS)
def test_every_benchmark_explains_itself(name):
    done = bench(name, "--help")
    assert done.returncode == 0 and f"usage: {cli_bench.SCRIPTS[name][0]}" in done.stdout, done.stderr


def test_a_benchmarks_exit_code_is_passed_on():
    done = bench("attention", "--preset", "nobody")
    assert done.returncode == 2 and "invalid choice: 'nobody'" in done.stderr


def test_without_a_checkout_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(cli_bench, "PACKAGE", tmp_path / "bc_diffusers")
    from typer.testing import CliRunner

    result = CliRunner().invoke(cli_bench.app, ["attention"])
    assert isinstance(result.exception, FileNotFoundError) and "checkout" in str(result.exception)
