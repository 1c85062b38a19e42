"""Draws docs/window.svg: the window slides over a video, and what that looks like in the pages of the cache.

    python examples/draw_window.py docs/window.svg

Nothing is drawn by hand: a small cache is rolled out, every token writes its own position as its value, and the
picture shows what the pool holds then.
"""

import sys
from pathlib import Path

import torch

from bc_diffusers import BlockCausalKVCache, RolloutSpec, block_causal_attention


FRAME, PAGE = 3, 4  # tokens
CHUNK, WINDOW, SINK = 2 * FRAME, 4 * FRAME, FRAME
MOMENTS = (2, 5, 6)  # chunks that are being denoised in the picture
CELL, HIGH = 19, 24  # pixels of a token
COLORS = {"sink": "#f2b84b", "window": "#6ea8e5", "chunk": "#69bd7b", "forgotten": "#dedcd6", "empty": "#ffffff"}
WORDS = {"sink": "sink: never forgotten", "window": "window", "chunk": "the chunk being made",
         "forgotten": "forgotten: no longer read"}


class Drawing:
    """SVG elements, and how far down they reach."""

    def __init__(self):
        self.parts = []

    def text(self, x, y, words, size=13, weight=400, anchor="start", fill="#2c2c30"):
        self.parts.append(f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" '
                          f'text-anchor="{anchor}" fill="{fill}">{words}</text>')

    def box(self, x, y, width, height, fill, stroke="#b8b6b0", line=1.0, radius=0):
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" '
                          f'stroke="{stroke}" stroke-width="{line:g}" rx="{radius}"/>')

    def token(self, x, y, position, role):
        self.box(x, y, CELL, HIGH, COLORS[role])
        if role != "empty":
            self.text(x + CELL / 2, y + HIGH / 2 + 4, position, 10.5, anchor="middle",
                      fill="#9a988f" if role == "forgotten" else "#1d1d20")

    def save(self, path: Path, width: int, height: int) -> None:
        head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
                f'height="{height}" font-family="Helvetica, Arial, sans-serif">')
        background = f'<rect width="{width}" height="{height}" fill="#fcfcfa"/>'
        path.write_text("\n".join([head, background, *self.parts, "</svg>"]) + "\n")


def stage(cache: BlockCausalKVCache, tokens: int):
    """One forward over the next chunk, whose values are their positions + 1 (an empty slot is 0)."""
    plan = cache.plan(tokens, tokens)
    values = torch.arange(cache.committed + 1.0, cache.committed + 1 + tokens).view(1, tokens, 1, 1)
    block_causal_attention(torch.zeros_like(values), values, values, plan, layer=0)
    return plan


def role_of(position: int, start: int) -> str:
    """What the chunk at [start, start + CHUNK) makes of a token."""
    if position >= start:
        return "chunk"
    if position < SINK:
        return "sink"
    return "window" if position >= start - WINDOW else "forgotten"


def draw_moment(drawing: Drawing, cache: BlockCausalKVCache, groups: dict, chunk: int, top: float, left: int) -> None:
    start, pool = cache.committed, cache._pool[0, :, 1, 0, :, 0].long()
    keys = {}  # page -> how many of its slots attention reads
    left_over = cache.causal_block_lengths(CHUNK)[0].item() + CHUNK
    for page in cache.causal_block_pages(CHUNK)[0].tolist():
        keys[page], left_over = min(PAGE, left_over), max(0, left_over - PAGE)
    *_, private = groups.values()
    drawing.text(left, top, f"Chunk {chunk} is being made", 15, 600)
    drawing.text(left, top + 27, "the video")
    for position in range(start + CHUNK):
        drawing.token(left + 74 + position * CELL, top + 10, position, role_of(position, start))
    x, y = left + 74, top + 62
    drawing.text(left, y + 17, "the pages")
    for name, pages in groups.items():
        drawing.text(x, y + HIGH + 18, name, 11, fill="#6b6a66")
        for page in pages:
            for slot, stamp in enumerate(pool[page].tolist()):
                stale = page in private and slot >= keys[page]
                drawing.token(x + slot * CELL, y, stamp - 1,
                              "empty" if stamp == 0 or stale else role_of(stamp - 1, start))
            if keys.get(page):
                drawing.box(x - 1, y - 2, PAGE * CELL + 2, HIGH + 4, "none", "#1d1d20", 2.2, 3)
            x += PAGE * CELL + 9
        x += 14


def main(path: Path) -> None:
    spec = RolloutSpec(window_tokens=WINDOW, max_staged_tokens=CHUNK, causal_blocks={CHUNK: 1}, max_pin_tokens=SINK)
    cache = BlockCausalKVCache(num_layers=1, num_kv_heads=1, head_dim=1, page_size=PAGE, dtype=torch.float32,
                               device="cpu", pool_tokens=BlockCausalKVCache.pool_tokens_for(spec, PAGE))
    cache.open(spec, pin_tokens=SINK)
    fixed, ring, private = cache._open_state().geometry.page_roles()
    groups = {"fixed": fixed, "ring": ring, "private to the chunk: copies of partly visible pages, then its own": (
        private[CHUNK][0])}
    drawing, left, top = Drawing(), 18, 64
    drawing.text(left, 26, f"A window of {WINDOW // FRAME} frames and a sink of {SINK // FRAME} over pages of {PAGE} "
                           f"tokens; {FRAME} tokens a frame, chunks of {CHUNK // FRAME} frames", 13, fill="#6b6a66")
    for chunk in range(MOMENTS[-1] + 1):
        stage(cache, CHUNK)
        if chunk in MOMENTS:
            draw_moment(drawing, cache, groups, chunk, top, left)
            top += 132
        cache.commit()
    x = left
    for role, words in WORDS.items():
        drawing.box(x, top - 16, 14, 14, COLORS[role])
        drawing.text(x + 20, top - 4, words, 12)
        x += 38 + 6.6 * len(words)
    drawing.box(x + 8, top - 17, 22, 16, "none", "#1d1d20", 2.2, 3)
    drawing.text(x + 38, top - 4, "a page that attention reads", 12)
    pages = sum(len(group) for group in groups.values())
    width = left * 2 + 74 + max(pages * (PAGE * CELL + 9) + 14 * len(groups), (MOMENTS[-1] + 1) * CHUNK * CELL)
    drawing.save(path, width, int(top + 12))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/window.svg"))
