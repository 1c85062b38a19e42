"""Cosmos3's rotary embedding: each frequency belongs to one of the axes time, height and width; halves rotate."""

import torch

from .rotary import axis_frequencies


def frequency_axes(head_dim: int, sections: tuple[int, int, int]) -> torch.Tensor:
    """int64 [head_dim / 2]: the axis (0 time, 1 height, 2 width) that each frequency turns with.

    Height and width take every third frequency, from the second and the third on, until each has its section's count;
    time takes all others.
    """
    axes = torch.zeros(head_dim // 2, dtype=torch.long)
    for axis in (1, 2):
        axes[axis:3 * sections[axis]:3] = axis
    return axes


class ChunkMRope:
    """cos and sin of a chunk of latent frames, float32 [tokens, head_dim / 2] at fixed addresses (angles in float64).

    Args:
        sections (`tuple[int, int, int]`): how many frequencies time, height and width have.
        frames, height, width (`int`): the chunk, in patches.
        step (`float`): positions from one latent frame to the next.
    """

    def __init__(self, head_dim: int, sections: tuple[int, int, int], theta: float, frames: int, height: int,
                 width: int, step: float, device: torch.device):
        frequencies, axes = axis_frequencies(head_dim, device, theta), frequency_axes(head_dim, sections).to(device)
        self._time, self._step = (axes == 0).nonzero()[:, 0], step
        self._time_frequencies = frequencies[self._time]
        self._frames = torch.arange(frames, dtype=torch.float64, device=device)
        shape = (frames, height, width, head_dim // 2)
        self._grid_cos = torch.empty(shape, dtype=torch.float32, device=device)
        self._grid_sin = torch.empty_like(self._grid_cos)
        rows = torch.arange(height, dtype=torch.float64, device=device)[:, None, None]
        columns = torch.arange(width, dtype=torch.float64, device=device)[:, None]
        angles = torch.where(axes == 1, rows, columns) * frequencies
        self._grid_cos[:], self._grid_sin[:] = angles.cos().float(), angles.sin().float()
        self.cos, self.sin = self._grid_cos.flatten(0, 2), self._grid_sin.flatten(0, 2)
        self.set_start(0)

    def set_start(self, frame: int) -> None:
        """Moves the tables to the chunk whose first latent frame is `frame` (any non-negative number)."""
        angles = torch.outer((self._frames + float(frame)) * self._step, self._time_frequencies)[:, None, None]
        shape = (*self._grid_cos.shape[:3], -1)
        self._grid_cos.index_copy_(3, self._time, angles.cos().float().expand(shape))
        self._grid_sin.index_copy_(3, self._time, angles.sin().float().expand(shape))


def text_tables(head_dim: int, sections: tuple[int, int, int], theta: float, time: torch.Tensor, space: torch.Tensor
                ) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32 [tokens, head_dim / 2], of text tokens at positions `time` on the time axis and `space` on
    height and width, each float64 [tokens]."""
    axes = frequency_axes(head_dim, sections).to(time.device)
    angles = torch.where(axes == 0, time[:, None], space[:, None]) * axis_frequencies(head_dim, time.device, theta)
    return angles.cos().float(), angles.sin().float()


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the pairs (x[i], x[i + dim / 2]) of x [1, rows, heads, dim] by cos, sin [rows, dim / 2]."""
    a, b = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).type_as(x)
