"""How large a pool must be: the formulas, and rollouts in pools that have not one page to spare."""

import itertools

import pytest
import torch
from cache_rollout import Rollout, pool_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bc_diffusers import BlockCausalKVCache, RolloutSpec


def ceil(a, b):
    return -(-a // b)


def pages_needed(spec, page):
    """Pages of one spec: filler, fixed, ring, then per causal block those that can hold copies, and one set of pages
    for own tokens that the sizes share."""
    S, W, N, pin = page, spec.window_tokens, spec.max_staged_tokens, spec.max_pin_tokens
    tail = min(S - 1, pin)
    edge = W % S + S if W % S <= S - 2 else S - 1
    lead = ceil(tail + edge, S)
    private = {b: ceil(tail + edge + b, S) for b, _ in spec.causal_blocks}
    shared = max(m * (private[b] - lead) for b, m in spec.causal_blocks)
    return 1 + ceil(pin, S) + ceil(W + S - 1 + N, S) + sum(m * lead for _, m in spec.causal_blocks) + shared


def pool_pages(spec, page):
    """Pages of a pool that also opens every spec with a smaller window: fewer tokens may need more copied slots, when
    the window's remainder by the page size is larger. It repeats with the page size."""
    windows = range(max(0, spec.window_tokens - page + 1), spec.window_tokens + 1)
    fields = spec.max_staged_tokens, spec.causal_blocks, spec.max_pin_tokens
    return max(pages_needed(RolloutSpec(window, *fields), page) for window in windows)


SMALL_SPECS = [
    RolloutSpec(window_tokens=window, max_staged_tokens=staged, causal_blocks=sizes, max_pin_tokens=pin)
    for window, pin, (staged, sizes) in itertools.product(
        range(0, 11),
        range(0, 6),
        [(1, {1: 1}), (3, {3: 1}), (3, {1: 3}), (4, {4: 1, 2: 2}), (5, {5: 1, 2: 3}), (6, {2: 2, 3: 2})],
    )
]


@pytest.mark.parametrize("page", [1, 2, 4, 8, 16, 128])
def test_pool_tokens_follow_the_formula(page):
    for spec in SMALL_SPECS:
        assert BlockCausalKVCache.pool_tokens_for(spec, page_size=page) == pool_pages(spec, page) * page, spec


@pytest.mark.parametrize(
    "spec, layers, kv_heads, need",
    [
        (RolloutSpec(28080, 4680, {4680: 1, 1560: 3}), 30, 12, 302),  # Wan 2.1 1.3B
        (RolloutSpec(37430, 1576, {1576: 1, 394: 4}, 512), 36, 8, 338),  # Cosmos3
    ],
)
def test_pools_of_real_models(spec, layers, kv_heads, need):
    """Worked out by hand for page 128; a smaller window may cost up to one page a causal block more."""
    assert pages_needed(spec, 128) == need
    tokens = BlockCausalKVCache.pool_tokens_for(spec, page_size=128)
    assert need * 128 <= tokens <= (need + sum(m for _, m in spec.causal_blocks)) * 128
    for dtype, size in [(torch.bfloat16, 2), (torch.float32, 4)]:
        taken = BlockCausalKVCache.pool_bytes_for(
            spec, page_size=128, num_layers=layers, num_kv_heads=kv_heads, head_dim=128, dtype=dtype
        )
        exact = tokens * 2 * layers * kv_heads * 128 * size
        assert exact <= taken <= exact + 2 * 2**20, "rounded at most to the allocator's 2 MiB"


def test_pool_bytes_are_what_was_announced(device):
    spec = RolloutSpec(window_tokens=50, max_staged_tokens=12, causal_blocks={12: 1, 4: 3}, max_pin_tokens=7)
    shape = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 16, "dtype": torch.bfloat16}
    tokens = BlockCausalKVCache.pool_tokens_for(spec, page_size=8)
    with BlockCausalKVCache(**shape, pool_tokens=tokens, page_size=8, device=device) as cache:
        cache.open(spec)
        pool = pool_of(cache)
        exact = tokens * 2 * 3 * 2 * 16 * 2
        assert pool.shape == (3, tokens // 8, 2, 2, 8, 16) and pool.numel() * pool.element_size() == exact
        if device.type == "cpu":
            assert cache.pool_bytes == exact
        else:
            assert exact <= cache.pool_bytes <= exact + 20 * 2**20
            assert cache.pool_bytes == BlockCausalKVCache.pool_bytes_for(spec, page_size=8, **shape)


@pytest.mark.parametrize("page", [4, 16])
def test_a_pool_one_page_short_is_refused_and_names_both_sizes(device, page):
    spec = RolloutSpec(window_tokens=21, max_staged_tokens=6, causal_blocks={6: 1, 3: 2}, max_pin_tokens=5)
    need = pages_needed(spec, page)
    cache = BlockCausalKVCache(
        num_layers=1,
        num_kv_heads=1,
        head_dim=8,
        pool_tokens=(need - 1) * page,
        page_size=page,
        dtype=torch.float32,
        device=device,
    )
    with pytest.raises(ValueError) as error:
        cache.open(spec, pin_tokens=5)
    assert str(need) in str(error.value) and str(need - 1) in str(error.value)
    cache.open(RolloutSpec(window_tokens=1, max_staged_tokens=2, causal_blocks={2: 1}))


@st.composite
def nested_specs(draw):
    """(a spec, one whose every bound is at most as large)."""
    sizes = draw(st.dictionaries(st.integers(1, 20), st.integers(1, 4), min_size=1, max_size=3))
    staged = max(sizes) + draw(st.integers(0, 9))
    large = RolloutSpec(draw(st.integers(0, 70)), staged, sizes, draw(st.integers(0, 40)))
    fewer = {b: draw(st.integers(1, m)) for b, m in sizes.items() if draw(st.booleans())} or sizes
    least = max(fewer)
    small = RolloutSpec(
        draw(st.integers(0, large.window_tokens)),
        draw(st.integers(least, staged)),
        fewer,
        draw(st.integers(0, large.max_pin_tokens)),
    )
    return large, small


@example(specs=(RolloutSpec(3, 1, {1: 1}), RolloutSpec(2, 1, {1: 1})), page=4)  # remainder 3 copies less than 2
@example(specs=(RolloutSpec(28080, 4680, {4680: 1, 1560: 3}), RolloutSpec(28030, 4680, {4680: 1, 1560: 3})), page=128)
@given(specs=nested_specs(), page=st.sampled_from([1, 2, 4, 8, 16, 32]))
def test_a_pool_for_the_largest_spec_opens_every_smaller_one(specs, page):
    large, small = specs
    cache = BlockCausalKVCache(
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        page_size=page,
        dtype=torch.float32,
        device="cpu",
        pool_tokens=BlockCausalKVCache.pool_tokens_for(large, page_size=page),
    )
    cache.open(small, pin_tokens=small.max_pin_tokens)
    assert cache.committed == 0


@pytest.mark.parametrize("page", [1, 2, 4, 8])
def test_every_small_geometry_in_a_pool_without_a_spare_page(device, page):
    """All windows, pins and causal blocks of a few tokens, until the ring has turned: lists hold exactly what the
    contract says, page ids are in the pool, list shapes are the bound and the table never grows."""
    step = 1 if settings().max_examples > 100 else 7  # all of them when asked to be thorough; 7 divides no axis
    for spec in SMALL_SPECS[page.bit_length() :: step]:
        rollout = exact_rollout(spec, page, device)
        for pin in sorted({spec.max_pin_tokens, spec.max_pin_tokens // 2}):
            if pin != spec.max_pin_tokens:
                rollout.reopen(pin_tokens=pin)
            entries = len(rollout.cache.page_table())
            for i in range(7):
                for size, count in spec.causal_blocks:
                    num_tokens = min(size * count, spec.max_staged_tokens)
                    rollout.write_staged(num_tokens, size)
                    rollout.check_lists(num_tokens, size)
                rollout.commit(num_tokens)
                assert len(rollout.cache.page_table()) == entries


def exact_rollout(spec, page, device):
    rollout = Rollout(
        spec,
        spec.max_pin_tokens,
        page=page,
        device=device,
        layers=1,
        heads=1,
        kv_heads=1,
        head_dim=8,
        data="stamped",
        pool_tokens=pages_needed(spec, page) * page,
    )
    pages = pages_needed(spec, page)
    copied = min(page - 1, spec.max_pin_tokens)
    remainder = spec.window_tokens % page
    copied += remainder + page if remainder <= page - 2 else page - 1
    for size, count in spec.causal_blocks:
        listed = rollout.cache.causal_block_pages(size)
        length = (spec.max_pin_tokens + spec.window_tokens) // page + ceil(copied + size, page)
        assert listed.shape == (count, length) and listed.dtype == torch.int32
        assert rollout.cache.causal_block_lengths(size).dtype == torch.int32
        assert 0 <= int(listed.min()) and int(listed.max()) < pages
    return rollout


@pytest.mark.parametrize("page", [3, 0, -4, 6, 100])
def test_pages_that_are_no_power_of_two_are_refused(page):
    spec = RolloutSpec(window_tokens=1, max_staged_tokens=2, causal_blocks={2: 1})
    with pytest.raises(ValueError, match=str(page)):
        BlockCausalKVCache.pool_tokens_for(spec, page_size=page)
    with pytest.raises(ValueError, match=str(page)):
        BlockCausalKVCache(
            num_layers=1,
            num_kv_heads=1,
            head_dim=8,
            pool_tokens=600,
            page_size=page,
            dtype=torch.float32,
            device="cpu",
        )
