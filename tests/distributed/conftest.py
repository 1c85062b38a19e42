"""Runs scripts under the real `accelerate launch`."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest


HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@dataclass
class Launch:
    returncode: int
    output: str  # stdout and stderr of all ranks and of the launcher
    ended: float  # time.time()


@pytest.fixture(scope="session")
def launch():
    """`launch(processes, script, folder, *arguments)` -> `Launch`: runs a file of this folder, on the CPU unless
    `cuda=True`."""

    def run(processes: int, script: str, *arguments: object, cuda: bool = False, timeout: float = 300) -> Launch:
        flags = ["--multi_gpu", "--num_processes", str(processes), "--num_machines", "1", "--mixed_precision", "no",
                 "--dynamo_backend", "no", "--main_process_port", "0"]
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        if not cuda:
            environment["ACCELERATE_USE_CPU"] = "1"
        command = [sys.executable, "-m", "accelerate.commands.launch", *flags, str(HERE / script),
                   *map(str, arguments)]
        # Into a file: a pipe would stay open as long as any process that was left behind.
        with (Path(arguments[0]) / f"{script}.log").open("w+") as log:
            done = subprocess.run(command, cwd=ROOT, env=environment, timeout=timeout, stdout=log,
                                  stderr=subprocess.STDOUT)
            ended = time.time()
            log.seek(0)
            return Launch(done.returncode, log.read(), ended)

    return run
