"""Real frame sizes and rollouts without end."""

import pytest
import torch
from cache_rollout import Rollout

from bc_diffusers import RolloutSpec


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
        spec,
        frame,
        page=page,
        device=device,
        layers=1,
        heads=1,
        kv_heads=1,
        head_dim=8,
        data="stamped",
        dtype=torch.float32,
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
    """1560 tokens a frame, 4.7 million tokens committed, and the table as long as on the first day."""
    frame = 1560
    spec = RolloutSpec(
        window_tokens=3 * frame,
        max_staged_tokens=3 * frame,
        causal_blocks={3 * frame: 1, frame: 3},
        max_pin_tokens=frame,
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


def test_3000_small_frames_that_are_all_written(device):
    """Frames of 5 tokens, every one of them written; every tenth chunk is attended."""
    frame = 5
    spec = RolloutSpec(window_tokens=23, max_staged_tokens=15, causal_blocks={15: 1, 5: 3}, max_pin_tokens=7)
    rollout = Rollout(spec, 7, page=8, device=device, layers=1, heads=1, kv_heads=1, head_dim=8)
    entries = len(rollout.cache.page_table())
    while rollout.cache.committed < 3000 * frame:
        for _ in range(9):
            rollout.put(15)
        rollout.step(15, 5)
    assert len(rollout.cache.page_table()) == entries
