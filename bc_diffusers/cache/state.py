"""The device tensors of one opened spec: allocated once, rewritten in place, never moved."""

import torch

from .. import ops
from .geometry import Geometry


class RolloutState:
    """Everything that kernels read, besides the pool, for one spec. Kept across close and open."""

    def __init__(self, index: int, geometry: Geometry, device: torch.device):
        self.index, self.geometry, self.device = index, geometry, device
        fixed, ring, private = geometry.page_roles()
        self.fixed_ids, self.ring_ids = fixed, ring

        def int32(values):
            return torch.tensor(values, dtype=torch.int32, device=device)

        def empty_list(n):
            return torch.full((n,), -1, dtype=torch.int32, device=device)

        self.state = torch.zeros(5, dtype=torch.int64, device=device)
        self.fixed, self.ring, self.ring_start = int32(fixed), int32(ring), int32(ring)
        self.sizes = int32([s.row() for s in geometry.sizes.values()])
        flat = [0] * geometry.flat_private
        for s in geometry.sizes.values():
            ids = [page for block in private[s.size] for page in block]
            flat[s.at_private:s.at_private + len(ids)] = ids
        self.private = int32(flat)
        self.pages = torch.zeros(geometry.flat_pages, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(geometry.flat_blocks, dtype=torch.int32, device=device)
        self.totals = torch.zeros(geometry.flat_blocks, dtype=torch.int32, device=device)
        self.copy_src, self.copy_dst = empty_list(geometry.flat_copy), empty_list(geometry.flat_copy)
        self.scatter_src = empty_list(geometry.flat_scatter)
        self.scatter_dst = empty_list(geometry.flat_scatter)
        self.scatter_dst2 = empty_list(geometry.flat_scatter)
        self.views = {s.size: SizeViews(self, s) for s in geometry.sizes.values()}
        self.planned: set[tuple[int, int]] = set()

    def reset(self, pin_tokens: int) -> None:
        self.state.zero_()
        self.state[1:2].fill_(pin_tokens)
        self.ring.copy_(self.ring_start)
        self.totals.zero_()
        self.layout()

    def layout(self) -> None:
        spec, g = self.geometry.spec, self.geometry
        ops.block_causal_layout_(self.state, self.fixed, self.ring, self.sizes, self.private, self.pages, self.lengths,
                                 self.copy_src, self.copy_dst, self.scatter_src, self.scatter_dst, self.scatter_dst2,
                                 g.page_size, spec.window_tokens, g.copied_slots)

    def commit(self, pool: torch.Tensor, num_tokens: int) -> None:
        """The device part of a commit: every position is a device value, `num_tokens` a kernel argument."""
        spec, g = self.geometry.spec, self.geometry
        ops.commit_(pool, self.state, self.fixed, self.ring, self.sizes, self.private, self.pages, self.lengths,
                    self.copy_src, self.copy_dst, self.scatter_src, self.scatter_dst, self.scatter_dst2, num_tokens,
                    g.page_size, spec.window_tokens, g.copied_slots)

    def forget_previous_commit(self) -> None:
        """Makes the layout list every copied slot, the tail of a full fixed region included."""
        self.state[4:5].fill_(-1)
        self.layout()

    def move_pin(self, tokens: int) -> None:
        """Lengthens the fixed region, and the committed tokens with it, by `tokens` (negative: shortens)."""
        self.state[:2].add_(tokens)
        self.forget_previous_commit()

    def tensors(self):
        for name in ("state", "fixed", "ring", "sizes", "private", "pages", "lengths", "totals", "copy_src",
                     "copy_dst", "scatter_src", "scatter_dst", "scatter_dst2"):
            yield name, getattr(self, name)


class SizeViews:
    """One causal-block size's parts of the flat tensors, as views with fixed addresses."""

    def __init__(self, state: RolloutState, s):
        blocks = slice(s.at_block, s.at_block + s.count)
        entries = slice(s.at_scatter, s.at_scatter + s.rows + s.extra)
        self.geometry = s
        self.pages = state.pages[s.at_pages:s.at_pages + s.count * s.list_length].view(s.count, s.list_length)
        self.lengths, self.totals = state.lengths[blocks], state.totals[blocks]
        self.src, self.dst, self.dst2 = (t[entries] for t in (state.scatter_src, state.scatter_dst,
                                                              state.scatter_dst2))
