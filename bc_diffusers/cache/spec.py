"""RolloutSpec: what a rollout needs of the cache, and nothing about where it stands."""

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RolloutSpec:
    """The geometry of a rollout, in tokens. Hashable; equal specs share device state.

    Args:
        window_tokens (`int`): how many tokens before its own start a causal block still sees, besides the fixed
            region. May be 0, and smaller than a chunk.
        max_staged_tokens (`int`): the most tokens that forwards stage before a commit (one chunk).
        causal_blocks (`dict[int, int]`): causal-block size -> the most causal blocks of that size in one forward, for
            example `{4680: 1, 1560: 3}` for a chunk-full and a frame-causal pass. Kept as a sorted tuple of pairs.
        max_pin_tokens (`int`, *optional*, defaults to 0): the largest `pin_tokens` an `open` may ask for.

    Raises:
        ValueError: for a negative or empty bound, or a causal block larger than `max_staged_tokens`.
    """

    window_tokens: int
    max_staged_tokens: int
    causal_blocks: Mapping[int, int] | Iterable[tuple[int, int]]
    max_pin_tokens: int = 0

    def __post_init__(self):
        for name in ("window_tokens", "max_staged_tokens", "max_pin_tokens"):
            value = operator.index(getattr(self, name))
            least = 1 if name == "max_staged_tokens" else 0
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
            object.__setattr__(self, name, value)
        blocks = self.causal_blocks
        pairs = blocks.items() if isinstance(blocks, Mapping) else blocks
        pairs = tuple(sorted((operator.index(size), operator.index(count)) for size, count in pairs))
        if not pairs:
            raise ValueError("causal_blocks is empty: name at least one size, for example {max_staged_tokens: 1}")
        for size, count in pairs:
            if not 1 <= size <= self.max_staged_tokens:
                raise ValueError(f"causal block size {size} must be between 1 and max_staged_tokens "
                                 f"{self.max_staged_tokens}")
            if count < 1:
                raise ValueError(f"causal block size {size} needs a count of at least 1, got {count}")
        if len({size for size, _ in pairs}) != len(pairs):
            raise ValueError(f"causal_blocks names a size twice: {pairs}")
        object.__setattr__(self, "causal_blocks", pairs)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def check_page_size(page_size: int) -> int:
    page_size = operator.index(page_size)
    if page_size < 1 or page_size & (page_size - 1):
        raise ValueError(f"page_size must be a power of two, got {page_size}")
    return page_size
