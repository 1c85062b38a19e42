"""The command `bc-diffusers convert`."""

import enum
from pathlib import Path
from typing import Annotated

import typer


class WeightDtype(enum.StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def convert(
    checkpoint: Annotated[Path, typer.Argument(help="The checkpoint: .pt, .safetensors, or a diffusers folder.")],
    base: Annotated[str, typer.Option(help="A stock Wan pipeline folder of the same size, in diffusers' format; or "
                                           "the name of such a repository.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The folder to write.")],
    preset: Annotated[str | None, typer.Option(help="How the checkpoint rolls out: self-forcing, causvid, longlive, "
                                                    "causal-forcing, ... (a wrong name lists them).")] = None,
    weights: Annotated[str | None, typer.Option(help="Which weights of a file that holds several.  [default: "
                                                     "generator_ema, else generator]", show_default=False)] = None,
    lora: Annotated[Path | None, typer.Option(help="A LoRA file to merge into the weights.")] = None,
    lora_alpha: Annotated[float | None, typer.Option(help="Its alpha.  [default: what the file says, else the rank]",
                                                     show_default=False)] = None,
    keep_lora: Annotated[bool, typer.Option("--keep-lora", help="Keep the LoRA as an adapter beside the "
                                                                "weights.")] = False,
    dtype: Annotated[WeightDtype | None, typer.Option(help="Cast the weights.  [default: as stored]",
                                                      show_default=False)] = None,
) -> None:
    """Turn an original checkpoint into a pipeline folder."""
    import torch

    from .checkpoints import convert_checkpoint

    cast_to = None if dtype is None else getattr(torch, dtype.value)
    folder = convert_checkpoint(checkpoint, base, output, preset=preset, weights=weights, lora=lora,
                                lora_alpha=lora_alpha, keep_lora=keep_lora, dtype=cast_to)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    typer.echo(f"{folder}: {size / 1e9:.2f} GB; try: bc-diffusers generate \"a cat surfs a wave\" --model {folder}")
