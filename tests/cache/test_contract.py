"""The attention contract of the cache, against the independent reference: what a query sees, whatever the geometry."""

from cache_rollout import Rollout
from hypothesis import given
from hypothesis import strategies as st

from bc_diffusers import RolloutSpec
from block_causal_reference import kept_positions


PAGES = [4, 8, 16, 32, 64, 128, 256]
CODES = 2048  # positions that a coded rollout can name


@st.composite
def geometries(draw):
    """(page, spec): frames, pins and windows that divide nothing, several causal-block sizes."""
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
            st.just(0),
            st.integers(1, chunk),
            st.integers(0, 3 * page + 2),
            st.sampled_from([page, 2 * page, 3 * chunk]),
        )
    )
    most = draw(st.one_of(st.just(0), st.integers(1, 2 * page + 1)))
    return page, RolloutSpec(
        window_tokens=min(window, 600), max_staged_tokens=staged, causal_blocks=sizes, max_pin_tokens=min(most, 300)
    )


def smaller(draw, spec):
    """A spec whose every bound is at most that of ``spec``."""
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
    kinds = ["chunk"] * 6 + ["prompt", "prompt", "edit", "zero", "reopen", "other spec", "poison"]
    for _ in range(steps):
        kind = draw(st.sampled_from(kinds))
        cache, spec_now = rollout.cache, rollout.spec
        room = max(0, rollout.pin_tokens - cache.committed) + spec_now.max_staged_tokens
        if data == "coded" and cache.committed + 2 * room > CODES:
            break
        if kind == "prompt":
            rollout.put(draw(st.integers(1, room)))
        elif kind in ("edit", "zero") and kept_positions(cache.committed, rollout.pin_tokens, spec_now.window_tokens):
            start, stop = ranges_of_history(draw, rollout)
            rollout.write(start, stop) if kind == "edit" else rollout.zero_values(start, stop)
            rollout.forward(*any_forward(draw, rollout))
        elif kind == "reopen":
            rollout.reopen(pin_tokens=draw(st.integers(0, spec_now.max_pin_tokens)))
        elif kind == "other spec":
            other = spec if spec_now != spec else smaller(draw, spec)
            rollout.reopen(other, draw(st.integers(0, other.max_pin_tokens)))
        elif kind == "poison":
            rollout.poison()
        else:
            padding = draw(st.sampled_from([0, 0, 1, 5]))
            for _ in range(draw(st.integers(0, 2))):  # denoising passes may be cut otherwise than the clean one
                rollout.forward(*any_forward(draw, rollout), padding=padding)
            num_tokens, size = any_forward(draw, rollout)
            rollout.step(num_tokens, size, padding=padding)
    rollout.forward(*any_forward(draw, rollout, full=True))


@given(data=st.data())
def test_every_visible_key_is_seen_once_and_no_other(device, data):
    shape = {"layers": 2, "heads": 8, "kv_heads": 8, "head_dim": CODES // 8}
    play(data.draw, "coded", device, data.draw(st.integers(1, 10)), **shape)


@given(data=st.data())
def test_random_rollouts_match_the_reference(device, data):
    group = data.draw(st.sampled_from([1, 2, 4]))
    shape = {"layers": data.draw(st.integers(1, 3)), "heads": 2 * group, "kv_heads": 2, "head_dim": 8}
    play(data.draw, "random", device, data.draw(st.integers(1, 24)), **shape)
