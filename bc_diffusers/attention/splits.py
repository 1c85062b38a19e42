"""Cutting one attention over several sequences, and the small model of waves that says when it pays.

A kernel gives each tile of query rows of one head to one thread block, and a GPU runs as many of these at a time as it
has multiprocessors: 416 blocks on 132 of them take four rounds, the last one a sixth full. With the keys cut over n
sequences the blocks are n times shorter and n times as many, so less of the last round is empty; the partial results
are merged by their log-sum-exps. Several causal blocks of one forward become a cascade: the pages that all of them see
are attended to by all rows at once (cut in n runs), what each sees besides is a short sequence of its own.
"""

import functools
import heapq
from dataclasses import dataclass

import torch

from .. import ops


# In tiles, a tile being 128 query rows x 128 keys of one head (1.7 us on an H200): what a thread block costs besides
# its keys, what the two more launches cost, and how many bytes the merge moves in a tile's time (at 4 TB/s).
_BLOCK_OVERHEAD = 1.5
_LAUNCHES = 3.0
_BYTES_PER_TILE = 6.8e6


@dataclass(frozen=True)
class Work:
    """One attention call, by its bounds: what decides how it is best cut."""

    rows: int
    causal_blocks: int
    causal_block_size: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    list_length: int  # pages of a causal block's list
    private_pages: int  # of them
    processors: int  # multiprocessors of the GPU

    @classmethod
    def of(cls, q: torch.Tensor, layer_pool: torch.Tensor, pages: torch.Tensor, num_tokens: int,
           causal_block_size: int, private_pages: int) -> "Work":
        return cls(num_tokens, pages.shape[0], causal_block_size, q.shape[1], layer_pool.shape[2], q.shape[2],
                   layer_pool.shape[3], pages.shape[1], private_pages,
                   torch.cuda.get_device_properties(q.device).multi_processor_count)

    @property
    def shared_pages(self) -> int:
        """The most pages that all causal blocks see."""
        return self.list_length if self.causal_blocks == 1 else self.list_length - self.private_pages

    @property
    def apart(self) -> int:
        """Pages between the first causal block's start and the last one's."""
        return (self.causal_blocks - 1) * self.causal_block_size // self.page_size

    @property
    def tail_pages(self) -> int:
        """The most pages that a causal block sees besides the shared ones: its private pages, those where its window
        begins earlier than the last one's, and those where it ends later than the first one's. The later a causal
        block, the fewer of the former and the more of the latter."""
        if self.causal_blocks == 1:
            return 0
        return min(self.list_length, self.apart + 3 + self.private_pages)

    def sequences(self, runs: int) -> int:
        return runs + (self.causal_blocks if self.causal_blocks > 1 else 0)

    def table_width(self, runs: int) -> int:
        return max(1, -(-self.shared_pages // runs), self.tail_pages)


def makespan(tasks: list[tuple[int, float]], processors: int) -> float:
    """When the last of `tasks`, (count, duration) in the order they start, is done on so many processors."""
    free = [0.0] * processors
    for count, duration in tasks:
        for _ in range(count):
            heapq.heapreplace(free, free[0] + duration)
    return max(free)


@functools.lru_cache(maxsize=256)
def best_runs(work: Work, most: int = 4) -> int:
    """How many runs the keys are best cut in; 0: not at all (one sequence a causal block and no merge).

    Counts tiles of 128 rows of one head, with a full window; times are in units of one tile of 128 keys."""
    def blocks(rows):
        return -(-rows // 128) * work.heads

    def length(pages):
        return _BLOCK_OVERHEAD + pages * work.page_size / 128

    # Not for a percent or two, which the model does not know to.
    best, least = 0, 0.98 * makespan([(work.causal_blocks * blocks(min(work.rows, work.causal_block_size)),
                                length(work.list_length))], work.processors)
    for runs in range(2 if work.causal_blocks == 1 else 1, most + 1):
        shared = max(0, work.shared_pages - work.apart)
        tasks = [(runs * blocks(work.rows), length(-(-shared // runs)))]
        if work.causal_blocks > 1:
            tail = min(work.list_length, work.apart + work.private_pages)
            tasks.append((work.causal_blocks * blocks(work.causal_block_size), length(tail)))
        partials = runs + (work.causal_blocks > 1)
        merge = _LAUNCHES + (2 * partials + 1) * work.rows * work.heads * work.head_dim * 2 / _BYTES_PER_TILE
        time = makespan(tasks, work.processors) + merge
        if time < least:
            best, least = runs, time
    return best


@dataclass(frozen=True)
class CutLists:
    """Page lists cut over sequences: tables int32 [sequences, width], keys and lens int32 [sequences]."""

    tables: torch.Tensor
    keys: torch.Tensor  # how many a sequence has
    lens: torch.Tensor  # the same, but 1 for an empty one: what kernels are told


def cut_lists(state: torch.Tensor, pages: torch.Tensor, totals: torch.Tensor, work: Work, runs: int,
              window_tokens: int) -> CutLists:
    """Cuts the lists for the keys that are visible now; on the device, so that a captured graph stays right."""
    rows = work.sequences(runs)
    cut = CutLists(pages.new_empty(rows, work.table_width(runs)), pages.new_empty(rows), pages.new_empty(rows))
    ops.split_page_lists_(state, pages, totals, cut.tables, cut.keys, cut.lens, work.causal_block_size, window_tokens,
                          work.page_size)
    return cut
