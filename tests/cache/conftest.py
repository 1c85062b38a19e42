import pytest
from cache_rollout import Rollout
from cache_small import SPEC


@pytest.fixture
def running(device):
    """24 committed, pin 6, window start 15: two pages evicted, a pass staged and planned."""
    rollout = Rollout(SPEC, 6, page=4, device=device, kv_heads=2, heads=2, head_dim=8)
    for _ in range(4):
        rollout.step(6, 3)
    rollout.forward(6, 6)
    return rollout
