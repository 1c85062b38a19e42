"""What kernels read: where it lies, who writes it, and that the host neither asks nor waits."""

import pytest
import torch
from cache_rollout import Rollout, pool_of
from cache_small import SPEC, Launches, assert_closed, attend, new_cache

from bc_diffusers import RolloutSpec


def addresses(cache):
    found = {name: tensor.data_ptr() for name, tensor in cache.device_tensors()}
    for size, _ in SPEC.causal_blocks:
        found[f"pages of {size}"] = cache.causal_block_pages(size).data_ptr()
        found[f"lengths of {size}"] = cache.causal_block_lengths(size).data_ptr()
    return found


def test_nothing_that_kernels_read_moves(device):
    """200 commits, edits, prompts, another spec in between, reopening with another pin."""
    other = RolloutSpec(window_tokens=4, max_staged_tokens=6, causal_blocks={6: 1, 1: 2}, max_pin_tokens=3)
    rollout = Rollout(SPEC, 6, page=4, device=device, layers=1, kv_heads=2, heads=2, head_dim=8)
    cache = rollout.cache
    first = addresses(cache)
    assert len(set(first.values())) > len(SPEC.causal_blocks)
    entries = len(cache.page_table())
    for i in range(200):
        rollout.step(*[(6, 6), (6, 3), (5, 3), (2, 2)][i % 4])
        if i % 10 == 3:
            rollout.write(cache.committed - 2, cache.committed)
            rollout.put(3)
        assert addresses(cache) == first
        assert len(cache.page_table()) == entries
    rollout.reopen(other, 2)
    for _ in range(5):
        rollout.step(6, 6)
    rollout.reopen(SPEC, 1)
    assert addresses(cache) == first
    for _ in range(20):
        rollout.step(6, 3)
        assert addresses(cache) == first


def test_equal_specs_share_their_device_tensors(device):
    cache = new_cache(device)
    cache.open(SPEC)
    first = addresses(cache)
    cache.close()
    cache.open(RolloutSpec(9, 6, ((2, 1), (3, 2), (6, 1)), 7), pin_tokens=5)
    assert addresses(cache) == first


def test_the_pool_has_the_promised_shape_and_tables_are_int32(running):
    cache, pool = running.cache, pool_of(running.cache)
    assert pool.dim() == 6 and pool.shape[0] == 2 and pool.shape[2:] == (2, 2, 4, 8) and pool.is_contiguous()
    for size, count in SPEC.causal_blocks:
        pages, lengths = cache.causal_block_pages(size), cache.causal_block_lengths(size)
        assert pages.dtype == lengths.dtype == torch.int32
        assert pages.shape[0] == count and lengths.shape == (count,)
        assert pages.device == lengths.device == pool.device
        assert 0 <= int(pages.min()) and int(pages.max()) < pool.shape[1]


def commit_launches(device, layers):
    cache = new_cache(device, layers=layers)
    cache.open(SPEC, pin_tokens=6)
    counts = []
    for _ in range(5):
        cache.plan(6, 3)
        with Launches() as launches:
            cache.commit()
        counts.append(launches.names)
    return counts


def test_a_commit_launches_the_same_few_kernels_for_any_number_of_layers(device):
    one, many = commit_launches(device, 1), commit_launches(device, 9)
    assert one == many and all(names == one[0] for names in one)
    assert 1 <= len(one[0]) <= 4, one[0]
    assert not any("_local_scalar_dense" in name or "_to_copy" in name for name in one[0])


def test_host_questions_are_answered_by_the_host(running):
    """The mirror is never read from the device, nor is any counter."""
    cache = running.cache
    with Launches() as launches:
        table = list(cache.page_table())
        answers = cache.committed, cache.window_start, cache.pool_bytes
    assert not launches.names
    assert answers[:2] == (24, 15) and len(set(table)) == len(table)


def test_two_caches_do_not_share_anything(device):
    """A guidance branch is a second cache."""
    one = Rollout(SPEC, 6, page=4, device=device, kv_heads=2, heads=2, head_dim=8, seed=1)
    two = Rollout(SPEC, 3, page=4, device=device, kv_heads=2, heads=2, head_dim=8, seed=2)
    for i in range(6):
        one.step(6, 3)
        if i % 2:
            two.step(5, 6)
    assert not set(addresses(one.cache).values()) & set(addresses(two.cache).values())


@pytest.fixture
def cuda(device):
    if device.type != "cuda":
        pytest.skip("about CUDA streams and graphs")
    return device


def test_first_open_and_first_plan_are_refused_during_capture(cuda):
    cache, other = new_cache(cuda), new_cache(cuda)
    cache.open(SPEC)
    cache.plan(6, 6)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        with pytest.raises(RuntimeError):
            other.open(SPEC)
        with pytest.raises(RuntimeError):
            cache.plan(6, 3)
        plan = cache.plan(6, 6)
        with pytest.raises(RuntimeError, match="captur"):
            attend(plan, cuda)
    assert_closed(other, cuda)
    other.open(SPEC)
    assert cache.plan(6, 3).num_tokens == 6


def test_plan_and_commit_never_synchronise(cuda):
    cache = new_cache(cuda)
    cache.open(SPEC, pin_tokens=6)
    cache.plan(6, 3)
    cache.commit()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            cache.plan(6, 3)
            cache.commit()
            cache.page_table()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert cache.committed == 36
