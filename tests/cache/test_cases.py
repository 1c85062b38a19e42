"""The attention contract in named cases, each of which a cache has been seen to get wrong."""

import pytest
import torch
from cache_rollout import Rollout, pool_of

from bc_diffusers import RolloutSpec


PAGES = [4, 8, 16, 32, 64, 128, 256]


@pytest.mark.parametrize("data", ["coded", "random"])
@pytest.mark.parametrize("page", PAGES)
def test_eviction_wraps_the_ring_several_times(device, page, data):
    frame = page // 2 + 1
    spec = RolloutSpec(
        window_tokens=page + 3, max_staged_tokens=2 * frame, causal_blocks={2 * frame: 1, frame: 2}, max_pin_tokens=7
    )
    shape = {"kv_heads": 2, "head_dim": 8} if data == "random" else {"kv_heads": 12, "heads": 12, "head_dim": 256}
    rollout = Rollout(spec, 7, page=page, device=device, data=data, **shape)
    ring = -(-(spec.window_tokens + page - 1 + spec.max_staged_tokens) // page)
    firsts = []
    while rollout.cache.window_start - 7 < 2 * ring * page + page:
        rollout.step(2 * frame, frame if len(firsts) % 2 else 2 * frame)
        firsts.append(list(rollout.cache.page_table())[1 if page >= 7 else 2])
    changes = sum(a != b for a, b in zip(firsts, firsts[1:]))
    assert len(set(firsts)) > 1 and changes > ring, "the ring must have turned round more than once"


@pytest.mark.parametrize("data", ["coded", "random"])
@pytest.mark.parametrize("pin", [1, 8, 13, 31])
def test_a_pin_fills_over_several_commits(device, pin, data):
    spec = RolloutSpec(window_tokens=9, max_staged_tokens=6, causal_blocks={6: 1, 2: 3, 5: 2}, max_pin_tokens=31)
    rollout = Rollout(spec, pin, page=8, device=device, data=data, kv_heads=2, heads=2, head_dim=64)
    for i in range(14):
        num_tokens, size = [(6, 2), (5, 6), (3, 5), (6, 6), (1, 2), (6, 5)][i % 6]
        rollout.step(num_tokens, size, passes=2)
    assert rollout.cache.committed > pin + spec.window_tokens


@pytest.mark.parametrize("data", ["coded", "random"])
@pytest.mark.parametrize("pin, prompt", [(0, 6), (13, 13), (13, 19), (13, 4), (16, 22), (3, 9)])
def test_a_prompt_goes_in_by_write_range_and_commit(device, pin, prompt, data):
    """The prompt may exceed max_staged_tokens by what becomes pinned."""
    spec = RolloutSpec(window_tokens=10, max_staged_tokens=6, causal_blocks={6: 1, 3: 2}, max_pin_tokens=16)
    rollout = Rollout(spec, pin, page=8, device=device, data=data, kv_heads=2, heads=2, head_dim=64)
    rollout.put(prompt)
    for _ in range(6):
        rollout.step(6, 3, passes=2)
    assert rollout.cache.window_start > rollout.pin_tokens


def test_a_prompt_in_two_commits(device):
    spec = RolloutSpec(window_tokens=10, max_staged_tokens=6, causal_blocks={6: 1}, max_pin_tokens=21)
    rollout = Rollout(spec, 21, page=8, device=device)
    rollout.put(5)
    rollout.forward(6, 6)
    rollout.put(16 + 6)  # 16 more become pinned, 6 do not
    assert rollout.cache.committed == 27
    for _ in range(4):
        rollout.step(6, 6)


def test_a_prompt_is_written_piece_by_piece(device):
    """Pieces in any order, layers one by one; a later piece overwrites an earlier one."""
    spec = RolloutSpec(window_tokens=10, max_staged_tokens=6, causal_blocks={6: 1}, max_pin_tokens=21)
    rollout = Rollout(spec, 14, page=4, device=device)
    for layer in range(rollout.layers):
        for start, stop in [(9, 17), (0, 5), (3, 9), (4, 6)]:
            rollout.write(start, stop, layers=[layer])
    rollout.commit(17, explicit=True)
    for _ in range(5):
        rollout.step(6, 6)


def test_a_write_across_the_committed_end(device):
    """It edits history and stages tokens at once."""
    spec = RolloutSpec(window_tokens=10, max_staged_tokens=6, causal_blocks={6: 1, 2: 3}, max_pin_tokens=5)
    rollout = Rollout(spec, 5, page=4, device=device)
    for _ in range(5):
        rollout.step(6, 2)
    rollout.write(27, 34)
    rollout.commit(4, explicit=True)
    rollout.step(6, 2)


def test_a_rollout_without_pin_and_window(device):
    """Nothing but the causal block itself is seen."""
    spec = RolloutSpec(window_tokens=0, max_staged_tokens=6, causal_blocks={6: 1, 2: 3})
    rollout = Rollout(spec, page=4, device=device, data="coded", kv_heads=2, heads=2, head_dim=64)
    for _ in range(9):
        rollout.forward(6, 6)
        rollout.step(6, 2)
        assert rollout.cache.window_start == rollout.cache.committed


@pytest.mark.parametrize("data", ["coded", "random"])
def test_a_window_smaller_than_a_chunk(device, data):
    """Later causal blocks see nothing of history, only the end of the one before."""
    spec = RolloutSpec(window_tokens=5, max_staged_tokens=21, causal_blocks={21: 1, 7: 3}, max_pin_tokens=3)
    rollout = Rollout(spec, 3, page=8, device=device, data=data, kv_heads=2, heads=2, head_dim=128)
    for _ in range(9):
        rollout.step(21, 7, passes=2)


@pytest.mark.parametrize("page", [16, 64, 256])
def test_causal_blocks_shorter_than_a_page(device, page):
    spec = RolloutSpec(window_tokens=11, max_staged_tokens=12, causal_blocks={12: 1, 3: 4, 1: 12}, max_pin_tokens=5)
    rollout = Rollout(spec, 5, page=page, device=device, data="coded", kv_heads=4, heads=4, head_dim=256)
    while rollout.cache.committed < min(3 * page, 400) + 60:
        rollout.forward(12, 1)
        rollout.forward(12, 12)
        rollout.step(10, 3)


def test_passes_overwrite_each_other_and_a_shorter_one_may_be_committed(device):
    spec = RolloutSpec(window_tokens=20, max_staged_tokens=12, causal_blocks={12: 1, 4: 3})
    rollout = Rollout(spec, page=8, device=device)
    for num_tokens in (12, 7, 12, 1, 11, 12):
        for _ in range(3):
            rollout.forward(12, 12)
        rollout.step(num_tokens, 4)


def test_padding_rows_are_not_staged_not_attended_and_zero(device):
    """Rows past num_tokens hold NaN; with several causal blocks, in a short chunk, beyond max_staged_tokens."""
    spec = RolloutSpec(window_tokens=9, max_staged_tokens=12, causal_blocks={12: 1, 4: 3}, max_pin_tokens=6)
    rollout = Rollout(spec, 6, page=8, device=device)
    for num_tokens, size, padding in [(12, 4, 4), (5, 4, 7), (12, 12, 1), (1, 12, 63), (9, 4, 2), (12, 4, 0)]:
        rollout.step(num_tokens, size, padding=padding)
        assert torch.isfinite(pool_of(rollout.cache)).all()


def test_plans_live_side_by_side(device):
    """An older plan still runs after newer ones; the last plan decides what commit takes."""
    spec = RolloutSpec(window_tokens=9, max_staged_tokens=12, causal_blocks={12: 1, 4: 3}, max_pin_tokens=6)
    rollout = Rollout(spec, 6, page=8, device=device)
    for _ in range(4):
        one, many, short = rollout.cache.plan(12, 12), rollout.cache.plan(12, 4), rollout.cache.plan(7, 4)
        for plan, num_tokens, size in [(one, 12, 12), (short, 7, 4), (many, 12, 4), (one, 12, 12), (short, 7, 4)]:
            rollout.forward(num_tokens, size, plan=plan)
        rollout.commit(7)


@pytest.mark.parametrize("edit", ["write", "zero_values"])
@pytest.mark.parametrize(
    "start, stop", [(0, 2), (4, 6), (0, 6), (16, 17), (15, 24), (22, 24), (17, 23), (23, 24), (15, 16)]
)
def test_edits_show_in_the_very_next_forward(device, start, stop, edit):
    """Tokens on fully visible pages and private copies of all three kinds; C = 24, pin 6, window start 15."""
    spec = RolloutSpec(window_tokens=9, max_staged_tokens=6, causal_blocks={6: 1, 3: 2}, max_pin_tokens=6)
    for data in ("random", "coded"):
        rollout = Rollout(spec, 6, page=4, device=device, data=data, kv_heads=2, heads=4, head_dim=64)
        for _ in range(4):
            rollout.step(6, 3)
        rollout.forward(6, 6)
        getattr(rollout, edit)(start, stop)
        rollout.forward(6, 6)
        rollout.forward(6, 3)
        getattr(rollout, edit)(start, stop)
        rollout.forward(6, 3)
        rollout.commit(6)
        getattr(rollout, edit)(3, 6)  # the tail was copied before, by an edit and not by this commit
        rollout.forward(6, 3)
        getattr(rollout, edit)(22, 24)
        rollout.step(6, 3)


def test_an_edit_of_one_layer_leaves_the_others(device):
    spec = RolloutSpec(window_tokens=9, max_staged_tokens=6, causal_blocks={6: 1, 3: 2}, max_pin_tokens=6)
    rollout = Rollout(spec, 6, page=4, device=device, layers=3)
    for _ in range(4):
        rollout.step(6, 3)
    for layer in range(3):
        rollout.write(15, 24, layers=[layer])
        rollout.write(0, 6, layers=[layer])
        rollout.forward(6, 3)


def test_edits_before_the_pin_is_full(device):
    spec = RolloutSpec(window_tokens=9, max_staged_tokens=6, causal_blocks={6: 1, 2: 3}, max_pin_tokens=14)
    rollout = Rollout(spec, 14, page=4, device=device)
    for _ in range(5):
        rollout.step(6, 2)
        committed = rollout.cache.committed
        rollout.write(1, 5)
        rollout.zero_values(max(rollout.cache.window_start, committed - 3), committed)
        rollout.forward(6, 2)


@pytest.mark.parametrize("pins", [(13, 0, 5, 16, 1), (0, 16, 8, 9)])
def test_reopen_with_another_pin(device, pins):
    spec = RolloutSpec(window_tokens=10, max_staged_tokens=6, causal_blocks={6: 1, 3: 2}, max_pin_tokens=16)
    rollout = Rollout(spec, pins[0], page=8, device=device, data="coded", kv_heads=2, heads=2, head_dim=64)
    for pin in pins:
        rollout.reopen(pin_tokens=pin)
        assert rollout.cache.committed == 0 and rollout.cache.window_start == 0
        rollout.put(max(1, pin))
        for _ in range(9):
            rollout.step(6, 3)


def test_a_smaller_spec_on_the_same_pool_and_back(device):
    large = RolloutSpec(window_tokens=40, max_staged_tokens=12, causal_blocks={12: 1, 4: 3}, max_pin_tokens=16)
    small = RolloutSpec(window_tokens=7, max_staged_tokens=5, causal_blocks={5: 1}, max_pin_tokens=3)
    none = RolloutSpec(window_tokens=0, max_staged_tokens=1, causal_blocks={1: 1})
    rollout = Rollout(large, 13, page=8, device=device)
    for spec, pin in [(large, 13), (small, 3), (large, 5), (none, 0), (small, 1), (large, 16)]:
        rollout.reopen(spec, pin)
        size, count = spec.causal_blocks[0]
        for _ in range(8):
            rollout.step(size * count, size, passes=2)
            rollout.poison()


def test_layers_are_never_mixed_up(device):
    """Every layer's output is its own number, whatever order the layers come in."""
    spec = RolloutSpec(window_tokens=9, max_staged_tokens=6, causal_blocks={6: 1, 3: 2}, max_pin_tokens=6)
    rollout = Rollout(spec, 6, page=4, device=device, layers=7, data="coded", kv_heads=1, heads=2, head_dim=64)
    for _ in range(6):
        rollout.step(6, 3)
        rollout.poison()
    rollout.write(28, 33, layers=[3, 1])
    rollout.forward(6, 3)


@pytest.mark.parametrize(
    "page, pin, window", [(4, 6, 9), (8, 3, 5), (16, 16, 33), (16, 21, 0), (32, 0, 17), (4, 0, 1)]
)
def test_what_nobody_may_read_may_be_nan(device, page, pin, window):
    """Before every forward; also while the pin fills, and with passes that leave part of a causal block unwritten."""
    spec = RolloutSpec(window_tokens=window, max_staged_tokens=6, causal_blocks={6: 1, 2: 3, 5: 2}, max_pin_tokens=pin)
    rollout = Rollout(spec, pin, page=page, device=device)
    poisoned = 0
    for i in range(24):
        poisoned += rollout.poison()
        num_tokens, size = [(6, 2), (5, 6), (3, 5), (6, 6), (1, 2), (6, 5)][i % 6]
        rollout.forward(num_tokens, size)
        rollout.poison()
        rollout.step(num_tokens, 2, padding=i % 3)
    assert poisoned > 0


def test_open_makes_a_poisoned_pool_finite_again(device):
    spec = RolloutSpec(window_tokens=9, max_staged_tokens=6, causal_blocks={6: 1, 3: 2}, max_pin_tokens=6)
    rollout = Rollout(spec, 6, page=4, device=device)
    rollout.step(6, 3)
    pool_of(rollout.cache).fill_(float("nan"))
    rollout.reopen(pin_tokens=3)
    assert torch.isfinite(pool_of(rollout.cache)).all()
    for _ in range(5):
        rollout.step(6, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(device, dtype):
    spec = RolloutSpec(window_tokens=21, max_staged_tokens=12, causal_blocks={12: 1, 4: 3}, max_pin_tokens=6)
    rollout = Rollout(spec, 6, page=8, device=device, dtype=dtype)
    for _ in range(6):
        rollout.step(12, 4, passes=2)


def test_k_and_v_may_be_slices_of_one_packed_projection(device):
    """Any token and head stride, no copy asked of the caller."""
    spec = RolloutSpec(window_tokens=9, max_staged_tokens=6, causal_blocks={6: 1, 3: 2}, max_pin_tokens=6)
    rollout = Rollout(spec, 6, page=4, device=device)
    plain = rollout._kv

    def packed(layer, start, n):
        both = torch.stack(plain(layer, start, n), dim=2)  # [n, kv_heads, 2, head_dim]
        return both[:, :, 0], both[:, :, 1]

    rollout._kv = packed
    for _ in range(4):
        rollout.step(6, 3)
    rollout.write(16, 20)
    rollout.forward(6, 3)
