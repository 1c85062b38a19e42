"""Page lists written out by hand: the three partly visible pages in every combination, and chunks of two sizes.

Roles in the lists: F pages of the fixed region, R pages of the ring as numbered when the rollout began, A B C ..
private pages of the causal blocks (the sizes of a spec may share those that hold own tokens only: O), 0 the filler.
A causal block's keys: fully visible pages, then copies of the visible slots of the fixed tail, of the window-start
page and of the own-start page, then its own tokens. Page 4 throughout, but for the last case.
"""

from dataclasses import dataclass, field

import pytest
from cache_rollout import Rollout

from bc_diffusers import RolloutSpec
from block_causal_reference import visible_positions


def positions(text):
    """ "0-3 9" -> [0, 1, 2, 3, 9]."""
    out = []
    for part in text.split():
        first, _, last = part.partition("-")
        out.extend(range(int(first), int(last or first) + 1))
    return out


@dataclass(frozen=True)
class Block:
    """One causal block as it must be listed: role of every list entry, keys before its own tokens, own tokens."""

    pages: str
    before: str
    own: str
    size: int = 4
    index: int = 0


@dataclass(frozen=True)
class Case:
    name: str
    window: int
    pin: int
    commits: list
    table: str
    blocks: list
    sizes: dict = field(default_factory=lambda: {4: 1})
    page: int = 4


COMBINATIONS = [
    Case(
        "no partly visible page",
        8,
        4,
        [4, 4, 4, 4],
        "F0 R1 R2 R3 R0",
        [Block("F0 R1 R2 A0 A1 A2", "0-3 8-15", "16-19")],
    ),
    Case("no history", 8, 6, [], "F0 F1 R0 R1 R2 R3", [Block("A0 A1 A2 0 0 0", "", "0-3")]),
    Case("a pin that is not full", 8, 6, [3], "F0 F1 R0 R1 R2 R3", [Block("A0 A1 A2 0 0 0", "0-2", "3-6")]),
    Case("a pin that is just full", 8, 6, [4, 2], "F0 F1 R0 R1 R2 R3", [Block("F0 A0 A1 A2 0 0", "0-3 4 5", "6-9")]),
    Case(
        "fixed tail",
        8,
        6,
        [4, 4, 4, 4, 2],
        "F0 F1 R1 R2 R3 R0",
        [Block("F0 R1 R2 A0 A1 A2", "0-3 10-17 4 5", "18-21")],
    ),
    Case("window start", 7, 0, [4, 4, 4], "R1 R2 R3 R0", [Block("R2 A0 A1", "8-11 5-7", "12-15")]),
    Case("own start", 9, 0, [4, 4, 4, 1], "R1 R2 R3 R0", [Block("R1 R2 A0 A1 A2", "4-11 12", "13-16")]),
    Case(
        "fixed tail and window start",
        7,
        6,
        [4, 4, 4, 4, 2],
        "F0 F1 R1 R2 R3 R0",
        [Block("F0 R2 A0 A1 A2 0", "0-3 14-17 4 5 11-13", "18-21")],
    ),
    Case(
        "fixed tail and own start",
        9,
        6,
        [4, 4, 4, 4, 3],
        "F0 F1 R1 R2 R3 R0",
        [Block("F0 R1 R2 A0 A1 A2", "0-3 10-17 4 5 18", "19-22")],
    ),
    Case(
        "window start and own start", 6, 0, [4, 4, 4, 1], "R1 R2 R3 R0", [Block("R2 A0 A1 A2", "8-11 7 12", "13-16")]
    ),
    Case(
        "fixed tail, window start and own start",
        6,
        6,
        [4, 4, 4, 4, 3],
        "F0 F1 R1 R2 R3 R0",
        [Block("F0 R2 A0 A1 A2 A3 0", "0-3 14-17 4 5 13 18", "19-22")],
    ),
    Case("window start and own start on one page", 2, 0, [4, 3], "R1 R2 R0", [Block("A0 A1 A2", "5 6", "7-10")]),
    Case("window 0", 0, 5, [4, 4, 1], "F0 F1 R1 R0", [Block("F0 A0 A1 A2", "0-3 4", "9-12")]),
    Case("window 0 inside a page", 0, 5, [4, 4, 2], "F0 F1 R1 R0", [Block("F0 A0 A1 A2", "0-3 4", "10-13")]),
]


def two_sizes(name, commits, table, *blocks):
    """Frames of 3 tokens, chunks of 2 frames: pin 6, window 9, a chunk-full and a frame-causal pass."""
    return Case(name, 9, 6, commits, table, list(blocks), sizes={6: 1, 3: 2})


TWO_SIZES = [
    two_sizes(
        "two sizes, 12 committed",
        [6, 6],
        "F0 F1 R0 R1 R2 R3 R4",
        Block("F0 R0 A0 A1 O0 O1 0", "0-3 6-9 4 5 10 11", "12-17", 6),
        Block("F0 R0 B0 B1 O0 0", "0-3 6-9 4 5 10 11", "12-14", 3, 0),
        Block("F0 R0 R1 C0 C1 O1", "0-3 6-9 10-13 4 5 14", "15-17", 3, 1),
    ),
    two_sizes(
        "two sizes, 18 committed: window start inside a page",
        [6, 6, 6],
        "F0 F1 R0 R1 R2 R3 R4",
        Block("F0 R1 R2 A0 A1 O0 O1", "0-3 10-17 4 5 9", "18-23", 6),
        Block("F0 R1 R2 B0 B1 O0", "0-3 10-17 4 5 9", "18-20", 3, 0),
        Block("F0 R2 C0 C1 O1 0", "0-3 14-17 4 5 12 13 18-20", "21-23", 3, 1),
    ),
    two_sizes(
        "two sizes, 24 committed: two pages evicted at once",
        [6, 6, 6, 6],
        "F0 F1 R2 R3 R4 R0 R1",
        Block("F0 R3 A0 A1 O0 O1 0", "0-3 18-21 4 5 15-17 22 23", "24-29", 6),
        Block("F0 R3 B0 B1 O0 0", "0-3 18-21 4 5 15-17 22 23", "24-26", 3, 0),
        Block("F0 R3 R4 C0 C1 O1", "0-3 18-25 4 5 26", "27-29", 3, 1),
    ),
    Case(
        "causal blocks much shorter than a page",
        5,
        3,
        [6, 3],
        "F0 R0 R1 R2",
        [
            Block("A0 A1 A2 0", "0-2 4-8", "9 10", 2, 0),
            Block("B0 B1 B2 0", "0-2 6-10", "11 12", 2, 1),
            Block("C0 C1 C2 0", "0-2 8-12", "13 14", 2, 2),
        ],
        sizes={2: 3},
        page=8,
    ),
]


class Roles:
    """Physical page numbers by role. The table names F and R when the rollout begins; the others name themselves when
    first listed and must keep their page from then on."""

    def __init__(self, rollout, pin):
        table = rollout.cache.page_table()
        fixed = -(-pin // rollout.page)
        self.page = {f"F{i}": int(page) for i, page in enumerate(table[:fixed])}
        self.page.update({f"R{i}": int(page) for i, page in enumerate(table[fixed:])})

    def check(self, roles, pages):
        roles, pages = roles.split(), [int(page) for page in pages]
        assert len(pages) == len(roles), f"{len(pages)} list entries {pages}, by hand {roles}"
        for role, page in zip(roles, pages):
            self.page.setdefault(role, page)
        assert pages == [self.page[role] for role in roles], f"listed {self.names(pages)}, by hand {roles}"
        assert len(set(self.page.values())) == len(self.page), f"one page plays two roles: {self.page}"

    def names(self, pages):
        named = {page: role for role, page in self.page.items()}
        return [named.get(page, f"page {page}") for page in pages]


def play(case, device, commits):
    spec = RolloutSpec(
        window_tokens=case.window,
        max_staged_tokens=max(b * m for b, m in case.sizes.items()),
        causal_blocks=case.sizes,
        max_pin_tokens=case.pin,
    )
    rollout = Rollout(
        spec, case.pin, page=case.page, device=device, layers=2, heads=2, kv_heads=2, head_dim=8, data="stamped"
    )
    roles = Roles(rollout, case.pin)
    for num_tokens in commits:
        size = next(b for b, m in spec.causal_blocks if b * m >= num_tokens)
        rollout.write_staged(num_tokens, size)
        rollout.commit(num_tokens)
    return rollout, roles


def check(case, rollout, roles):
    cache = rollout.cache
    roles.check(case.table, cache.page_table())
    for block in case.blocks:
        before, own = positions(block.before), positions(block.own)
        # The hand's own mistakes first: what it wrote must be the contract.
        start, end = own[0], own[-1] + 1
        assert start == cache.committed + block.index * block.size
        assert sorted(before + own) == visible_positions(start, end, case.pin, case.window)

        pages, lengths = cache.causal_block_pages(block.size), cache.causal_block_lengths(block.size)
        count = case.sizes[block.size]
        assert pages.shape == (count, len(block.pages.split())) and lengths.shape == (count,)
        roles.check(block.pages, pages[block.index].tolist())
        assert int(lengths[block.index]) == len(before)

        rollout.write_staged(min(block.size * count, rollout.spec.max_staged_tokens), block.size)
        for layer in range(rollout.layers):
            stamp = 1 + 4096 * layer
            found = rollout.listed(block.size, block.index, len(own), layer)
            assert [[int(x) - stamp for x in part] for part in found] == [before, own]


@pytest.mark.parametrize("case", COMBINATIONS + TWO_SIZES, ids=lambda case: case.name)
def test_page_lists_written_by_hand(device, case):
    check(case, *play(case, device, case.commits))


def test_one_rollout_through_all_states_of_the_example(device):
    """The same physical pages keep their roles from state to state."""
    states = TWO_SIZES[:3]
    rollout, roles = play(states[0], device, states[0].commits)
    for case in states:
        check(case, rollout, roles)
        rollout.write_staged(6, 3)
        rollout.commit(6)
    assert len(roles.page) == 16, "fixed 2, ring 5, leads 2 + 2 + 2, own-token pages 2, filler 1"


@pytest.mark.parametrize("case", COMBINATIONS, ids=lambda case: case.name)
def test_hand_written_states_reached_by_single_tokens(device, case):
    """Where history stands decides the lists, not how it was cut into commits."""
    commits = [1] * sum(case.commits)
    check(case, *play(case, device, commits))
