"""Wan with the roundings of the original autoregressive code (Self-Forcing and its family), from the same modules."""

import torch
import torch.nn.functional as F

from ..attention.functional import block_causal_attention
from ..attention.processor import project_qkv
from ..attention.rotary import rotate_pairs
from .wan_adapter import WanAdapter


def _linear(module: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """In the dtype of x: diffusers keeps these weights in float32, the original has them in the model's dtype."""
    return F.linear(x, module.weight.to(x.dtype), module.bias.to(x.dtype))


def _layer_norm(module: torch.nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
    weight, bias = (None if p is None else p.to(x.dtype) for p in (module.weight, module.bias))
    return F.layer_norm(x, module.normalized_shape, weight, bias, module.eps)


def _rms_norm(module: torch.nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
    """Rounded to the model's dtype before the weight is applied."""
    wide = x.float()
    return (wide * (wide.pow(2).mean(-1, keepdim=True) + module.eps).rsqrt()).to(x.dtype) * module.weight.to(x.dtype)


class WanParityAdapter(WanAdapter):
    """diffusers computes modulation, norms, residual sums and the time embedding in float32 and rounds then; the
    original rounds after each of them to the model's dtype. In float32 the two agree; in bfloat16 this adapter agrees
    with the original to the bit wherever the attention kernel does. It runs the transformer's own modules (LoRA layers
    included) in the original's order, and changes none of them. Slower: nothing is fused.
    """

    rotary_dtype = torch.float64

    def velocity(self, latents, timestep, conditions, *, rotary, clean_frames, attention_kwargs):
        model = self.transformer
        if 0 < clean_frames < latents.shape[2]:
            raise ValueError("parity takes one noise level a chunk: it cannot start from a picture")
        if attention_kwargs:
            raise ValueError(f"parity takes no attention_kwargs, got {attention_kwargs}: merge the LoRA, or set its "
                             "scale with set_adapters")
        if getattr(self.holder, "ulysses", None) is not None:
            raise ValueError("parity runs on one device: load the pipeline without sharing the heads")
        hook = getattr(model, "_hf_hook", None)
        if hasattr(hook, "pre_forward"):  # model offload brings the weights in the transformer's own forward
            hook.pre_forward(model)
        if model.scale_shift_table.device != latents.device:  # not brought yet, by a hook that does not run here
            raise ValueError("parity reads the weights directly: it cannot run under sequential or group offload")
        embedder, dtype = model.condition_embedder, self.holder.active.plan.cache.dtype
        _, _, frames, height, width = latents.shape
        patch_t, patch_h, patch_w = model.config.patch_size

        x = model.patch_embedding(latents.to(dtype)).flatten(2).transpose(1, 2)
        half = model.config.freq_dim // 2
        powers = torch.arange(half, dtype=torch.float64, device=x.device) / half
        angles = timestep.double()[:, None] * 10000.0 ** -powers
        time = torch.cat((angles.cos(), angles.sin()), 1).to(dtype)
        time = _linear(embedder.time_embedder.linear_2, F.silu(_linear(embedder.time_embedder.linear_1, time)))
        modulation = embedder.time_proj(F.silu(time)).unflatten(1, (6, -1))
        text = embedder.text_embedder(conditions["prompt_embeds"].to(dtype))
        for block, processor in zip(model.blocks, self.holder.processors):
            x = self._block(block, processor, x, modulation, text)
        shift, scale = (model.scale_shift_table.to(dtype) + time[:, None])[:, :, None].unbind(1)
        x = model.proj_out(_layer_norm(model.norm_out, x) * (1 + scale) + shift)
        x = x.unflatten(1, (frames // patch_t, height // patch_h, width // patch_w))
        x = x.unflatten(-1, (patch_t, patch_h, patch_w, -1)).permute(0, 7, 1, 4, 2, 5, 3, 6)
        return x.flatten(6, 7).flatten(4, 5).flatten(2, 3)

    def _block(self, block, processor, x, modulation, text):
        dtype = x.dtype
        table = (block.scale_shift_table.to(dtype) + modulation)[:, :, None]
        shift1, scale1, gate1, shift2, scale2, gate2 = table.unbind(1)
        hidden = _layer_norm(block.norm1, x) * (1 + scale1) + shift1
        x = x + self._self_attention(block.attn1, processor, hidden) * gate1
        x = x + self._cross_attention(block.attn2, _layer_norm(block.norm2, x), text)
        return x + block.ffn(_layer_norm(block.norm3, x) * (1 + scale2) + shift2) * gate2

    def _self_attention(self, attn, processor, hidden):
        forward = self.holder.active
        q, k, v = project_qkv(attn, hidden)
        q, k, v = (t.unflatten(2, (attn.heads, -1)) for t in (_rms_norm(attn.norm_q, q), _rms_norm(attn.norm_k, k), v))
        q, k = rotate_pairs(q, forward.cos, forward.sin), rotate_pairs(k, forward.cos, forward.sin)
        out = block_causal_attention(q, k, v, forward.plan, processor.layer, backend=forward.backend)
        return attn.to_out[0](out.flatten(2, 3))

    def _cross_attention(self, attn, hidden, text):
        if attn.fused_projections:
            q, (k, v) = attn.to_q(hidden), attn.to_kv(text).chunk(2, dim=-1)
        else:
            q, k, v = attn.to_q(hidden), attn.to_k(text), attn.to_v(text)
        q, k = _rms_norm(attn.norm_q, q), _rms_norm(attn.norm_k, k)
        q, k, v = (t.unflatten(2, (attn.heads, -1)).transpose(1, 2) for t in (q, k, v))
        return attn.to_out[0](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
