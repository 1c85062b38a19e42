"""The attention contract of the cache, against the independent reference: what a query sees, whatever the geometry."""

import pytest
import torch
from block_causal_reference import kept_positions
from cache_rollout import Rollout, pool_of
from hypothesis import given
from hypothesis import strategies as st

from bc_diffusers import BlockCausalKVCache, RolloutSpec


PAGES = [4, 8, 16, 32, 64, 128, 256]
CODES = 2048  # positions that a coded rollout can name


@st.composite
def geometries(draw):
    """(page, spec, pins): frames, pins and windows that divide nothing, several causal-block sizes."""
    page = draw(st.sampled_from(PAGES))
    frame = draw(st.integers(1, min(max(6, page + 3), 70)))
    frames = draw(st.integers(1, 3))
    chunk = frame * frames
    staged = chunk + draw(st.sampled_from([0, 0, 1, frame]))
    sizes = {chunk: 1}
    if frames > 1:
        sizes[frame] = frames
    if draw(st.booleans()):
        odd = draw(st.integers(1, staged))
        sizes[odd] = min(-(-staged // odd), 5)
    window = draw(
        st.one_of(
            st.just(0), st.integers(1, chunk), st.integers(0, 3 * page + 2), st.sampled_from([page, 2 * page, 3 * chunk])
        )
    )
    most = draw(st.one_of(st.just(0), st.integers(1, 2 * page + 1)))
    return page, RolloutSpec(
        window_tokens=min(window, 600), max_staged_tokens=staged, causal_blocks=sizes, max_pin_tokens=min(most, 300)
    )


def smaller(draw, spec):
    """A spec whose every bound is at most that of ``spec``. It may need more pages all the same: the window's remainder
    by the page size decides how many slots are copied."""
    sizes = dict(spec.causal_blocks)
    kept = draw(st.sets(st.sampled_from(sorted(sizes)), min_size=1))
    return RolloutSpec(
        window_tokens=0 if spec.window_tokens == 0 else spec.window_tokens - spec.window_tokens // 3,
        max_staged_tokens=spec.max_staged_tokens,
        causal_blocks={size: sizes[size] for size in kept},
        max_pin_tokens=spec.max_pin_tokens // 2,
    )


def ranges_of_history(draw, rollout):
    """A range of kept tokens, inside one of the two kept regions."""
    kept = kept_positions(rollout.cache.committed, rollout.pin_tokens, rollout.spec.window_tokens)
    start = draw(st.sampled_from(kept))
    stop = start + 1
    limit = start + draw(st.integers(1, 2 * rollout.page))
    while stop < limit and stop in kept:
        stop += 1
    return start, stop


def any_forward(draw, rollout, full=False):
    size, count = draw(st.sampled_from(rollout.spec.causal_blocks))
    most = min(size * count, rollout.spec.max_staged_tokens)
    return most if full else draw(st.one_of(st.just(most), st.integers(1, most))), size


def play(draw, data, device, steps, **shape):
    """Draws a geometry and a rollout and checks every forward of it."""
    page, spec = draw(geometries())
    pins = st.integers(0, spec.max_pin_tokens)
    rollout = Rollout(spec, draw(pins), page=page, device=device, data=data, **shape)
    chances = ["chunk", "chunk", "chunk", "prompt", "edit", "zero", "reopen", "other spec", "poison"]
    forwards = 0
    for _ in range(steps):
        kind = draw(st.sampled_from(chances))
        cache, spec_now = rollout.cache, rollout.spec
        room = max(0, rollout.pin_tokens - cache.committed) + spec_now.max_staged_tokens
        if data == "coded" and cache.committed + 2 * room > CODES:
            break
        if kind == "prompt":
            rollout.put(draw(st.integers(1, room)))
        elif kind in ("edit", "zero") and cache.window_start < cache.committed:
            start, stop = ranges_of_history(draw, rollout)
            rollout.write(start, stop) if kind == "edit" else rollout.zero_values(start, stop)
            rollout.forward(*any_forward(draw, rollout))
            forwards += 1
        elif kind == "reopen":
            rollout.reopen(pin_tokens=draw(st.integers(0, spec_now.max_pin_tokens)))
        elif kind == "other spec":
            other = spec if spec_now != spec else smaller(draw, spec)
            if BlockCausalKVCache.pool_tokens_for(other, page) > BlockCausalKVCache.pool_tokens_for(spec, page):
                continue
            rollout.reopen(other, draw(st.integers(0, other.max_pin_tokens)))
        elif kind == "poison":
            rollout.poison()
        else:
            padding = draw(st.sampled_from([0, 0, 1, 5]))
            for _ in range(draw(st.integers(0, 2))):  # denoising passes may be cut otherwise than the clean one
                rollout.forward(*any_forward(draw, rollout), padding=padding)
            num_tokens, size = any_forward(draw, rollout)
            rollout.step(num_tokens, size, padding=padding)
            forwards += 1
    rollout.forward(*any_forward(draw, rollout, full=True))


@given(data=st.data())
def test_every_visible_key_is_seen_once_and_no_other(device, data):
    shape = {"layers": 2, "heads": 8, "kv_heads": 8, "head_dim": CODES // 8}
    play(data.draw, "coded", device, data.draw(st.integers(1, 8)), **shape)


@given(data=st.data())
def test_random_rollouts_match_the_reference(device, data):
    group = data.draw(st.sampled_from([1, 2, 4]))
    shape = {"layers": data.draw(st.integers(1, 3)), "heads": 2 * group, "kv_heads": 2, "head_dim": 8}
    play(data.draw, "random", device, data.draw(st.integers(1, 14)), **shape)


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


@pytest.mark.parametrize("page, pin, window", [(4, 6, 9), (8, 3, 5), (16, 16, 33), (16, 21, 0), (32, 0, 17), (4, 0, 1)])
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


@pytest.mark.parametrize("page", [16, 64, 128])
def test_frames_of_1560_tokens(device, page):
    """Wan's 480×832: 1560 is divided by none of these pages."""
    frame = 1560
    spec = RolloutSpec(
        window_tokens=2 * frame,
        max_staged_tokens=2 * frame,
        causal_blocks={2 * frame: 1, frame: 2},
        max_pin_tokens=frame,
    )
    rollout = Rollout(
        spec, frame, page=page, device=device, layers=1, heads=1, kv_heads=1, head_dim=8, data="stamped", dtype=torch.float32
    )
    for _ in range(5):
        for num_tokens, size in [(2 * frame, 2 * frame), (2 * frame, frame), (frame + 7, frame)]:
            rollout.write_staged(num_tokens, size)
            rollout.check_lists(num_tokens, size)
        rollout.cache.plan(2 * frame, 2 * frame)
        rollout.write_staged(2 * frame, 2 * frame)
        rollout.commit(2 * frame)
    rollout.data = "random"
    rollout.reopen(pin_tokens=frame)
    rollout.put(3 * frame)
    rollout.put(2 * frame)
    rollout.forward(2 * frame, frame)


def test_frame_3000_and_beyond(device):
    """An unlimited rollout: 1560 tokens a frame, 4.7 million tokens committed, the table as long as on the first day."""
    frame = 1560
    spec = RolloutSpec(
        window_tokens=3 * frame, max_staged_tokens=3 * frame, causal_blocks={3 * frame: 1, frame: 3}, max_pin_tokens=frame
    )
    rollout = Rollout(spec, frame, page=128, device=device, layers=1, heads=1, kv_heads=1, head_dim=8)
    entries = len(rollout.cache.page_table())
    rollout.write(0, frame)
    rollout.commit(frame, explicit=True)
    while rollout.cache.committed < 3000 * frame:
        rollout.skip(3 * frame, 3 * frame)
        assert len(rollout.cache.page_table()) == entries
    for _ in range(2):
        rollout.put(3 * frame)
    assert rollout.cache.committed > 3000 * frame and rollout.cache.window_start == rollout.cache.committed - 3 * frame
    rollout.forward(3 * frame, frame)


def test_3000_small_frames_through_every_forward(device):
    """No shortcut: 3,000 frames of 5 tokens, every tenth chunk attended and the whole list looked at."""
    frame = 5
    spec = RolloutSpec(window_tokens=23, max_staged_tokens=15, causal_blocks={15: 1, 5: 3}, max_pin_tokens=7)
    rollout = Rollout(spec, 7, page=8, device=device, layers=1, heads=1, kv_heads=1, head_dim=8)
    entries = len(rollout.cache.page_table())
    while rollout.cache.committed < 3000 * frame:
        for _ in range(9):
            rollout.put(15)
        rollout.step(15, 5)
    assert len(rollout.cache.page_table()) == entries
