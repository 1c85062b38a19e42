"""Attention processors that make the stock transformer block-causal, for training and for cached rollouts.

Training runs one stock forward over frames laid out as [clean | noisy | more noisy copies of chunk 0]; a mask lets
a noisy chunk see itself and the clean chunks of its window, a clean chunk itself and the clean ones before it. That
is what a cached rollout sees, where the clean pass writes the history (tests/examples/test_train_tiny.py compares
the two).
"""

import torch
import torch.nn.functional as F


class Flow:
    """What the processors of one transformer share; `mode` is "train" or "cache"."""

    def __init__(self, mode):
        self.mode = mode
        self.mask = None  # training: a flex BlockMask, or a bool tensor [S, S]
        self.flex = None  # flex_attention, where the mask is a BlockMask
        self.text_bias = None  # [B, 1, S or 1, keys] added to the cross-attention's scores
        self.rope = None  # cos, sin: [1, S, 1, head_dim / 2] float32
        self.history = None  # cache mode: per layer (k, v) [B, heads, tokens, head_dim], or None
        self.new = {}  # cache mode: per layer (k, v) of the last forward


def rotate(x, rope):
    cos, sin = rope
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).type_as(x)


class SelfAttention:
    _attention_backend = None
    _parallel_config = None

    def __init__(self, flow, layer):
        self.flow, self.layer = flow, layer

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        flow = self.flow
        x = hidden_states
        q, k, v = attn.norm_q(attn.to_q(x)), attn.norm_k(attn.to_k(x)), attn.to_v(x)
        q, k, v = (x.unflatten(2, (attn.heads, -1)) for x in (q, k, v))
        q, k = rotate(q, flow.rope).to(v.dtype), rotate(k, flow.rope).to(v.dtype)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if flow.mode == "cache":
            flow.new[self.layer] = (k, v)
            if flow.history is not None:
                k, v = (torch.cat([old, x], 2) for old, x in zip(flow.history[self.layer], (k, v)))
            out = F.scaled_dot_product_attention(q, k, v)
        elif flow.flex is not None:
            out = flow.flex(q, k, v, block_mask=flow.mask)
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=flow.mask)
        out = out.transpose(1, 2).flatten(2, 3).type_as(hidden_states)
        return attn.to_out[1](attn.to_out[0](out))


class TextAttention:
    _attention_backend = None
    _parallel_config = None

    def __init__(self, flow):
        self.flow = flow

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        text = encoder_hidden_states
        q, k, v = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(text)), attn.to_v(text)
        q, k, v = (x.unflatten(2, (attn.heads, -1)).transpose(1, 2).to(v.dtype) for x in (q, k, v))
        bias = self.flow.text_bias
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=None if bias is None else bias.to(q.dtype))
        out = out.transpose(1, 2).flatten(2, 3).type_as(hidden_states)
        return attn.to_out[1](attn.to_out[0](out))


def install(transformer, mode):
    """Put the processors on a transformer -> the `Flow` that steers them."""
    flow = Flow(mode)
    for layer, block in enumerate(transformer.blocks):
        block.attn1.set_processor(SelfAttention(flow, layer))
        block.attn2.set_processor(TextAttention(flow))
    return flow


def rope_tables(frames, height, width, head_dim, device):
    """cos, sin [1, tokens, 1, head_dim / 2] for latent frame positions `frames` (1-D) and a grid of height x width
    tokens.

    The channels are shared out among time, height and width as in diffusers' WanRotaryPosEmbed.
    """
    side = 2 * (head_dim // 6)
    angles = []
    positions = (frames.double().cpu(), torch.arange(height).double(), torch.arange(width).double())
    for size, position in zip((head_dim - 2 * side, side, side), positions):
        frequency = 1.0 / 10000.0 ** (torch.arange(0, size, 2).double() / size)
        angles.append(torch.outer(position, frequency))
    shape = (len(frames), height, width, -1)
    t, y, x = angles
    full = torch.cat([t[:, None, None].expand(shape), y[None, :, None].expand(shape), x[None, None].expand(shape)], -1)
    full = full.reshape(1, len(frames) * height * width, 1, -1)
    return full.cos().float().to(device), full.sin().float().to(device)


def visibility(tokens, chunks, window_chunks, extra):
    """mask_mod(b, h, q, k) for [clean: chunks | noisy: chunks | noisy copies of chunk 0: extra], `tokens` a chunk."""
    half = tokens * chunks

    def visible(batch, head, q, k):
        q_clean, k_clean = q < half, k < half
        q_slot, k_slot = q // tokens, k // tokens
        q_chunk = torch.where(q < 2 * half, q_slot % chunks, 0)
        seen = k_clean & (k_slot > q_chunk - window_chunks)
        return (q_clean & seen & (k_slot <= q_chunk)) | (~q_clean & ((seen & (k_slot < q_chunk)) | (k_slot == q_slot)))

    return visible


def dense(mask_mod, tokens, device):
    """A mask_mod as a bool tensor [tokens, tokens]."""
    i = torch.arange(tokens, device=device)
    return mask_mod(0, 0, i[:, None], i[None, :])


def encode_text(text_encoder, ids):
    """ids [B, L] -> embeddings [B, L + 1, D] and the number of words [B]. The last embedding is the zero of
    padding."""
    mask = (ids != 0).long()
    # Ready made, because the encoder makes its own mask with a copy from the host, which a CUDA graph cannot record.
    hide = torch.where(mask.bool(), 0.0, torch.finfo(torch.float32).min)[:, None, None, :]
    hide = hide.expand(-1, 1, ids.shape[1], -1)
    hidden = text_encoder(input_ids=ids, attention_mask=hide).last_hidden_state * mask[..., None]
    return torch.cat([hidden, torch.zeros_like(hidden[:, :1])], 1), mask.sum(1)


def padding_bias(words, length, padded_to):
    """Bias [B, length + 1] that makes one zero embedding count as the `padded_to` [B] - `words` [B] ones of a
    pipeline.

    Pipelines pad the prompt's embeddings with zeros to their `max_sequence_length` and do not mask them. The zeros are
    all the same key, so log(count) on one of them is exact, whatever that length is.
    """
    position = torch.arange(length + 1, device=words.device)[None]
    bias = torch.where(position < words[:, None], 0.0, -1e4)
    count = (padded_to - words).clamp(min=1).float().log()
    return torch.cat([bias[:, :length], count[:, None]], 1)
