"""The cache as a strip of cells: which slots of which page hold what, from the host's mirror alone."""

from collections.abc import Iterator


ROLES = ("fixed", "window", "staged")


def cache_cells(cache, staged: int = 0) -> dict:
    """What the page draws of an open `BlockCausalKVCache`; no byte is read from the device.

    Args:
        staged (`int`): tokens that the forward of the chunk under way has staged.

    Returns:
        JSON-ready: the counts in tokens, and `cells`, a list of runs `[role, from slot, to slot]` for each page of
        the table in the pool's own order. A page of no run is free. Pages do not move: the window moves through them.
    """
    committed, pin, start = cache.committed, min(cache.pin_tokens, cache.committed), cache.window_start
    table = cache.page_table()
    runs: dict[int, list] = {page: [] for page in sorted(table)}
    end = committed + staged
    spans = ((0, 0, pin), (1, start, committed), (2, committed, min(cache.pin_tokens, end)),
             (2, max(committed, cache.pin_tokens), end))
    for role, begin, end in spans:
        for page, first, last in _slots(cache, table, begin, end):
            runs[page].append([role, first, last])
    return {"page_size": cache.page_size, "committed": committed, "fixed": pin, "window": committed - start,
            "window_tokens": cache.spec.window_tokens, "staged": staged,
            "free": sum(not used for used in runs.values()), "pages": len(table), "cells": list(runs.values())}


def _slots(cache, table: list[int], begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(page, first slot, end slot) of the positions [begin, end), none of which crosses the fixed region's end."""
    size, pin = cache.page_size, cache.pin_tokens
    evicted = max(0, cache.window_start - pin) // size  # pages the ring has been rotated by
    shift = 0 if end <= pin else -pin % size - evicted * size  # history starts on a page of its own
    at = begin + shift
    while at < end + shift:
        stop = min((at // size + 1) * size, end + shift)
        yield table[at // size], at % size, (stop - 1) % size + 1
        at = stop
