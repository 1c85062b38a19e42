"""A compact batched rollout for training and scoring: cached history, the re-noise rule, one caption a chunk.

It follows the same rules as `bc_diffusers.BlockCausalVideoPipeline` with its preset `embedded`, but rolls out a whole
batch of videos at once.
"""

from contextlib import nullcontext

import torch
from attention import encode_text, install, padding_bias, rope_tables
from shape_world import CHUNK
from tiny_nets import SIGMAS, WINDOW, shifted


class Roller:
    """One transformer with a K/V history of its window. Not thread safe; one rollout at a time."""

    def __init__(self, transformer, autocast=nullcontext):
        self.transformer, self.autocast = transformer, autocast
        self.keep = WINDOW // CHUNK - 1
        self.start()

    def start(self):
        """Forget the history. Takes the transformer's processors over, so two rollers may share one in turn."""
        self.flow = install(self.transformer, "cache")
        self.past, self.chunk = [], 0
        self._place = None

    def _set_rope(self, x):
        """The tables of this chunk's frames; they change with the chunk, not with the pass."""
        place = (self.chunk, *x.shape[-2:])
        if place != self._place:
            frames = torch.arange(CHUNK) + self.chunk * CHUNK
            head_dim = self.transformer.config.attention_head_dim
            self.flow.rope = rope_tables(frames, x.shape[-2] // 2, x.shape[-1] // 2, head_dim, x.device)
            self._place = place

    def velocity(self, x, sigma, text):
        """x [B, C, CHUNK, h, w] at noise level sigma [B] -> velocity, seen after the history. text = (embeddings,
        bias)."""
        embeddings, bias = text
        self._set_rope(x)
        rows = CHUNK * (x.shape[-2] // 2) * (x.shape[-1] // 2)
        self.flow.text_bias = bias[:, None, None, :].expand(-1, 1, rows, -1)
        with self.autocast():
            return self.transformer(x, sigma * 1000.0, embeddings, return_dict=False)[0].float()

    def commit(self, x, text):
        """The clean pass: x becomes history, the window slides."""
        self.velocity(x, torch.zeros(len(x), device=x.device), text)
        self.past = [*self.past, self.flow.new][-self.keep :]
        layers = range(len(self.transformer.blocks))
        self.flow.history = [tuple(torch.cat([p[i][j] for p in self.past], 2) for j in (0, 1)) for i in layers]
        self.flow.new = {}
        self.chunk += 1

    def denoise(self, x, text, sigmas=SIGMAS, generator=None, visit=None):
        """Noise x -> a clean chunk by the re-noise rule. `visit(pass, x)` sees what each pass is given."""
        levels = shifted(sigmas)
        for i, level in enumerate(levels):
            if visit is not None:
                visit(i, x)
            x = x - level * self.velocity(x, x.new_full((len(x),), level), text)
            if i + 1 < len(levels):
                fresh = torch.randn(x.shape, device=x.device, generator=generator)
                x = torch.lerp(x, fresh, levels[i + 1])
        return x

    def follow(self, x, sigma, text, steps=8):
        """Euler along the model's own flow from noise levels sigma [B] (1 or less) down to 0: the many-step answer."""
        shift = 2.5  # milder than the sampler's: more of the steps at low noise
        u = sigma / (shift - (shift - 1) * sigma)
        for i in range(steps):
            now, then = (shift * v / (1 + (shift - 1) * v) for v in (u * (1 - i / steps), u * (1 - (i + 1) / steps)))
            x = x + (then - now)[:, None, None, None, None] * self.velocity(x, now, text)
        return x


def text_inputs(text_encoder, ids, padded_to=32, autocast=nullcontext):
    """ids [B, L] -> (embeddings, bias) as `Roller` takes them; `padded_to` is an int or an int64 tensor [B]."""
    with autocast():
        embeddings, words = encode_text(text_encoder, ids)
    if not torch.is_tensor(padded_to):
        padded_to = torch.full_like(words, padded_to)
    return embeddings, padding_bias(words, ids.shape[1], padded_to)


@torch.no_grad()
def generate(roller, texts, chunks, size, channels=8, sigmas=SIGMAS, generator=None):
    """`texts(chunk)` -> text inputs; returns normalised latents [B, channels, CHUNK * chunks, size, size]."""
    roller.start()
    out = []
    for chunk in range(chunks):
        text = texts(chunk)
        noise = torch.randn(len(text[0]), channels, CHUNK, size, size, device=text[0].device, generator=generator)
        x = roller.denoise(noise, text, sigmas, generator)
        roller.commit(x, text)
        out.append(x)
    roller.start()
    return torch.cat(out, 2)
