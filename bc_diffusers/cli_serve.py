"""The command `bc-diffusers serve`."""

from typing import Annotated

import typer

from .cli_model import Dtype, load_pipeline


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
    with start(load_pipeline(model, preset, device, dtype), limits, host=host, port=port, share=share) as demo:
        typer.echo(f"The demo is at {demo.url}" + (f" and at {demo.share_url}" if demo.share_url else ""))
        typer.echo("Ctrl-C ends it.")
        demo.wait()
