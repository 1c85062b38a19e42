"""The command line: `bc-diffusers generate ...`, also `python -m bc_diffusers.cli`."""

import json
import resource
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from .cli_bench import app as bench
from .cli_convert import convert
from .cli_info import info
from .cli_model import Dtype, load_pipeline
from .cli_serve import serve


app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
                  help="Block-causal (autoregressive) video diffusion.")


@app.callback()
def _subcommands() -> None:
    """Block-causal (autoregressive) video diffusion."""


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="What the video shows.", show_default=False)] = None,
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
    image: Annotated[Path | None, typer.Option(help="A picture that becomes the first frame.", exists=True,
                                               dir_okay=False, show_default=False)] = None,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No progress bar.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The closing line as one JSON object, for scripts.")] = False,
    prompts: Annotated[Path | None, typer.Option(help="A file of prompts, one a line or JSON lines (prompt, seed, "
                                                      "num_frames, height, width). -o out.mp4 gives out-0000.mp4 ..., "
                                                      "a folder 0000.mp4 ... in it.", show_default=False)] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Leave out videos that are there and whole.")] = False,
    ulysses: Annotated[int, typer.Option(min=1, help="Processes that share a video, under `accelerate launch`.")] = 1,
) -> None:
    """Write a video while it is generated; with --prompts or under `accelerate launch`, many."""
    if num_frames is not None and seconds is not None:
        raise typer.BadParameter("give either --num-frames or --seconds, not both")
    if (prompt is None) == (prompts is None):
        raise typer.BadParameter("give either a prompt or --prompts")
    picture = None if image is None else _open_picture(image)

    from .distributed.batch import BatchOptions, VideoJob, generate_batch, launched, read_jobs

    if prompts is not None or resume or ulysses > 1 or launched():
        if as_json:
            raise typer.BadParameter("--json describes one video of one process, without --prompts and --resume")
        options = BatchOptions(output, prompts is not None, num_frames, seconds, height, width, fps, seed, ulysses,
                               resume, picture)
        generate_batch(lambda: [VideoJob(0, prompt)] if prompts is None else read_jobs(prompts),
                       lambda own: load_pipeline(model, preset, own, dtype, quiet), options, device, typer.echo)
        return
    from .video_io import check_output

    check_output(output)  # a name that cannot be written is better said before the model is loaded
    pipe = load_pipeline(model, preset, device, dtype, quiet)
    fps = fps or pipe.rollout.default_fps
    if seconds is not None:
        num_frames = max(1, round(seconds * fps))
    num_frames = num_frames or 81

    from .video_io import VideoWriter

    start, first = time.perf_counter(), None
    with VideoWriter(output, fps=fps) as writer, pipe.stream(prompt, num_frames=num_frames, height=height, width=width,
                                                             seed=seed, image=picture) as chunks:
        for chunk in chunks:
            writer.write((chunk.frames * 255).round().astype("uint8"))
            first = first or time.perf_counter() - start
    total, written = time.perf_counter() - start, writer.num_frames
    peak, device_name = _peak_memory(pipe.device)
    if as_json:
        typer.echo(json.dumps({
            "output": str(output), "frames": written, "height": writer.size[0], "width": writer.size[1], "fps": fps,
            "chunks": chunk.index + 1, "prompt": prompt, "seed": seed, "seconds": total,
            "frames_per_second": written / total, "first_frame_seconds": first, "peak_memory_bytes": peak,
            "device": device_name}))
        return
    where = "" if device_name == "cpu" else f" on {device_name}"
    typer.echo(f"{output}: {written} frames at {written / total:.1f} frames/s (decode included), first after "
               f"{first:.2f} s, peak memory {peak / 2**30:.2f} GiB{where}")


app.command()(convert)
app.command()(info)
app.command()(serve)
app.add_typer(bench, name="bench")


def _open_picture(path: Path):
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as picture:
            return ImageOps.exif_transpose(picture).convert("RGB")  # the way up that its camera says
    except OSError as error:
        raise ValueError(f"cannot read the picture {path}: {error}") from error


def _peak_memory(device) -> tuple[int, str]:
    """(bytes, name of the device)."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.get_device_name(device)
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, kilobytes elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, device.type


def main() -> None:
    """Runs the command line; a user's mistake ends with one line and exit code 1, a bad option with 2."""
    try:
        app()
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        typer.secho("\n".join([f"error: {error}", *getattr(error, "__notes__", ())]), fg="red", err=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
