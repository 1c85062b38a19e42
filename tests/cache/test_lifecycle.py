"""Open, plan, commit, close: what each rule of the cache's life promises, and what every misuse leaves behind."""

import gc
import itertools

import pytest
import torch
from cache_rollout import Rollout, assert_same_state, pool_of, snapshot
from torch.utils._python_dispatch import TorchDispatchMode

from bc_diffusers import BlockCausalKVCache, RolloutSpec, block_causal_attention


SPEC = RolloutSpec(window_tokens=9, max_staged_tokens=6, causal_blocks={6: 1, 3: 2, 2: 1}, max_pin_tokens=7)
REFUSALS = (ValueError, RuntimeError, TypeError, IndexError)


def new_cache(device, layers=2, pool_tokens=None, spec=SPEC, page=4, dtype=torch.float32):
    return BlockCausalKVCache(
        num_layers=layers, num_kv_heads=2, head_dim=8, page_size=page, dtype=dtype, device=device,
        pool_tokens=pool_tokens or BlockCausalKVCache.pool_tokens_for(spec, page_size=page),
    )  # fmt: skip


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


@pytest.fixture
def running(device):
    """24 committed, pin 6, window start 15: two pages evicted, a pass staged and planned."""
    rollout = Rollout(SPEC, 6, page=4, device=device, kv_heads=2, heads=2, head_dim=8)
    for _ in range(4):
        rollout.step(6, 3)
    rollout.forward(6, 6)
    return rollout


# -- misuse: raises at once, names the numbers, leaves the cache as it was ----------------------------------------------

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


def assert_refused(error, numbers):
    message = str(error.value)
    assert message, "an error must say what is wrong"
    missing = [number for number in numbers.split() if number not in message]
    assert not missing, f"{message!r} does not name {missing}"


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


# -- the spec -----------------------------------------------------------------------------------------------------------


def test_specs_are_normalised_hashable_and_equal_by_value():
    a = RolloutSpec(window_tokens=9, max_staged_tokens=6, causal_blocks={6: 1, 3: 2}, max_pin_tokens=7)
    b = RolloutSpec(window_tokens=9, max_staged_tokens=6, causal_blocks={3: 2, 6: 1}, max_pin_tokens=7)
    c = RolloutSpec(window_tokens=9, max_staged_tokens=6, causal_blocks=((6, 1), (3, 2)), max_pin_tokens=7)
    assert a == b == c and hash(a) == hash(b) == hash(c) and len({a, b, c}) == 1
    assert a.causal_blocks == ((3, 2), (6, 1))
    others = [
        RolloutSpec(8, 6, {6: 1, 3: 2}, 7), RolloutSpec(9, 7, {6: 1, 3: 2}, 7), RolloutSpec(9, 6, {6: 1, 3: 1}, 7),
        RolloutSpec(9, 6, {6: 1}, 7), RolloutSpec(9, 6, {6: 1, 3: 2}, 6), RolloutSpec(9, 6, {6: 1, 3: 2}),
    ]  # fmt: skip
    assert len({a, *others}) == 7
    with pytest.raises(AttributeError):
        a.window_tokens = 3


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


# -- plans --------------------------------------------------------------------------------------------------------------


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


# -- commits ------------------------------------------------------------------------------------------------------------


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


# -- the device side ----------------------------------------------------------------------------------------------------


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


# -- CUDA only ----------------------------------------------------------------------------------------------------------


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
