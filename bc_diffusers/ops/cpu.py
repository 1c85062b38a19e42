"""CPU implementations of the operators: what runs without a compiled library, and the oracle of the CUDA ones."""

import torch

from . import checks
from .layout import block_causal_layout_ as block_causal_layout_
from .schemas import SCHEMAS, library
from .splits import split_page_lists_ as split_page_lists_


def rotate_rows_(rows, shift):
    checks.rotate_rows_(rows, shift)
    n = rows.shape[-1]
    if rows.numel():
        rows.copy_(rows[..., (torch.arange(n) + shift) % n])


def advance_state_(state, num_tokens, window_tokens, page_size):
    checks.advance_state_(state, num_tokens, window_tokens, page_size)
    before, pin, evicted, _, _ = state.tolist()
    committed = before + num_tokens
    start = max(min(pin, committed), committed - window_tokens)
    now = max(0, start - pin) // page_size
    state.copy_(torch.tensor([committed, pin, now, now - evicted, before]))


def _write(layer_pool, slots, which, values):
    page_size = layer_pool.shape[3]
    layer_pool[slots // page_size, which, :, slots % page_size] = values


def scatter_kv_slots_(k, v, layer_pool, dst, dst2=None, src=None, num_tokens=-1, lengths=None, totals=None,
                      causal_block_size=0):
    checks.scatter_kv_slots_(k, v, layer_pool, dst, dst2, src, num_tokens, lengths, totals, causal_block_size)
    rows = k.shape[0] if num_tokens < 0 else num_tokens
    source = torch.arange(dst.shape[0]) if src is None else src.long()
    real = (source >= 0) & (source < rows)
    for slots in (dst, dst2):
        if slots is None:
            continue
        live = real & (slots >= 0)
        to, row = slots[live].long(), source[live]
        _write(layer_pool, to, 0, k[row])
        _write(layer_pool, to, 1, v[row])
    _write_totals(rows, lengths, totals, causal_block_size)


def _write_totals(num_tokens, lengths, totals, causal_block_size):
    if totals is not None:
        own = (num_tokens - torch.arange(totals.shape[0]) * causal_block_size).clamp(0, causal_block_size)
        totals.copy_(torch.where(own > 0, lengths + own, 0))


def copy_kv_slots_(pool, src, dst):
    checks.copy_kv_slots_(pool, src, dst)
    live = (src >= 0) & (dst >= 0)
    page_size, source, to = pool.shape[4], src[live].long(), dst[live].long()
    if source.numel():
        pool[:, to // page_size, :, :, to % page_size] = pool[:, source // page_size, :, :, source % page_size]


def commit_(pool, state, fixed, ring, sizes, private_pages, pages, lengths, copy_src, copy_dst, scatter_src,
            scatter_dst, scatter_dst2, num_tokens, page_size, window_tokens, copied_slots):
    checks.commit_(pool, state, fixed, ring, sizes, private_pages, pages, lengths, copy_src, copy_dst, scatter_src,
                   scatter_dst, scatter_dst2, num_tokens, page_size, window_tokens, copied_slots)
    advance_state_(state, num_tokens, window_tokens, page_size)
    rotate_rows_(ring, state[3])
    block_causal_layout_(state, fixed, ring, sizes, private_pages, pages, lengths, copy_src, copy_dst, scatter_src,
                         scatter_dst, scatter_dst2, page_size, window_tokens, copied_slots)
    copy_kv_slots_(pool, copy_src, copy_dst)


def merge_partials_(partials, lse, out, num_tokens=-1, keys=None, tail_lse=None):
    checks.merge_partials_(partials, lse, out, num_tokens, keys, tail_lse)
    if partials.shape[0] == 0:
        out.zero_()
        return
    if keys is not None:
        lse = lse.masked_fill((keys[:lse.shape[0]] == 0)[:, None, None], -torch.inf)
    if tail_lse is not None:
        lse = torch.cat([lse, tail_lse.flatten(0, 1)[None, :lse.shape[1]]])
    top = lse.amax(0)
    weight = torch.where(lse.isneginf(), 0, (lse - torch.where(top.isneginf(), 0, top)).exp())
    weight = weight / weight.sum(0).clamp(min=torch.finfo(torch.float32).tiny)
    # An empty partial may hold anything, NaN included: it must not be multiplied by its weight 0.
    values = partials.float().masked_fill((weight == 0)[..., None], 0)
    out.copy_((values * weight[..., None]).sum(0))
    if num_tokens >= 0:
        out[num_tokens:] = 0


def _norm_rope(x, weight, cos, sin, eps, interleaved):
    y = x.float()
    if weight is not None:
        dims = (-1,) if weight.shape[0] == x.shape[2] else (-2, -1)
        y = y * torch.rsqrt(y.square().mean(dims, keepdim=True) + eps)
        y = y * weight.float().view(-1, x.shape[2])
    if cos is not None:
        cos, sin = cos[:, None], sin[:, None]
        a, b = y.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else y.chunk(2, -1)
        turned = (a * cos - b * sin, a * sin + b * cos)
        y = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return y.to(x.dtype)


def qk_norm_rope_(q, k, q_weight, k_weight, cos, sin, eps, interleaved=True, q_out=None, k_out=None, v=None,
                  layer_pool=None, dst=None, dst2=None, num_tokens=-1, lengths=None, totals=None, causal_block_size=0):
    checks.qk_norm_rope_(q, k, q_weight, k_weight, cos, sin, eps, interleaved, q_out, k_out, v, layer_pool, dst, dst2,
                         num_tokens, lengths, totals, causal_block_size)
    new_q = _norm_rope(q, q_weight, cos, sin, eps, interleaved)
    new_k = _norm_rope(k, k_weight, cos, sin, eps, interleaved)
    (q if q_out is None else q_out).copy_(new_q)
    if layer_pool is None:
        (k if k_out is None else k_out).copy_(new_k)
    else:
        scatter_kv_slots_(new_k, v, layer_pool, dst, dst2, None, num_tokens, lengths, totals, causal_block_size)


def residual_norm_(x, delta, gate, scale, shift, scale_offset, eps, sum_out=None, norm_out=None):
    checks.residual_norm_(x, delta, gate, scale, shift, scale_offset, eps, sum_out, norm_out)
    if delta is not None:
        x = sum_out.copy_(x.float() + delta.float() * (1.0 if gate is None else gate.float()))
    if norm_out is not None:
        y = torch.nn.functional.layer_norm(x.float(), x.shape[1:], eps=eps)
        norm_out.copy_(y if scale is None else y * (scale_offset + scale.float()) + shift.float())


for _name in SCHEMAS:
    library.impl(_name, globals()[_name], "CPU")
