"""The static bounds of a spec at a page size: how many pages, list entries and copied slots it can ever need."""

import itertools
from dataclasses import dataclass

from .spec import RolloutSpec, ceil_div, check_page_size


# Flat int32 lists begin on multiples of this many entries (128 bytes): kernels may load page lists by 16 bytes.
_ALIGN = 32


@dataclass(frozen=True)
class SizeGeometry:
    """One causal-block size: its bounds, and where its part begins in each flat tensor (in entries)."""

    size: int
    count: int  # causal blocks
    private_pages: int  # of one causal block
    list_length: int  # entries of one causal block's page list
    rows: int  # rows a forward scatters
    extra: int  # scatter entries of tokens that an earlier causal block staged
    at_block: int
    at_pages: int
    at_private: int
    at_copy: int
    at_scatter: int

    def row(self) -> tuple[int, ...]:
        """The descriptor that `block_causal_layout_` reads (a row of its `sizes`)."""
        return (self.size, self.count, self.private_pages, self.list_length, self.rows, self.extra, self.at_block,
                self.at_pages, self.at_private, self.at_copy, self.at_scatter)


class Geometry:
    """Bounds for every position, pin up to `max_pin_tokens` and number of commits.

    With S = page size, W = window, N = most staged tokens, Pm = largest pin, b = causal-block size:

        tail slots     T = min(S - 1, Pm)
        edge slots     E = W mod S + S if W mod S <= S - 2 else S - 1   (window start + own start together)
        private pages  ceil((T + E + b) / S)            list entries  (Pm + W) // S + private pages
        fixed pages    ceil(Pm / S)                     ring pages    ceil((W + S - 1 + N) / S)

    Only the first `lead` = ceil((T + E) / S) private pages of a causal block can hold copies. The later ones hold own
    tokens alone, which every forward writes before it reads, so the sizes of a spec share them.
    """

    def __init__(self, spec: RolloutSpec, page_size: int):
        self.spec, self.page_size = spec, check_page_size(page_size)
        S, W, N, Pm = page_size, spec.window_tokens, spec.max_staged_tokens, spec.max_pin_tokens
        edge = W % S + S if W % S <= S - 2 else S - 1
        self.copied_slots = min(S - 1, Pm) + edge
        self.fixed_pages = ceil_div(Pm, S)
        self.ring_pages = ceil_div(W + S - 1 + N, S)
        self.lead = ceil_div(self.copied_slots, S)

        sizes, at = [], dict.fromkeys(("block", "pages", "private", "copy", "scatter"), 0)
        for size, count in spec.causal_blocks:
            private = ceil_div(self.copied_slots + size, S)
            length = (Pm + W) // S + private
            rows, extra = min(size * count, N), (count - 1) * self.copied_slots
            sizes.append(SizeGeometry(size, count, private, length, rows, extra, at["block"], at["pages"],
                                      at["private"], at["copy"], at["scatter"]))
            used = {"block": count, "pages": count * length, "private": count * private,
                    "copy": count * self.copied_slots, "scatter": rows + extra}
            for name, n in used.items():
                at[name] += ceil_div(n, _ALIGN) * _ALIGN
        self.sizes = {s.size: s for s in sizes}
        self.flat_blocks, self.flat_pages, self.flat_private = at["block"], at["pages"], at["private"]
        self.flat_copy, self.flat_scatter = at["copy"], at["scatter"]

        self.shared_pages = max(s.count * (s.private_pages - self.lead) for s in sizes)
        leads = sum(s.count * self.lead for s in sizes)
        self.pages = 1 + self.fixed_pages + self.ring_pages + leads + self.shared_pages

    def page_roles(self) -> tuple[list[int], list[int], dict[int, list[list[int]]]]:
        """Numbers the pool's pages: page 0 is never written (list filler), then fixed, ring, private pages.

        Returns:
            `fixed` page ids, `ring` page ids in their initial order, and per size one private list a causal block.
        """
        ids = itertools.count(1)

        def take(n):
            return list(itertools.islice(ids, n))

        fixed, ring = take(self.fixed_pages), take(self.ring_pages)
        leads = {s.size: [take(self.lead) for _ in range(s.count)] for s in self.sizes.values()}
        shared = take(self.shared_pages)
        private = {}
        for s in self.sizes.values():
            own = s.private_pages - self.lead
            private[s.size] = [lead + shared[j * own:(j + 1) * own] for j, lead in enumerate(leads[s.size])]
        return fixed, ring, private


def keys_before(start: int, pin_tokens: int, window_tokens: int) -> int:
    """How many keys a causal block that starts at `start` sees before its own tokens: the fixed region and the window,
    none counted twice."""
    if start <= pin_tokens:
        return start
    return pin_tokens + start - max(pin_tokens, start - window_tokens)
