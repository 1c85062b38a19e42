"""`bc-diffusers bench ...`: runs the benchmarks of a checkout; each takes its own options (try `--help`)."""

import os
import subprocess
import sys

import typer

from ._layout import PACKAGE


app = typer.Typer(no_args_is_help=True, help="Benchmarks (from a checkout; each has options of its own).")
SCRIPTS = {
    "attention": ("bench_block_causal_attention.py", "Attention of a layer, or of a whole chunk, against dense."),
    "ops": ("bench_ops.py", "Every CUDA operator against its floor and against torch code."),
    "chunk": ("bench_chunk.py", "Whole chunks of a Wan model with random weights."),
}


def _add(name: str, script: str, text: str) -> None:
    @app.command(name, help=text, add_help_option=False,
                 context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
    def run(context: typer.Context) -> None:
        path = PACKAGE.parent / "benchmarks" / script
        if not path.is_file():
            raise FileNotFoundError(f"{path} is not there: benchmarks come with a checkout of the repository, not "
                                    "with the installed package")
        path_list = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(path_list)}
        code = subprocess.run([sys.executable, str(path), *context.args], env=env).returncode
        if code:
            raise typer.Exit(code)


for _name, (_script, _text) in SCRIPTS.items():
    _add(_name, _script, _text)
