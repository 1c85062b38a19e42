"""Open, plan, commit, edit, close: what each rule of the cache's life promises."""

import gc
import itertools

import pytest
import torch
from cache_rollout import assert_same_state, pool_of, snapshot
from cache_small import REFUSALS, SPEC, Launches, assert_closed, assert_refused, attend, kv, new_cache

from bc_diffusers import RolloutSpec, block_causal_attention


def test_specs_are_normalised_hashable_and_equal_by_value():
    a = RolloutSpec(window_tokens=9, max_staged_tokens=6, causal_blocks={6: 1, 3: 2}, max_pin_tokens=7)
    b = RolloutSpec(window_tokens=9, max_staged_tokens=6, causal_blocks={3: 2, 6: 1}, max_pin_tokens=7)
    c = RolloutSpec(window_tokens=9, max_staged_tokens=6, causal_blocks=((6, 1), (3, 2)), max_pin_tokens=7)
    assert a == b == c and hash(a) == hash(b) == hash(c) and len({a, b, c}) == 1
    assert a.causal_blocks == ((3, 2), (6, 1))
    others = [
        RolloutSpec(8, 6, {6: 1, 3: 2}, 7),
        RolloutSpec(9, 7, {6: 1, 3: 2}, 7),
        RolloutSpec(9, 6, {6: 1, 3: 1}, 7),
        RolloutSpec(9, 6, {6: 1}, 7),
        RolloutSpec(9, 6, {6: 1, 3: 2}, 6),
        RolloutSpec(9, 6, {6: 1, 3: 2}),
    ]
    assert len({a, *others}) == 7
    with pytest.raises(AttributeError):
        a.window_tokens = 3


def test_use_before_open_and_after_close_is_refused(device):
    cache = new_cache(device)
    assert_closed(cache, device)
    cache.open(SPEC, pin_tokens=6)
    plan = cache.plan(6, 6)
    attend(plan, device)
    cache.close()
    assert_closed(cache, device)
    with pytest.raises(RuntimeError):
        attend(plan, device)


def test_close_and_shutdown_are_idempotent_and_shutdown_is_final(device):
    cache = new_cache(device)
    cache.close()
    cache.open(SPEC)
    plan = cache.plan(6, 6)
    for _ in range(2):
        cache.close()
    assert cache.pool_bytes > 0, "the pool stays over close"
    for _ in range(2):
        cache.shutdown()
    cache.close()
    assert_closed(cache, device)
    with pytest.raises(RuntimeError):
        cache.open(SPEC)
    with pytest.raises(RuntimeError):
        attend(plan, device)


def test_shutdown_frees_the_pool(device):
    """Also while views of single layers are held elsewhere, by processors for one."""
    cache = new_cache(device)
    cache.open(SPEC)
    views = [cache.layer(i) for i in range(2)]
    address = pool_of(cache).untyped_storage().data_ptr()
    cache.shutdown()
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.device.type == device.type]
    assert not [t.shape for t in tensors if t.untyped_storage().data_ptr() == address] and len(views) == 2


def test_a_context_manager_shuts_down_also_on_errors(device):
    with new_cache(device) as cache:
        cache.open(SPEC)
        cache.plan(6, 6)
    assert_closed(cache, device)
    with pytest.raises(ZeroDivisionError):
        with new_cache(device) as cache:
            cache.open(SPEC)
            raise ZeroDivisionError
    assert_closed(cache, device)
    with pytest.raises(RuntimeError):
        cache.open(SPEC)


def test_planning_touches_nothing_on_the_device(running):
    cache = running.cache
    pairs = [(n, b) for n, (b, m) in itertools.product(range(1, 7), SPEC.causal_blocks) if n <= b * m]
    before = snapshot(cache)
    plans = [cache.plan(*pair) for pair in pairs]
    with Launches() as launches:
        again = [cache.plan(*pair) for pair in pairs]
    assert not launches.names, "planning launches nothing"
    assert_same_state(before, snapshot(cache))
    assert [plan.graph_key for plan in plans] == [plan.graph_key for plan in again]
    assert len({plan.graph_key for plan in plans}) == len(pairs)
    assert [plan.num_tokens for plan in plans] == [n for n, _ in pairs]


def test_a_plan_of_a_closed_spec_is_refused_after_another_open(device):
    cache = new_cache(device)
    cache.open(SPEC)
    plan = cache.plan(6, 6)
    cache.close()
    cache.open(RolloutSpec(window_tokens=8, max_staged_tokens=6, causal_blocks={6: 1}))
    before = snapshot(cache)
    with pytest.raises(RuntimeError):
        attend(plan, device)
    assert_same_state(before, snapshot(cache))


def test_a_layer_view_stands_for_its_number(running, device):
    """Traced code holds views: a Python number read there recompiles for every layer."""
    cache = running.cache
    plan = cache.plan(6, 3)
    q, k, v = torch.randn(3, 1, 6, 2, 8, generator=torch.Generator().manual_seed(5)).to(device)
    for layer in range(2):
        by_number = block_causal_attention(q, k, v, plan, layer=layer, backend="reference")
        by_view = block_causal_attention(q, k, v, plan, layer=cache.layer(layer), backend="reference")
        assert torch.equal(by_number, by_view)
    assert cache.layer(1) is cache.layer(1)
    other = new_cache(device)
    before = snapshot(cache)
    with pytest.raises(ValueError):
        block_causal_attention(q, k, v, plan, layer=other.layer(0), backend="reference")
    with pytest.raises(REFUSALS, match="2"):
        cache.layer(2)
    assert_same_state(before, snapshot(cache))


def test_graph_keys_outlive_commits_close_and_open(device):
    cache = new_cache(device)
    other = RolloutSpec(window_tokens=8, max_staged_tokens=6, causal_blocks={6: 1})
    cache.open(SPEC, pin_tokens=6)
    key = cache.plan(6, 3).graph_key
    hash(key)
    for _ in range(3):
        cache.plan(6, 3)
        cache.commit()
        assert cache.plan(6, 3).graph_key == key
    cache.close()
    cache.open(other)
    keys = {key, cache.plan(6, 6).graph_key, cache.plan(5, 6).graph_key}
    cache.close()
    cache.open(RolloutSpec(9, 6, ((3, 2), (2, 1), (6, 1)), 7), pin_tokens=0)  # equal, another object, another pin
    assert cache.plan(6, 3).graph_key == key
    keys |= {cache.plan(6, 6).graph_key, cache.plan(5, 6).graph_key, cache.plan(5, 3).graph_key}
    assert len(keys) == 6
    assert key[2:] == (6, 3), "(cache, spec, num_tokens, causal_block_size)"


def test_graph_keys_are_never_used_again(device):
    """Not from id(): a cache that is gone leaves its address to the next one."""
    keys = set()
    for _ in range(40):
        cache = new_cache(device, layers=1)
        cache.open(SPEC)
        keys.add(cache.plan(6, 6).graph_key)
        cache.shutdown()
        del cache
        gc.collect(1)
    assert len(keys) == 40


def commit_is_refused(cache, *n, numbers=""):
    before = snapshot(cache)
    with pytest.raises((ValueError, RuntimeError)) as error:
        cache.commit(*n)
    assert_refused(error, numbers)
    assert_same_state(before, snapshot(cache))


def test_commit_needs_a_plan_or_a_write(device):
    cache = new_cache(device).__enter__()
    cache.open(SPEC, pin_tokens=6)
    commit_is_refused(cache)
    commit_is_refused(cache, 6)
    cache.plan(6, 6)
    cache.commit()
    assert cache.committed == 6
    commit_is_refused(cache)  # a plan is committed once
    commit_is_refused(cache, 6)
    cache.zero_values(0, 3)  # an edit is nothing to commit
    cache.write_range(0, 2, kv(device, 4), kv(device, 4))
    commit_is_refused(cache)
    commit_is_refused(cache, 4)
    assert cache.committed == 6


def test_after_a_plan_its_count_is_committed(device):
    cache = new_cache(device)
    cache.open(SPEC, pin_tokens=6)
    cache.plan(5, 6)
    commit_is_refused(cache, 6, numbers="6 5")
    commit_is_refused(cache, 4, numbers="4 5")
    cache.commit(5)  # its own count may be said
    assert cache.committed == 5


def test_the_later_of_plan_and_write_decides(device):
    cache = new_cache(device)
    cache.open(SPEC)
    cache.plan(6, 6)
    cache.write_range(0, 0, kv(device, 4), kv(device, 4))
    commit_is_refused(cache)  # a write: the count must be said
    cache.commit(4)
    assert cache.committed == 4

    cache.write_range(0, 4, kv(device, 4), kv(device, 4))
    cache.plan(6, 3)
    commit_is_refused(cache, 4, numbers="4 6")
    cache.commit()
    assert cache.committed == 10

    cache.plan(5, 3)
    cache.write_range(0, 2, kv(device, 8), kv(device, 8))  # committed tokens only: an edit
    cache.zero_values(10, 12)
    cache.commit()
    assert cache.committed == 15

    cache.plan(6, 3)
    cache.plan(2, 3)  # the later plan
    cache.commit()
    assert cache.committed == 17


@pytest.mark.parametrize("committed, pin, most", [(0, 0, 6), (0, 7, 13), (4, 7, 9), (7, 7, 6), (10, 7, 6), (0, 3, 9)])
def test_a_written_count_exceeds_the_bound_only_by_what_becomes_pinned(device, committed, pin, most):
    cache = new_cache(device)
    cache.open(SPEC, pin_tokens=pin)
    while cache.committed < committed:
        cache.plan(min(6, committed - cache.committed), 6)
        cache.commit()
    cache.write_range(0, committed, kv(device, most), kv(device, most))
    commit_is_refused(cache, most + 1, numbers=str(most + 1))
    commit_is_refused(cache, 0, numbers="0")
    commit_is_refused(cache, -1, numbers="-1")
    cache.commit(most)
    assert cache.committed == committed + most
    assert cache.window_start == max(min(pin, cache.committed), cache.committed - SPEC.window_tokens)


def test_write_range_and_zero_values_reach_exactly_what_is_kept_and_staged(device):
    """Before anything is committed, while the pin fills, full, and after eviction; every bound from both sides."""
    for pin, commits in itertools.product([0, 5, 7], range(5)):
        cache = new_cache(device)
        cache.open(SPEC, pin_tokens=pin)
        for _ in range(commits):
            cache.plan(4, 6)
            cache.commit()
        C = cache.committed
        end = max(C, pin) + 6
        reach = set(range(pin)) | set(range(cache.window_start, end))
        for x in range(-2, end + 3):
            for use in (
                lambda x=x: cache.zero_values(x, x + 1),
                lambda x=x: cache.write_range(1, x, kv(device, 1), kv(device, 1)),
            ):
                if x in reach:
                    use()
                else:
                    with pytest.raises(REFUSALS):
                        use()
                        pytest.fail(f"position {x} of {sorted(reach)} was reached: pin {pin}, committed {C}")


def test_empty_edits_are_harmless(running):
    cache = running.cache
    pool = pool_of(cache).clone()
    for start in (0, 20, 24):
        cache.zero_values(start, start)
        cache.write_range(0, start, kv(running.device, 0), kv(running.device, 0))
    assert torch.equal(pool, pool_of(cache))
    running.commit(6)  # the plan still decides
    running.step(6, 3)


def test_write_staged_takes_the_last_plan_also_after_a_write_past_the_committed_tokens(device):
    cache = new_cache(device)
    cache.open(SPEC)
    plan = cache.plan(6, 6)
    k, v = kv(device, 6), kv(device, 6)
    cache.write_range(0, 0, k[:2], v[:2])
    for layer in range(cache.num_layers):
        cache.write_staged(layer, k, v)
    with pytest.raises(ValueError, match=r"commit\(n\)"):  # the write came later than the plan
        cache.commit()
    cache.commit(plan.num_tokens)
    assert cache.committed == 6
    with pytest.raises(RuntimeError, match="plan"):
        cache.write_staged(0, k, v)
