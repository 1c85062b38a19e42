"""Wan-style transformer blocks whose residual sums, norms and modulations are one operator each in a cached forward.

The stock block computes them in float32, each step a kernel of its own: at Wan 2.1 1.3B's geometry a quarter of a
forward's time. `residual_norm_` does the same maths with the same roundings in one pass over the data.

A block changes its class, to a subclass of its own stock class; no class is changed. The subclass has the stock name,
by which diffusers finds the blocks that it compiles or keeps on one device, and the stock class's entry in the table
by which its caching hooks find what a block returns.
"""

import contextlib
import dataclasses

import torch
from diffusers.hooks._helpers import TransformerBlockRegistry
from diffusers.models.activations import GELU
from diffusers.models.normalization import FP32LayerNorm
from diffusers.models.transformers import transformer_skyreels_v2, transformer_wan

from .. import ops
from ..attention import processor as processors
from ..attention.plain import is_plain
from ..attention.processor import BlockCausalAttnProcessor


def _has_plain_norms(block, device: torch.device) -> bool:
    """Whether the block's norms are LayerNorms that nothing hooks, the middle one (of the cross-attention) with
    weights or absent."""
    for norm in (block.norm1, block.norm3):
        if type(norm) is not FP32LayerNorm or norm.weight is not None or not is_plain(norm, device):
            return False
    middle = block.norm2
    if type(middle) is FP32LayerNorm:
        return middle.weight is not None and middle.bias is not None and is_plain(middle, device)
    return type(middle) is torch.nn.Identity and is_plain(middle, device)


def _residual_norm(x, delta, gate=None, scale=None, shift=None, scale_offset=1.0, eps=None):
    """(x + delta * gate, its norm); without `eps` there is no norm. x, delta [1, rows, channels]."""
    total, normed = torch.empty_like(x), None if eps is None else torch.empty_like(x)
    ops.residual_norm_(x[0], delta.type_as(x)[0], gate, scale, shift, scale_offset, eps or 0.0, sum_out=total[0],
                       norm_out=None if normed is None else normed[0])
    return total, normed


def _feed_forward(ffn, x: torch.Tensor) -> torch.Tensor:
    """`ffn(x)`, with the GELU in the first product's epilogue (and so of its unrounded result) where that is possible.
    """
    first = ffn.net[0]
    if type(first) is GELU and first.approximate == "tanh" and x.dtype in (torch.bfloat16, torch.float16):
        linear = first.proj
        if (type(linear) is torch.nn.Linear and linear.bias is not None and linear.weight.dtype == x.dtype
                and all(is_plain(module, x.device) for module in (ffn, first, linear))):
            x = torch._addmm_activation(linear.bias, x[0], linear.weight.t(), use_gelu=True)[None]
            for module in ffn.net[1:]:
                x = module(x)
            return x
    return ffn(x)


class _FusedBlock:
    """What both blocks share; `_modulation_of_rows` says how a time embedding of each row is laid out."""

    def _fused(self, hidden_states, encoder_hidden_states, temb, rotary_emb, attention_mask=None):
        x = hidden_states.contiguous()  # SkyReels-V2's patch embedding gives the first block a transposed view
        shift1, scale1, gate1, shift3, scale3, gate3 = self._modulation(temb)
        hidden = torch.empty_like(x)
        ops.residual_norm_(x[0], None, None, scale1, shift1, 1.0, self.norm1.eps, norm_out=hidden[0])
        delta = self.attn1(hidden, None, attention_mask, rotary_emb)
        if type(self.norm2) is torch.nn.Identity:
            x, _ = _residual_norm(x, delta, gate1)
            hidden = x
        else:
            weight, bias = self.norm2.weight[None], self.norm2.bias[None]
            x, hidden = _residual_norm(x, delta, gate1, weight, bias, 0.0, self.norm2.eps)
        delta = self.attn2(hidden, encoder_hidden_states, None, None)
        x, hidden = _residual_norm(x, delta, None, scale3, shift3, 1.0, self.norm3.eps)
        return _residual_norm(x, _feed_forward(self.ffn, hidden), gate3)[0]

    def _modulation(self, temb):
        """Six tensors [1 or rows, channels], float32."""
        if temb.ndim == 4:
            return self._modulation_of_rows(temb[0].float())
        return (self.scale_shift_table + temb.float()).transpose(0, 1).unbind(0)

    def _can_fuse(self, x: torch.Tensor) -> bool:
        processor = self.attn1.processor
        if not isinstance(processor, BlockCausalAttnProcessor) or processor.holder.active is None:
            return False
        if x.device.type not in processors.FUSED_ON or x.dim() != 3 or x.shape[0] != 1:
            return False
        if x.dtype not in ops.checks.FLOATS or x.shape[2] > ops.checks.MOST_CHANNELS:
            return False
        return _has_plain_norms(self, x.device)


class WanTransformerBlock(_FusedBlock, transformer_wan.WanTransformerBlock):
    def forward(self, hidden_states, encoder_hidden_states, temb, rotary_emb):
        forward = self._fused if self._can_fuse(hidden_states) else super().forward
        return forward(hidden_states, encoder_hidden_states, temb, rotary_emb)

    def _modulation_of_rows(self, temb):  # [rows, 6, channels]
        return (self.scale_shift_table + temb).unbind(1)


class SkyReelsV2TransformerBlock(_FusedBlock, transformer_skyreels_v2.SkyReelsV2TransformerBlock):
    def forward(self, hidden_states, encoder_hidden_states, temb, rotary_emb, attention_mask):
        forward = self._fused if self._can_fuse(hidden_states) else super().forward
        return forward(hidden_states, encoder_hidden_states, temb, rotary_emb, attention_mask)

    def _modulation_of_rows(self, temb):  # [6, rows, channels]
        return (self.scale_shift_table[0, :, None] + temb).unbind(0)


_FUSED = {base: fused for fused in (WanTransformerBlock, SkyReelsV2TransformerBlock) for base in fused.__bases__[1:]}


for _base, _fused in _FUSED.items():
    with contextlib.suppress(ValueError):  # SkyReels-V2's has no entry
        TransformerBlockRegistry.register(_fused, dataclasses.replace(TransformerBlockRegistry.get(_base)))


def fuse_block(block: torch.nn.Module) -> None:
    """Gives a stock block the forward above; others are left alone."""
    fused = _FUSED.get(type(block))
    if fused is not None:
        block.__class__ = fused
