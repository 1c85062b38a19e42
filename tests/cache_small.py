"""A small cache and the ways to use and misuse it, for the tests of its life."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bc_diffusers import BlockCausalKVCache, RolloutSpec, block_causal_attention


SPEC = RolloutSpec(window_tokens=9, max_staged_tokens=6, causal_blocks={6: 1, 3: 2, 2: 1}, max_pin_tokens=7)
REFUSALS = (ValueError, RuntimeError, TypeError, IndexError)


def new_cache(device, layers=2, pool_tokens=None, spec=SPEC, page=4, dtype=torch.float32):
    return BlockCausalKVCache(
        num_layers=layers,
        num_kv_heads=2,
        head_dim=8,
        page_size=page,
        dtype=dtype,
        device=device,
        pool_tokens=pool_tokens or BlockCausalKVCache.pool_tokens_for(spec, page_size=page),
    )


def kv(cache_device, n, heads=2, head_dim=8, dtype=torch.float32):
    return torch.ones(n, heads, head_dim, dtype=dtype, device=cache_device)


def attend(plan, device, rows=6, layer=0, backend="reference", q_heads=2, kv_rows=None, **of_kv):
    q = kv(device, rows, q_heads)[None]
    k = kv(of_kv.pop("where", device), rows if kv_rows is None else kv_rows, **of_kv)[None]
    return block_causal_attention(q, k, k.clone(), plan, layer=layer, backend=backend)


class Launches(TorchDispatchMode):
    """Names of the operators that reach the device."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def assert_refused(error, numbers):
    message = str(error.value)
    assert message, "an error must say what is wrong"
    missing = [number for number in numbers.split() if number not in message]
    assert not missing, f"{message!r} does not name {missing}"


def assert_closed(cache, device):
    uses = [
        lambda: cache.plan(6, 6),
        lambda: cache.commit(),
        lambda: cache.commit(3),
        lambda: cache.write_range(0, 0, kv(device, 1), kv(device, 1)),
        lambda: cache.write_staged(0, kv(device, 6), kv(device, 6)),
        lambda: cache.zero_values(0, 1),
        lambda: cache.causal_block_pages(6),
        lambda: cache.causal_block_lengths(6),
        lambda: cache.page_table(),
        lambda: cache.committed,
        lambda: cache.window_start,
    ]
    for i, use in enumerate(uses):
        with pytest.raises(RuntimeError):
            use()
            pytest.fail(f"use {i} of a closed cache went through")
