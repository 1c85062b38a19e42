"""BlockCausalAttnProcessor: cached self-attention for diffusers' Wan-style attention modules."""

import torch
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.transformer_cosmos3 import Cosmos3NemotronRMSNorm

from .. import ops
from .backends import paged_backend
from .functional import block_causal_attention, norm_rope_attention
from .holder import CachedForward, PlanHolder
from .plain import is_plain
from .rotary import rotate_pairs


def project_qkv(attn, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v [1, rows, heads * head_dim] of a self-attention module, fused or separate projections."""
    if attn.fused_projections:
        return attn.to_qkv(hidden_states).chunk(3, dim=-1)
    return attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)


# Where norm, rotary embedding and slot write are one operator; elsewhere they are the model's own modules.
FUSED_ON = {"cuda"}
_RMS_NORMS = (torch.nn.RMSNorm, RMSNorm, Cosmos3NemotronRMSNorm)


def has_plain_norms(norm_q, norm_k, device: torch.device) -> bool:
    """Whether q and k are normalised by weights alone, as the fused operator does it, and these are on `device`."""
    for norm in (norm_q, norm_k):
        if type(norm) not in _RMS_NORMS or norm.weight is None or norm.eps is None:
            return False
        if getattr(norm, "bias", None) is not None or not is_plain(norm, device):
            return False
    return norm_q.eps == norm_k.eps


def _norm(norm: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A norm over all heads of x [1, rows, heads, head_dim]."""
    return norm(x.flatten(2, 3)).unflatten(2, x.shape[2:])


class BlockCausalAttnProcessor:
    """Self-attention of a `WanAttention` (Wan 2.1, Wan 2.2, SkyReels-V2) through the paged cache.

    Put on self-attention modules only. While `holder` has no active forward it calls `fallback`, the processor that
    was there before, so the same transformer still serves a stock pipeline bit for bit. `rotary_emb` is ignored in a
    cached forward: the holder's tables are those of the chunk's absolute frame positions.

    Args:
        holder (`PlanHolder`): shared by all processors of the transformer.
        fallback: the stock processor this one replaces.
    """

    # diffusers' set_attention_backend and enable_parallelism write these on processors that have them.
    _attention_backend = None
    _parallel_config = None

    def __init__(self, holder: PlanHolder, fallback):
        self.holder, self.fallback, self.layer = holder, fallback, None
        for name in ("_attention_backend", "_parallel_config"):
            if getattr(fallback, name, None) is not None:
                setattr(self, name, getattr(fallback, name))

    def __call__(self, attn, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None = None,
                 attention_mask: torch.Tensor | None = None, rotary_emb=None, **kwargs) -> torch.Tensor:
        forward = self.holder.active
        if forward is None:
            return self._stock(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb, **kwargs)
        if attention_mask is not None:
            raise ValueError("cached attention takes no attention_mask: visibility comes from the plan")
        backend = paged_backend(self._attention_backend, forward.backend)
        q, k, v = (x.unflatten(2, (attn.heads, -1)) for x in project_qkv(attn, hidden_states))
        if forward.ulysses is not None:
            out = self._among_ranks(attn, q, k, v, forward, backend)
        elif self._can_fuse(attn.norm_q, attn.norm_k, q, forward) and forward.cos.shape[0] == q.shape[1]:
            out = norm_rope_attention(q, k, v, attn.norm_q.weight, attn.norm_k.weight, forward.cos, forward.sin,
                                      attn.norm_q.eps, forward.plan, self.layer, backend)
        else:
            q, k = _norm(attn.norm_q, q), _norm(attn.norm_k, k)
            q, k = rotate_pairs(q, forward.cos, forward.sin), rotate_pairs(k, forward.cos, forward.sin)
            out = block_causal_attention(q, k, v, forward.plan, self.layer, backend=backend)
        out = out.flatten(2, 3).type_as(hidden_states)
        return attn.to_out[1](attn.to_out[0](out))

    def _among_ranks(self, attn, q, k, v, forward: CachedForward, backend: str) -> torch.Tensor:
        """This rank's rows of the attention of all. Norms span all heads, so they come before heads are exchanged for
        rows; the slot write comes after it, so the operator that fuses the two fuses norm and rotation only."""
        group, rows = forward.ulysses, q.shape[1]
        fused = self._can_fuse(attn.norm_q, attn.norm_k, q, forward)
        if fused:
            cos, sin = (group.split_tokens(table[None])[0] for table in (forward.cos, forward.sin))
            ops.qk_norm_rope_(q[0], k[0], attn.norm_q.weight, attn.norm_k.weight, cos, sin, attn.norm_q.eps, True)
        else:
            q, k = _norm(attn.norm_q, q), _norm(attn.norm_k, k)
        q, k, v = group.exchange_qkv(q, k, v, forward.plan.num_tokens)
        if not fused:
            q, k = rotate_pairs(q, forward.cos, forward.sin), rotate_pairs(k, forward.cos, forward.sin)
        out = block_causal_attention(q, k, v, forward.plan, self.layer, backend=backend)
        return group.exchange_output(out, rows)

    def _can_fuse(self, norm_q, norm_k, q: torch.Tensor, forward: CachedForward) -> bool:
        if q.device.type not in FUSED_ON or forward.cos is None:
            return False
        return q.dtype == forward.plan.cache.dtype and has_plain_norms(norm_q, norm_k, q.device)

    def _stock(self, attn, *args, **kwargs):
        # set_attention_backend and enable_parallelism reach this processor, not the one behind it.
        self.fallback._attention_backend = self._attention_backend
        self.fallback._parallel_config = self._parallel_config
        return self.fallback(attn, *args, **kwargs)
