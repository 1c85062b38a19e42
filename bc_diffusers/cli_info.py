"""`bc-diffusers info`: what a model needs and how it would run here, before any weight is loaded."""

import json
from typing import Annotated

import typer


def info(
    model: Annotated[str, typer.Argument(help="A pipeline folder or repository.  [default: the embedded model]",
                                         show_default=False)] = "",
    preset: Annotated[str | None, typer.Option(help="How the checkpoint rolls out, for models that do not say it.")
                      ] = None,
    height: Annotated[int | None, typer.Option(help="Pixels.  [default: the model's]", show_default=False)] = None,
    width: Annotated[int | None, typer.Option(help="Pixels.  [default: the model's]", show_default=False)] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.  [default: bfloat16 on cuda, "
                                                   "float32 on cpu]", show_default=False)] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...  [default: cuda where there is one]",
                                               show_default=False)] = None,
    backend: Annotated[str, typer.Option(help="The attention backend to ask about.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="For scripts: one JSON object.")] = False,
) -> None:
    """Say what a model needs and how it would run here, from its configs alone."""
    import torch
    from diffusers.utils import logging

    from . import embedded_model
    from .info import inspect_model

    if dtype is not None and dtype not in ("float32", "bfloat16", "float16"):
        raise typer.BadParameter(f"--dtype must be float32, bfloat16 or float16, got {dtype!r}")
    logging.set_verbosity_error()
    report = inspect_model(model or embedded_model(), preset=preset, height=height, width=width, device=device,
                           dtype=dtype and getattr(torch, dtype), attention_backend=backend)
    typer.echo(json.dumps(report) if as_json else describe(report))


def describe(report: dict) -> str:
    """The report of `inspect_model` for a reader."""
    lines = [*_model_lines(report)]
    if report["rollout"] is not None:
        lines += [*_rollout_lines(report), *_memory_lines(report), *_attention_lines(report["attention"])]
    if not report["autoregressive"]:
        lines += _unmarked_lines(report)
    wide = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{wide}}  {text}" for name, text in lines)


def size(count: float) -> str:
    """Bytes in the unit that reads best."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def _model_lines(report: dict):
    t = report["transformer"]
    yield "model", report["model"]
    yield "family", f"{report['family']} ({t['class']})"
    heads = f"{t['heads']} heads" if t["heads"] == t["kv_heads"] else f"{t['heads']} / {t['kv_heads']} K/V heads"
    yield "transformer", f"{t['layers']} layers, {heads} of {t['head_dim']}"
    for name, part in report["components"].items():
        yield name.replace("_", " ") + " weights", (f"{size(part['bytes'])} ({part['parameters'] / 1e6:,.1f} M "
                                                    f"parameters in {report['dtype']})")


def _rollout_lines(report: dict):
    rollout, window = report["rollout"], report["window"]
    yield "rollout", (report["preset"] or "its own") + (" (asked for)" if not report["autoregressive"] else "")
    yield "video", f"{report['height']}x{report['width']} at {rollout['default_fps']} frames/s"
    yield "tokens", f"{report['tokens_per_frame']:,} a latent frame, {report['tokens_per_chunk']:,} a chunk"
    yield "chunk", f"{_frames(window['chunk'])}, made in {report['passes_per_chunk']} passes, the last one clean"
    yield "window", f"{_frames(window['window'])} before the chunk stay visible"
    if window["sink"]["latent_frames"]:
        yield "sink", f"the first {_frames(window['sink'])} are never forgotten"
    yield "a chunk sees", f"{_frames(window['visible'])} = {window['visible']['tokens']:,} tokens, itself included"


def _frames(span: dict) -> str:
    count = span["latent_frames"]
    return f"{count} latent frame{'' if count == 1 else 's'} = {span['pixel_frames']} frames = {span['seconds']:.2f} s"


def _memory_lines(report: dict):
    memory, device = report["memory"], report["device"]
    yield "K/V cache", f"{size(memory['pool_bytes'])} (all of it, however long the video is)"
    yield "peak memory", (f"about {size(memory['peak_bytes'])}, with the text encoder offloaded "
                          f"{size(memory['peak_bytes_offloaded'])}")
    total = "" if device["total_bytes"] is None else f", {size(device['total_bytes'])}"
    yield "this device", f"{device['name']}{total}: {_verdict(memory['fits'])}"
    label = f"in {memory['cards_dtype']}"
    for fits in dict.fromkeys(memory["fits_cards"].values()):
        cards = [card for card, verdict in memory["fits_cards"].items() if verdict == fits]
        yield label, f"{', '.join(cards)}: {_verdict(fits)}"
        label = ""


def _verdict(fits: str) -> str:
    return {"all of it": "fits",
            "text encoder offloaded": "fits with the text encoder offloaded: pipe.enable_model_cpu_offload()",
            "no": "does not fit: a smaller size or window, quantized weights, or group offload",
            "unknown": "memory unknown"}[fits]


def _attention_lines(attention: dict):
    why = "the fastest that serves this model here" if attention["requested"] == "auto" else "asked for"
    yield "attention", f"{attention['backend']} ({why}; pages of {attention['page_size']} tokens)"
    for name, reason in attention["refused"].items():
        yield f"  not {name}", reason
    if attention["also_possible"]:
        yield "  also possible", ", ".join(attention["also_possible"])


def _unmarked_lines(report: dict):
    yield "NOTE", "these weights are not marked autoregressive: the folder does not say how they roll out."
    if report["rollout"] is None:
        yield "", f"If they are, say as what with --preset: {', '.join(report['presets'])}."
    yield "", "A bidirectional model gives poor videos with any preset."
