"""Run by `accelerate launch`: cases of ulysses_cases.py, then the command line (one launch costs many seconds).

    accelerate launch ... cases_then_cli.py FOLDER CASE,CASE,... generate ...
"""

import os
import runpy
import sys
from pathlib import Path

from ulysses_cases import run_cases


if __name__ == "__main__":
    folder, names, *arguments = sys.argv[1:]
    run_cases(Path(folder), "cpu" if "ACCELERATE_USE_CPU" in os.environ else "cuda", names.split(","))
    sys.argv[1:] = arguments
    runpy.run_module("bc_diffusers.cli", run_name="__main__")  # as `-m bc_diffusers.cli`
