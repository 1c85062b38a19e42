"""The strip of cells says exactly which slots hold what."""

import pytest
import torch

from bc_diffusers.cache import BlockCausalKVCache, RolloutSpec
from bc_diffusers.demo.cells import ROLES, cache_cells


def slots_of(cache, begin, end):
    return set(cache._slots(begin, end)) if end > begin else set()


@pytest.mark.parametrize("page,window,chunk,pin", [
    (128, 288, 48, 0), (16, 40, 12, 8), (8, 0, 5, 0), (4, 9, 7, 11), (16, 64, 16, 32), (8, 3, 6, 8)])
def test_cells_agree_with_the_cache_at_every_commit(page, window, chunk, pin):
    spec = RolloutSpec(window_tokens=window, max_staged_tokens=chunk, causal_blocks={chunk: 1}, max_pin_tokens=pin)
    pool = BlockCausalKVCache.pool_tokens_for(spec, page)
    with BlockCausalKVCache(num_layers=1, num_kv_heads=1, head_dim=4, pool_tokens=pool, page_size=page,
                            dtype=torch.float32, device="cpu") as cache:
        cache.open(spec, pin)
        seen = set()
        for step in range(40):
            staged = chunk if step % 2 else 0
            told = cache_cells(cache, staged)
            ids = sorted(cache.page_table())
            found = {role: set() for role in ROLES}
            for index, runs in zip(ids, told["cells"]):
                for role, first, last in runs:
                    assert 0 <= first < last <= page
                    new = {index * page + slot for slot in range(first, last)}
                    assert not new & set().union(*found.values())  # a slot is one thing
                    found[ROLES[role]] |= new
            C, P = cache.committed, min(pin, cache.committed)
            assert found["fixed"] == slots_of(cache, 0, P)
            assert found["window"] == slots_of(cache, cache.window_start, C)
            assert found["staged"] == slots_of(cache, C, C + staged)
            assert told["free"] == sum(not runs for runs in told["cells"])
            assert (told["committed"], told["fixed"], told["window"]) == (C, P, C - cache.window_start)
            seen.add(str(told["cells"]))
            if step % 2:
                cache.plan(chunk, chunk)
                cache.commit()
        assert len(seen) >= 4  # it moves
