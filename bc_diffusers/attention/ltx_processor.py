"""Cached self-attention for `LTXAttention`: the rotary embedding runs over all heads before they are split."""

import math

import torch

from .functional import block_causal_attention
from .processor import BlockCausalAttnProcessor
from .rotary import rotate_pairs


class LTXBlockCausalAttnProcessor(BlockCausalAttnProcessor):
    """Self-attention of an `LTXAttention` through the paged cache; each head has rotary angles of its own, so the
    holder's tables are [rows, heads * head_dim / 2]. Without an active forward, the stock processor."""

    def __call__(self, attn, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None = None,
                 attention_mask: torch.Tensor | None = None, image_rotary_emb=None) -> torch.Tensor:
        forward = self.holder.active
        if forward is None:
            return self._stock(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        if attention_mask is not None:
            raise ValueError("cached attention takes no attention_mask: visibility comes from the plan")
        q, k = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(hidden_states))
        cos, sin, group = forward.cos, forward.sin, forward.ulysses
        if group is not None:  # angles differ from head to head: they turn before heads are exchanged for rows
            cos, sin = group.split_tokens(cos[None])[0], group.split_tokens(sin[None])[0]
        q, k = (rotate_pairs(x[:, :, None], cos, sin)[:, :, 0] for x in (q, k))
        q, k, v = (x.unflatten(2, (attn.heads, -1)) for x in (q, k, attn.to_v(hidden_states)))
        if group is not None:
            q, k, v = group.exchange_qkv(q, k, v, forward.plan.num_tokens)
        out = block_causal_attention(q, k, v, forward.plan, self.layer, backend=forward.backend)
        if group is not None:
            out = group.exchange_output(out, hidden_states.shape[1])
        return attn.to_out[1](attn.to_out[0](out.flatten(2).type_as(hidden_states)))


class LTXChunkRotary:
    """cos and sin of a chunk, float32 [tokens, dim / 2] at fixed addresses (angles in float64).

    With g an axis's coordinate as a part of the model's reference extent, frequency i of F = dim // 6 turns by
    theta^(i / (F - 1)) * pi / 2 * (2 g - 1); time, height and width alternate, and the dim % 6 dimensions in front
    are left alone.

    Args:
        dim (`int`): heads * head_dim.
        seconds (`tuple[float, float]`): a latent frame's coordinate is max(0, frame * seconds[0] - seconds[1]).
        row, column (`float`): pixels of a token, down and across.
        extent (`tuple[float, float, float]`): the reference seconds, height and width.
    """

    def __init__(self, dim: int, theta: float, frames: int, height: int, width: int, seconds: tuple[float, float],
                 row: float, column: float, extent: tuple[float, float, float], device: torch.device):
        count = dim // 6
        exponents = torch.linspace(0, 1, count, dtype=torch.float64, device=device)
        self._frequencies = theta ** exponents * (math.pi / 2)
        self._frames = torch.arange(frames, dtype=torch.float64, device=device)
        self._seconds, self._extent = seconds, extent
        shape = (frames, height, width, dim // 2)
        self._grid_cos = torch.ones(shape, dtype=torch.float32, device=device)
        self._grid_sin = torch.zeros_like(self._grid_cos)
        self._skip = dim % 6 // 2
        rows = torch.arange(height, dtype=torch.float64, device=device) * row / extent[1]
        columns = torch.arange(width, dtype=torch.float64, device=device) * column / extent[2]
        self._fill(1, rows[:, None])
        self._fill(2, columns)
        self.cos, self.sin = self._grid_cos.flatten(0, 2), self._grid_sin.flatten(0, 2)
        self.set_start(0)

    def set_start(self, frame: int) -> None:
        """Moves the tables to the chunk whose first latent frame is `frame` (any non-negative number)."""
        step, lead = self._seconds
        seconds = ((self._frames + float(frame)) * step - lead).clamp(min=0)
        self._fill(0, (seconds / self._extent[0])[:, None, None])

    def _fill(self, axis: int, coordinate: torch.Tensor) -> None:
        angles = (2 * coordinate[..., None] - 1) * self._frequencies
        mine = slice(self._skip + axis, None, 3)
        self._grid_cos[..., mine], self._grid_sin[..., mine] = angles.cos().float(), angles.sin().float()
