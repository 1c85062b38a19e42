"""The rollout of Self-Forcing, written again from its description: what a converted checkpoint has to reproduce.

A transformer under Wan's own parameter names (so that its state dict is a checkpoint in the original layout) with a
K/V history of its own, and the rollout around it: float64 step to x0, fresh noise between passes, a clean pass at the
context noise level. Roundings follow the original's `inference.py`: everything in the model's dtype, norms and RMS in
float32, rotation in float64. It shares no code with the package.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class WanSize:
    dim: int
    heads: int
    ffn: int
    layers: int
    text_dim: int = 4096
    freq_dim: int = 256
    channels: int = 16
    eps: float = 1e-6


SIZE_1_3B = WanSize(dim=1536, heads=12, ffn=8960, layers=30)
SIZE_14B = WanSize(dim=5120, heads=40, ffn=13824, layers=40)


class RmsNorm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):  # rounded before the weight is applied
        wide = x.float()
        return (wide * (wide.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()).to(x.dtype) * self.weight


class Attention(nn.Module):
    def __init__(self, size: WanSize):
        super().__init__()
        for name in "qkvo":
            setattr(self, name, nn.Linear(size.dim, size.dim))
        self.norm_q, self.norm_k = RmsNorm(size.dim, size.eps), RmsNorm(size.dim, size.eps)
        self.heads = size.heads

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1))

    def queries_keys_values(self, x, context):
        return (self.split(self.norm_q(self.q(x))), self.split(self.norm_k(self.k(context))),
                self.split(self.v(context)))

    def attend(self, q, k, v):
        out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return self.o(out.transpose(1, 2).flatten(2))


class History:
    """K and V of one layer: the sink, then the newest tokens, `limit` in all, the chunk in work included."""

    def __init__(self, limit: int | None, sink: int):
        self.limit, self.sink, self.k, self.v = limit, sink, None, None

    def with_chunk(self, k, v):
        if self.k is None:
            return k, v
        past_k, past_v = self.k, self.v
        surplus = 0 if self.limit is None else max(0, past_k.shape[1] + k.shape[1] - self.limit)
        if surplus:
            past_k, past_v = (torch.cat((t[:, :self.sink], t[:, self.sink + surplus:]), 1) for t in (past_k, past_v))
        return torch.cat((past_k, k), 1), torch.cat((past_v, v), 1)

    def keep(self, k, v):
        self.k, self.v = self.with_chunk(k, v)


class Block(nn.Module):
    def __init__(self, size: WanSize):
        super().__init__()
        self.self_attn, self.cross_attn = Attention(size), Attention(size)
        self.norm3 = nn.LayerNorm(size.dim, size.eps)
        self.ffn = nn.Sequential(nn.Linear(size.dim, size.ffn), nn.GELU("tanh"), nn.Linear(size.ffn, size.dim))
        self.modulation = nn.Parameter(torch.zeros(1, 6, size.dim))
        self.eps = size.eps

    def plain_norm(self, x):
        return F.layer_norm(x, x.shape[-1:], eps=self.eps)

    def forward(self, x, modulation, context, rotation, history: History, commit: bool):
        shift1, scale1, gate1, shift2, scale2, gate2 = (self.modulation + modulation).unsqueeze(2).unbind(1)
        q, k, v = self.self_attn.queries_keys_values(*[self.plain_norm(x) * (1 + scale1) + shift1] * 2)
        q, k = rotate(q, rotation), rotate(k, rotation)
        attended = self.self_attn.attend(q, *history.with_chunk(k, v))
        if commit:
            history.keep(k, v)
        x = x + attended * gate1
        x = x + self.cross_attn.attend(*self.cross_attn.queries_keys_values(self.norm3(x), context))
        return x + self.ffn(self.plain_norm(x) * (1 + scale2) + shift2) * gate2


class Head(nn.Module):
    def __init__(self, size: WanSize):
        super().__init__()
        self.head, self.modulation = nn.Linear(size.dim, 4 * size.channels), nn.Parameter(torch.zeros(1, 2, size.dim))
        self.eps = size.eps

    def forward(self, x, time):
        shift, scale = (self.modulation + time[:, None]).unsqueeze(2).unbind(1)
        return self.head(F.layer_norm(x, x.shape[-1:], eps=self.eps) * (1 + scale) + shift)


def rotate(x, rotation):
    """Interleaved pairs as complex numbers, in float64."""
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * rotation[:, None]).flatten(-2).to(x.dtype)


class Wan(nn.Module):
    """Text to video, patches 1 x 2 x 2, [1, frames, channels, height, width] in and out."""

    def __init__(self, size: WanSize):
        super().__init__()
        self.size, dim = size, size.dim
        self.patch_embedding = nn.Conv3d(size.channels, dim, (1, 2, 2), (1, 2, 2))
        self.text_embedding = nn.Sequential(nn.Linear(size.text_dim, dim), nn.GELU("tanh"), nn.Linear(dim, dim))
        self.time_embedding = nn.Sequential(nn.Linear(size.freq_dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.head = Head(size)

    @torch.no_grad()
    def randomize(self, seed: int):
        """Weights under which every part of the model matters."""
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            fan_in = p[0].numel() if p.ndim > 1 and "modulation" not in name else 1
            noise = torch.randn(p.shape, generator=generator)
            if name.endswith("weight") and p.ndim == 1:
                p.copy_(1 + 0.2 * noise)
            elif "modulation" in name:
                p.copy_(0.3 * noise)
            else:
                p.copy_(noise / fan_in**0.5 if p.ndim > 1 else 0.1 * noise)
        return self

    def rotation(self, first: int, frames: int, height: int, width: int, device):
        """complex128 [tokens, head_dim / 2]: time, height and width have their own share of the pairs."""
        pairs = self.size.dim // self.size.heads // 2
        side = pairs // 3
        axes = []
        for axis, (count, positions) in enumerate(((pairs - 2 * side, torch.arange(first, first + frames)),
                                                   (side, torch.arange(height)), (side, torch.arange(width)))):
            powers = torch.arange(count, dtype=torch.float64) / count
            angles = torch.outer(positions.double(), 10000.0 ** -powers)
            shape = [1, 1, 1, count]
            shape[axis] = len(positions)
            axes.append(torch.polar(torch.ones_like(angles), angles).view(shape).expand(frames, height, width, count))
        return torch.cat(axes, -1).flatten(0, 2).to(device)

    @torch.no_grad()
    def forward(self, video, timestep: float, text, histories: list[History], first_frame: int, commit: bool):
        _, frames, channels, height, width = video.shape
        x = self.patch_embedding(video.transpose(1, 2)).flatten(2).transpose(1, 2)
        half = self.size.freq_dim // 2
        angles = timestep * 10000.0 ** -(torch.arange(half, dtype=torch.float64) / half)
        time = self.time_embedding(torch.cat((angles.cos(), angles.sin()))[None].to(x))
        modulation = self.time_projection(time).unflatten(1, (6, -1))
        context = self.text_embedding(text)
        rotation = self.rotation(first_frame, frames, height // 2, width // 2, x.device)
        for block, history in zip(self.blocks, histories):
            x = block(x, modulation, context, rotation, history, commit)
        x = self.head(x, time).unflatten(1, (frames, height // 2, width // 2)).unflatten(-1, (2, 2, channels))
        return x.permute(0, 1, 6, 2, 4, 3, 5).flatten(5).flatten(3, 4)


def schedule(shift: float) -> torch.Tensor:
    """float32 [1000]: the training noise levels, falling from 1."""
    levels = torch.linspace(1, 0, 1001)[:-1]
    return shift * levels / (1 + (shift - 1) * levels)


def rollout(model: Wan, noise: torch.Tensor, text: torch.Tensor, *, steps=(1000, 750, 500, 250), shift: float = 5.0,
            chunk: int = 3, local_frames: int | None = None, sink_frames: int = 0, context_noise: float = 0.0,
            first_steps=None, warp: bool = True, generator: torch.Generator | None = None,
            negative_text: torch.Tensor | None = None, guidance: float = 1.0) -> torch.Tensor:
    """Latents [1, F, C, h, w] from the noise of all frames.

    Args:
        steps: training steps (1000 is the first); `warp` takes the shifted timestep that stands at that step, else the
            numbers are timesteps themselves.
        local_frames: frames in sight, chunk and sink included; `None`: all.
        first_steps: of the first chunk.
        negative_text, guidance: classifier-free guidance, with a second history.
    """
    levels = schedule(shift)
    timesteps = levels * 1000
    tokens = noise.shape[3] * noise.shape[4] // 4
    limit = None if local_frames is None else local_frames * tokens
    histories, others = ([History(limit, sink_frames * tokens) for _ in model.blocks] for _ in range(2))

    def velocity_of(video, timestep, first, commit=False):
        velocity = model(video, timestep, text, histories, first, commit)
        if negative_text is None:
            return velocity
        negative = model(video, timestep, negative_text, others, first, commit)
        return negative + guidance * (velocity - negative)

    def level(timestep):
        return levels[(timesteps.double() - timestep).abs().argmin()]

    done = []
    for first in range(0, noise.shape[1], chunk):
        video = noise[:, first:first + chunk]
        listed = torch.tensor(first_steps if first_steps is not None and first == 0 else steps)
        listed = (timesteps[1000 - listed] if warp else listed.float()).tolist()
        for index, timestep in enumerate(listed):
            velocity = velocity_of(video, timestep, first)
            clean = (video.double() - level(timestep).double() * velocity.double()).to(video.dtype)
            if index + 1 < len(listed):
                fresh = torch.randn(clean[0].shape, generator=generator, dtype=clean.dtype, device=clean.device)[None]
                following = level(listed[index + 1])
                video = ((1 - following) * clean.float() + following * fresh.float()).to(clean.dtype)
        done.append(clean)
        velocity_of(clean, context_noise, first, commit=True)
    return torch.cat(done, 1)
