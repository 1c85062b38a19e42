"""Rotary tables for a chunk's absolute positions, built on the device into fixed-address buffers."""

import torch


def axis_frequencies(dim: int, device: torch.device, theta: float = 10000.0) -> torch.Tensor:
    """float64 [dim / 2]: theta^(-2i / dim), the angular frequencies of one rotary axis (RoFormer)."""
    return theta ** -(torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)


class ChunkRotary:
    """cos and sin of a chunk of latent frames under a (time, height, width) rotary embedding.

    Angles are float64 because positions grow without bound; tables are float32 `[frames * height * width, dim / 2]`
    with fixed addresses, so that a captured graph reads the chunk they were last set to. Only the time axis changes
    from chunk to chunk, and its position enters as a kernel argument: nothing is uploaded.

    Args:
        axes (`tuple[int, int, int]`): rotary dims of time, height and width; they sum to head_dim.
        frames, height, width (`int`): the chunk, in patches.
        dtype (`torch.dtype`, *optional*, defaults to float32): of the tables; float64 rotates in float64.
    """

    def __init__(self, axes: tuple[int, int, int], frames: int, height: int, width: int, device: torch.device,
                 theta: float = 10000.0, dtype: torch.dtype = torch.float32):
        t, h, w = (axis_frequencies(dim, device, theta) for dim in axes)
        self._frequencies, self._steps = t, torch.arange(frames, dtype=torch.float64, device=device)
        shape = (frames, height, width, sum(axes) // 2)
        self._grid_cos = torch.empty(shape, dtype=dtype, device=device)
        self._grid_sin = torch.empty_like(self._grid_cos)
        rows = torch.outer(torch.arange(height, dtype=torch.float64, device=device), h)
        columns = torch.outer(torch.arange(width, dtype=torch.float64, device=device), w)
        first, second = axes[0] // 2, (axes[0] + axes[1]) // 2
        for grid, function in ((self._grid_cos, torch.cos), (self._grid_sin, torch.sin)):
            grid[..., first:second] = function(rows).to(dtype)[None, :, None]
            grid[..., second:] = function(columns).to(dtype)[None, None]
        self._time = first
        self.cos, self.sin = self._grid_cos.flatten(0, 2), self._grid_sin.flatten(0, 2)
        self.set_start(0)

    def set_start(self, frame: int) -> None:
        """Moves the tables to the chunk whose first latent frame is `frame` (any non-negative number)."""
        angles = torch.outer(self._steps + float(frame), self._frequencies)
        self._grid_cos[..., :self._time] = angles.cos().to(self._grid_cos.dtype)[:, None, None]
        self._grid_sin[..., :self._time] = angles.sin().to(self._grid_cos.dtype)[:, None, None]


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates interleaved pairs (x[2i], x[2i+1]) of x [1, rows, heads, dim] by cos, sin [rows, dim / 2]."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).type_as(x)
