"""`split_page_lists_` on the CPU: how one causal-block size's page lists are cut for attention over several sequences.

A causal block's list is table pages [0, a) of the fixed region, table pages [first, last) of the ring, then its
private pages (see `layout.py`). a, first and last only grow from one causal block to the next, so what all of them see
whole is [0, a of the first) and [first of the last, last of the first): the shared pages. Those are attended to by all
rows at once, in runs; what a list has besides, a few pages at its start, in its middle and its private pages, is a
short sequence of its own, in list order, so that the one partly filled page stays last.
"""

import torch

from . import checks


def full_pages(state: list[int], j: int, size: int, window_tokens: int, page_size: int) -> tuple[int, int, int]:
    """(a, first, last): the table pages that causal block j sees whole are [0, a) and [first, last)."""
    committed, pin, evicted = state[:3]
    start, off = committed + j * size, -pin % page_size - evicted * page_size
    a_end = min(pin, start)
    begin, end = (max(pin, start - window_tokens) + off, start + off) if start > pin else (a_end, a_end)
    first = -(-begin // page_size)
    return a_end // page_size, first, max(first, end // page_size)


def split_page_lists_(state, pages, totals, tables, keys, lens, causal_block_size, window_tokens, page_size):
    checks.split_page_lists_(state, pages, totals, tables, keys, lens, causal_block_size, window_tokens, page_size)
    blocks, rows = pages.shape[0], tables.shape[0]
    tables.zero_()
    total = totals.tolist()
    if blocks == 1:
        shared, shared_keys, runs = pages[0, :-(-total[0] // page_size)], total[0], rows
    else:
        runs, values = rows - blocks, state.tolist()
        full = [full_pages(values, j, causal_block_size, window_tokens, page_size) for j in range(blocks)]
        fixed, begin = full[0][0], full[-1][1]
        end = max(full[0][2], begin)
        at = fixed + begin - full[0][1]
        shared = torch.cat([pages[0, :fixed], pages[0, at:at + end - begin]])
        shared_keys = shared.shape[0] * page_size
        for j, (a, first, last) in enumerate(full):
            rest = torch.cat([pages[j, fixed:a + min(begin, last) - first], pages[j, a + min(end, last) - first:]])
            rest = rest[:tables.shape[1]]
            tables[runs + j, :rest.shape[0]] = rest
            keys[runs + j] = max(0, total[j] - shared_keys)
    each = -(-shared.shape[0] // runs)
    for i in range(runs):
        run = shared[i * each:(i + 1) * each]
        tables[i, :run.shape[0]] = run
        keys[i] = max(0, min(shared_keys - i * each * page_size, each * page_size))
    lens.copy_(keys.clamp(min=1))
