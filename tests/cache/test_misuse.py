"""Every misuse raises at once, names the numbers, and leaves the cache as it was."""

import pytest
import torch
from cache_rollout import assert_same_state, snapshot
from cache_small import REFUSALS, SPEC, assert_closed, assert_refused, attend, kv, new_cache

from bc_diffusers import BlockCausalKVCache, RolloutSpec


MISUSE = {
    "plan of more tokens than the spec stages": (lambda c, d: c.plan(7, 6), "7 6"),
    "plan of more causal blocks than the spec names": (lambda c, d: c.plan(3, 2), "3 2 1"),
    "plan of a size that the spec does not name": (lambda c, d: c.plan(4, 4), "4 6 3"),
    "plan of nothing": (lambda c, d: c.plan(0, 6), "0"),
    "plan of a negative count": (lambda c, d: c.plan(-6, 6), "-6"),
    "plan of a size 0": (lambda c, d: c.plan(6, 0), "0"),
    "plan of a negative size": (lambda c, d: c.plan(6, -3), "-3"),
    "second open": (lambda c, d: c.open(SPEC, pin_tokens=3), ""),
    "second open of another spec": (lambda c, d: c.open(RolloutSpec(1, 1, {1: 1})), ""),
    "commit of another count than planned": (lambda c, d: c.commit(5), "5 6"),
    "commit of more than planned": (lambda c, d: c.commit(7), "7 6"),
    "commit of nothing": (lambda c, d: c.commit(0), "0"),
    "write below 0": (lambda c, d: c.write_range(0, -1, kv(d, 2), kv(d, 2)), "-1"),
    "write to evicted tokens": (lambda c, d: c.write_range(0, 9, kv(d, 3), kv(d, 3)), "9 12 15"),
    "write from the pin into evicted tokens": (lambda c, d: c.write_range(0, 5, kv(d, 2), kv(d, 2)), "5 7 15"),
    "write from evicted into kept tokens": (lambda c, d: c.write_range(0, 14, kv(d, 3), kv(d, 3)), "14 17 15"),
    "write across all that is evicted": (lambda c, d: c.write_range(0, 4, kv(d, 14), kv(d, 14)), "4 18 15"),
    "write past what may be staged": (lambda c, d: c.write_range(0, 24, kv(d, 7), kv(d, 7)), "24 31 30"),
    "write far out": (lambda c, d: c.write_range(0, 3000, kv(d, 1), kv(d, 1)), "3000"),
    "write of a layer that is not there": (lambda c, d: c.write_range(2, 24, kv(d, 1), kv(d, 1)), "2"),
    "write of a negative layer": (lambda c, d: c.write_range(-1, 24, kv(d, 1), kv(d, 1)), "-1"),
    "write of other head counts": (lambda c, d: c.write_range(0, 24, kv(d, 1, 3), kv(d, 1, 3)), "3 2"),
    "write of another head size": (lambda c, d: c.write_range(0, 24, kv(d, 1, 2, 16), kv(d, 1, 2, 16)), "16 8"),
    "write of K and V of different lengths": (lambda c, d: c.write_range(0, 24, kv(d, 2), kv(d, 3)), "2 3"),
    "write of another dtype": (
        lambda c, d: c.write_range(0, 24, kv(d, 1), kv(d, 1, dtype=torch.bfloat16)),
        "bfloat16 float32",
    ),
    "write from another device": (lambda c, d: c.write_range(0, 24, kv(d, 1), kv("meta", 1)), "meta"),
    "write of a batch": (lambda c, d: c.write_range(0, 24, kv(d, 1)[None], kv(d, 1)[None]), ""),
    "zero_values below 0": (lambda c, d: c.zero_values(-2, 3), "-2"),
    "zero_values of evicted tokens": (lambda c, d: c.zero_values(6, 15), "6 15"),
    "zero_values across the gap": (lambda c, d: c.zero_values(0, 24), "0 24 15"),
    "zero_values past what may be staged": (lambda c, d: c.zero_values(24, 31), "24 31"),
    "zero_values backwards": (lambda c, d: c.zero_values(20, 18), "20 18"),
    "staged write of fewer rows than planned": (lambda c, d: c.write_staged(0, kv(d, 5), kv(d, 5)), "5 6"),
    "staged write of a layer that is not there": (lambda c, d: c.write_staged(2, kv(d, 6), kv(d, 6)), "2"),
    "staged write of other head counts": (lambda c, d: c.write_staged(0, kv(d, 6, 4), kv(d, 6, 4)), "4 2"),
    "staged write of K and V of different lengths": (lambda c, d: c.write_staged(0, kv(d, 6), kv(d, 7)), "6 7"),
    "staged write of another dtype": (
        lambda c, d: c.write_staged(0, kv(d, 6, dtype=torch.float16), kv(d, 6, dtype=torch.float16)),
        "float16 float32",
    ),
    "staged write from another device": (lambda c, d: c.write_staged(0, kv("meta", 6), kv("meta", 6)), "meta"),
    "pages of a size that the spec does not name": (lambda c, d: c.causal_block_pages(4), "4"),
    "lengths of a size that the spec does not name": (lambda c, d: c.causal_block_lengths(1), "1"),
    "attention with an unknown backend": (lambda c, d: attend(c.plan(6, 6), d, backend="fastest"), "fastest"),
    "attention over fewer rows than planned": (lambda c, d: attend(c.plan(6, 6), d, rows=5), "5 6"),
    "attention with other rows in K and V": (lambda c, d: attend(c.plan(6, 6), d, rows=7, kv_rows=6), "7 6"),
    "attention with heads that do not divide": (lambda c, d: attend(c.plan(6, 6), d, q_heads=3), "3 2"),
    "attention with other K/V heads": (lambda c, d: attend(c.plan(6, 6), d, q_heads=4, heads=4), "4 2"),
    "attention with another head size": (lambda c, d: attend(c.plan(6, 6), d, head_dim=16), "16 8"),
    "attention in a layer that is not there": (lambda c, d: attend(c.plan(6, 6), d, layer=2), "2"),
    "attention in another dtype": (lambda c, d: attend(c.plan(6, 6), d, dtype=torch.float64), "float64 float32"),
    "attention from another device": (lambda c, d: attend(c.plan(6, 6), d, where="meta"), "meta"),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_is_refused_and_changes_nothing(running, device, name):
    misuse, numbers = MISUSE[name]
    before = snapshot(running.cache)
    with pytest.raises(REFUSALS) as error:
        misuse(running.cache, device)
    assert_refused(error, numbers)
    assert_same_state(before, snapshot(running.cache))
    running.cache.commit(6)  # what was planned is planned still
    running.reference.commit(6)
    running.step(6, 3)


@pytest.mark.parametrize("pin", [-1, 8, 100])
def test_a_pin_out_of_its_bound_leaves_nothing_open(device, pin):
    cache = new_cache(device)
    with pytest.raises(ValueError) as error:
        cache.open(SPEC, pin_tokens=pin)
    assert_refused(error, f"{pin} 7")
    assert_closed(cache, device)
    cache.open(SPEC, pin_tokens=7)
    assert cache.committed == 0


def test_a_spec_that_does_not_fit_leaves_nothing_open(device):
    large = RolloutSpec(window_tokens=400, max_staged_tokens=6, causal_blocks={6: 1})
    cache = new_cache(device)
    with pytest.raises(ValueError) as error:
        cache.open(large)
    need = BlockCausalKVCache.pool_tokens_for(large, page_size=4)
    assert_refused(error, f"{need // 4}")
    assert_closed(cache, device)
    cache.open(SPEC)
    plan = cache.plan(6, 6)
    attend(plan, device)
    cache.close()
    with pytest.raises(ValueError):
        cache.open(large)
    cache.open(SPEC)
    assert cache.plan(6, 6).graph_key == plan.graph_key


def test_an_open_that_fails_half_way_leaves_nothing_open(device, monkeypatch):
    """Whatever breaks inside: here the allocation of the spec's tensors, or the pool."""
    cache = new_cache(device)

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("no memory left")

    for name in ("tensor", "zeros", "full", "empty"):
        monkeypatch.setattr(torch, name, full)
    with pytest.raises(torch.OutOfMemoryError):
        cache.open(SPEC)
    monkeypatch.undo()
    assert_closed(cache, device)
    cache.open(SPEC, pin_tokens=2)
    attend(cache.plan(6, 3), device)
    cache.commit()
    assert cache.committed == 6


@pytest.mark.parametrize(
    "wrong, numbers",
    [
        ({"num_layers": 0}, "0"),
        ({"num_kv_heads": -2}, "-2"),
        ({"head_dim": 0}, "0"),
        ({"pool_tokens": 0}, "0"),
        ({"pool_tokens": -8}, "-8"),
        ({"page_size": 12}, "12"),
        ({"dtype": torch.int32}, "int32"),
    ],
)
def test_a_cache_that_cannot_be_is_refused(device, wrong, numbers):
    shape = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "pool_tokens": 96, "page_size": 4}
    with pytest.raises(REFUSALS) as error:
        BlockCausalKVCache(**{**shape, "dtype": torch.float32, "device": device, **wrong})
    assert_refused(error, numbers)


@pytest.mark.parametrize(
    "fields, numbers",
    [
        ({"window_tokens": -1}, "-1"),
        ({"max_staged_tokens": 0}, "0"),
        ({"max_staged_tokens": -6}, "-6"),
        ({"max_pin_tokens": -7}, "-7"),
        ({"causal_blocks": {}}, ""),
        ({"causal_blocks": {7: 1}}, "7 6"),
        ({"causal_blocks": {0: 1}}, "0"),
        ({"causal_blocks": {-3: 1}}, "-3"),
        ({"causal_blocks": {3: 0}}, "3 0"),
        ({"causal_blocks": ((3, 1), (3, 2))}, "3"),
        ({"window_tokens": 2.5}, "float"),
        ({"causal_blocks": {1.5: 2}}, "float"),
    ],
)
def test_specs_that_cannot_be_are_refused(fields, numbers):
    good = {"window_tokens": 9, "max_staged_tokens": 6, "causal_blocks": {6: 1}, "max_pin_tokens": 7}
    with pytest.raises((ValueError, TypeError)) as error:
        RolloutSpec(**{**good, **fields})
    assert_refused(error, numbers)
