"""The command line: `bc-diffusers generate ...`, also `python -m bc_diffusers.cli`."""

import enum
import resource
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from . import embedded_model


app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
                  help="Block-causal (autoregressive) video diffusion.")


class Dtype(enum.StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@app.callback()
def _subcommands() -> None:
    """Block-causal (autoregressive) video diffusion."""


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What the video shows.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The video file: .mp4, .webm or .gif, or a folder for "
                                                                "PNG frames.")] = Path("out.mp4"),
    model: Annotated[str, typer.Option(help="A pipeline folder or repository.  [default: the embedded model]",
                                       show_default=False)] = "",
    preset: Annotated[str | None, typer.Option(help="How the checkpoint rolls out, for folders that do not say it: "
                                                    "self-forcing, causvid, longlive, causal-forcing.")] = None,
    num_frames: Annotated[int | None, typer.Option(min=1, help="Pixel frames.  [default: 81]",
                                                   show_default=False)] = None,
    seconds: Annotated[float | None, typer.Option(help="Length, instead of --num-frames.")] = None,
    height: Annotated[int | None, typer.Option(help="Pixels.  [default: the model's]", show_default=False)] = None,
    width: Annotated[int | None, typer.Option(help="Pixels.  [default: the model's]", show_default=False)] = None,
    fps: Annotated[int | None, typer.Option(min=1, help="Frames a second of the file.  [default: the model's]",
                                            show_default=False)] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same video.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...  [default: cuda where there is one]",
                                               show_default=False)] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="[default: bfloat16 on cuda, float32 on cpu]",
                                                show_default=False)] = None,
) -> None:
    """Write a video while it is generated."""
    if num_frames is not None and seconds is not None:
        raise typer.BadParameter("give either --num-frames or --seconds, not both")
    from .video_io import check_output

    check_output(output)  # a name that cannot be written is better said before the model is loaded
    pipe = _load(model, preset, device, dtype)
    fps = fps or pipe.rollout.default_fps
    if seconds is not None:
        num_frames = max(1, round(seconds * fps))
    num_frames = num_frames or 81

    from .video_io import VideoWriter

    start, first, written = time.perf_counter(), None, 0
    with VideoWriter(output, fps=fps) as writer, pipe.stream(prompt, num_frames=num_frames, height=height, width=width,
                                                             seed=seed) as chunks:
        for chunk in chunks:
            writer.write((chunk.frames * 255).round().astype("uint8"))
            written += len(chunk.frames)
            first = first or time.perf_counter() - start
    total = time.perf_counter() - start
    typer.echo(f"{output}: {written} frames at {written / total:.1f} frames/s (decode included), first after "
               f"{first:.2f} s, peak memory {_peak_memory(pipe.device)}")


@app.command()
def serve(
    model: Annotated[str, typer.Option(help="A pipeline folder or repository.  [default: the embedded model]",
                                       show_default=False)] = "",
    preset: Annotated[str | None, typer.Option(help="How the checkpoint rolls out, for folders that do not say it: "
                                                    "self-forcing, causvid, longlive, causal-forcing.")] = None,
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 lets the network in.")] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="[default: the first free one from 7860 on]",
                                             show_default=False)] = None,
    share: Annotated[bool, typer.Option("--share", help="Also a public address, through Gradio's tunnel.")] = False,
    max_frames: Annotated[int, typer.Option(min=0, help="Pixel frames of one video, endless ones too; 0: no "
                                                        "limit.")] = 7200,
    max_pixels: Annotated[int | None, typer.Option(min=1, help="Height x width.  [default: the model's own]",
                                                   show_default=False)] = None,
    max_streams: Annotated[int, typer.Option(min=1, help="Videos made at the same time; others wait in line.")] = 2,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...  [default: cuda where there is one]",
                                               show_default=False)] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="[default: bfloat16 on cuda, float32 on cpu]",
                                                show_default=False)] = None,
) -> None:
    """Open the web demo: watch a video being made, and steer it."""
    from .demo import Limits, check_installed
    from .demo import serve as start

    check_installed()  # before the model is loaded
    limits = Limits(max_frames=max_frames or None, max_pixels=max_pixels, max_streams=max_streams)
    with start(_load(model, preset, device, dtype), limits, host=host, port=port, share=share) as demo:
        typer.echo(f"The demo is at {demo.url}" + (f" and at {demo.share_url}" if demo.share_url else ""))
        typer.echo("Ctrl-C ends it.")
        demo.wait()


def _load(model: str, preset: str | None, device: str | None, dtype: Dtype | None):
    import torch
    from diffusers.utils import logging

    from .pipelines import BlockCausalVideoPipeline

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or (Dtype.bfloat16 if torch.device(device).type == "cuda" else Dtype.float32)
    logging.disable_progress_bar()
    pipe = BlockCausalVideoPipeline.from_pretrained(model or embedded_model(), preset=preset,
                                                    dtype=getattr(torch, dtype.value))
    return pipe.to(device)


def _peak_memory(device) -> str:
    import torch

    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) / 2**30:.2f} GiB on {torch.cuda.get_device_name(device)}"
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, kilobytes elsewhere
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30:.2f} GiB"


def main() -> None:
    """Runs the command line; a user's mistake ends with one line and exit code 1, a bad option with 2."""
    try:
        app()
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
