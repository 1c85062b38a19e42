"""A contact sheet of a model's videos: a row a prompt, frames from left to right, as one PNG.

    python examples/contact_sheet.py docs/contact_sheet.png
    python examples/contact_sheet.py sheet.png --model DIR --columns 8 --num-frames 81 "first prompt" "second prompt"
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from bc_diffusers import BlockCausalVideoPipeline, embedded_model


PROMPTS = [
    "a large red circle moves right slowly on a white background",
    "a large blue square moves left slowly on a white background",
    "a large yellow triangle moves up slowly on a black background",
]
INK, PAPER, GAP = (40, 40, 46), (252, 252, 250), 12


def frames_of(pipe, prompt: str, num_frames: int, numbers: list[int], seed: int) -> list[np.ndarray]:
    """The frames `numbers` of the video, uint8 [H, W, 3]."""
    video = pipe(prompt, num_frames=num_frames, seed=seed).frames[0]
    return [(video[number] * 255).round().astype("uint8") for number in numbers]


def draw_sheet(rows: list[tuple[str, list[np.ndarray]]], numbers: list[int], tile: int) -> Image.Image:
    """One row a prompt: the prompt, then its frames, each with its number below."""
    columns, label, foot = len(numbers), 22, 20
    height = tile * rows[0][1][0].shape[0] // rows[0][1][0].shape[1]
    row_height = label + height + GAP
    sheet = Image.new("RGB", (GAP + columns * (tile + GAP), GAP + len(rows) * row_height + foot), PAPER)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=14)
    for row, (prompt, frames) in enumerate(rows):
        top = GAP + row * row_height
        draw.text((GAP, top), prompt, INK, font)
        for column, frame in enumerate(frames):
            picture = Image.fromarray(frame).resize((tile, height), Image.Resampling.LANCZOS)
            sheet.paste(picture, (GAP + column * (tile + GAP), top + label))
            box = (GAP + column * (tile + GAP) - 1, top + label - 1, GAP + column * (tile + GAP) + tile,
                   top + label + height)
            draw.rectangle(box, outline=(200, 200, 196))
    for column, number in enumerate(numbers):
        middle = GAP + column * (tile + GAP) + tile / 2
        draw.text((middle, sheet.height - GAP), f"frame {number}", INK, font, anchor="ms")
    return sheet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("prompts", nargs="*", default=PROMPTS)
    parser.add_argument("--model", default=str(embedded_model()))
    parser.add_argument("--columns", type=int, default=6)
    parser.add_argument("--num-frames", type=int, default=81)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tile", type=int, default=144, help="width of a frame on the sheet, in pixels")
    given = parser.parse_intermixed_args()  # options may stand between the output and the prompts
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pipe = BlockCausalVideoPipeline.from_pretrained(given.model).to(device)
    numbers = np.linspace(0, given.num_frames - 1, given.columns).round().astype(int).tolist()
    rows = [(prompt, frames_of(pipe, prompt, given.num_frames, numbers, given.seed + i))
            for i, prompt in enumerate(given.prompts)]
    given.output.parent.mkdir(parents=True, exist_ok=True)
    draw_sheet(rows, numbers, given.tile).save(given.output, optimize=True)
    print(given.output)


if __name__ == "__main__":
    main()
