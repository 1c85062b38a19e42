"""Cached self-attention for `Cosmos3PackedMoTAttention`: generation tokens attend to the prompt through the cache."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .backends import paged_backend
from .functional import block_causal_attention, norm_rope_attention
from .mrope import rotate_halves
from .processor import BlockCausalAttnProcessor
from .ulysses import UlyssesGroup


@dataclass
class PromptForward:
    """Active while the prompt runs through the understanding stream. `cos`, `sin` are float32 [tokens, head_dim / 2]
    for the prompt's tokens."""

    cos: torch.Tensor
    sin: torch.Tensor
    ulysses: UlyssesGroup | None = None  # set by `PlanHolder.use`


class Cosmos3BlockCausalAttnProcessor(BlockCausalAttnProcessor):
    """Under a `PromptForward`, the understanding stream attends to itself causally, and what the generation stream
    would read of it (K with its own norm where the model has one, V) is written to the front of the cache. Under a
    `CachedForward` there is no understanding stream (und_len = 0): the generation stream finds the prompt in the
    cache. With neither, the stock processor."""

    def __call__(self, attn, und_seq: torch.Tensor, gen_seq: torch.Tensor, rotary_emb):
        forward = self.holder.active
        if forward is None:
            return self._stock(attn, und_seq, gen_seq, rotary_emb)
        if isinstance(forward, PromptForward):
            return self._prompt(attn, und_seq, forward), gen_seq
        if und_seq.shape[0]:
            raise ValueError(f"a cached forward has no understanding tokens, got {und_seq.shape[0]}: the prompt's K "
                             "and V are in the cache")
        q, k, v = (projection(gen_seq)[None].unflatten(2, (-1, attn.head_dim))
                   for projection in (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj))
        norm_q, norm_k, group = attn.norm_added_q, attn.norm_added_k, forward.ulysses
        fused = self._can_fuse(norm_q, norm_k, q, forward)
        if not fused:
            q, k = norm_q(q), norm_k(k)
        if group is not None:
            q, k, v = group.exchange_qkv(q, k, v, forward.plan.num_tokens)
        backend = paged_backend(self._attention_backend, forward.backend)
        if fused:  # the norms are those of a head: a rank's heads are as good as all
            out = norm_rope_attention(q, k, v, norm_q.weight, norm_k.weight, forward.cos, forward.sin, norm_q.eps,
                                      forward.plan, self.layer, backend, interleaved=False)
        else:
            q, k = rotate_halves(q, forward.cos, forward.sin), rotate_halves(k, forward.cos, forward.sin)
            out = block_causal_attention(q, k, v, forward.plan, self.layer, backend=backend)
        if group is not None:
            out = group.exchange_output(out, gen_seq.shape[0])
        return und_seq, attn.to_add_out(out[0].flatten(1).type_as(gen_seq))

    def _prompt(self, attn, und_seq: torch.Tensor, forward: PromptForward) -> torch.Tensor:
        q, k, v = (projection(und_seq)[None].unflatten(2, (-1, attn.head_dim))
                   for projection in (attn.to_q, attn.to_k, attn.to_v))
        q, k = attn.norm_q(q), attn.norm_k(k)
        k_for_gen = k if attn.k_norm_und_for_gen is None else attn.k_norm_und_for_gen(k)
        q, k, k_for_gen = (rotate_halves(x, forward.cos, forward.sin) for x in (q, k, k_for_gen))
        # The prompt is short, so that every rank of a group computes it whole and keeps its own heads' K and V.
        group = forward.ulysses
        kept = (k_for_gen, v) if group is None else (group.own_heads(k_for_gen), group.own_heads(v))
        self.layer.cache.write_range(self.layer.index, 0, kept[0][0], kept[1][0])
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True,
                                             enable_gqa=q.shape[2] != k.shape[2])
        return attn.to_out(out[0].transpose(0, 1).flatten(1))
