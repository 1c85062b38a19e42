"""`block_causal_layout_` on the CPU: where every visible key of every causal block lies, as elementwise functions of
state = (committed C, pin P, evicted pages k, shift, C before the commit) and of the page table.

Position x lives in table slot y(x) = x for x < P, else x + pad - k * page_size, where pad = -P mod page_size:
history begins on a page of its own behind the fixed region. A causal block that starts at s sees table slots
A = [0, min(P, s)) and B = [y(max(P, s - W)), y(s)). Its key list is: fully visible pages of A and of B, then its
private pages, which begin with copies of the visible slots of the (at most three) partly visible pages: fixed tail,
window start, own start.
"""

import torch

from . import checks


def block_causal_layout_(state, fixed, ring, sizes, private_pages, pages, lengths, copy_src, copy_dst, scatter_src,
                         scatter_dst, scatter_dst2, page_size, window_tokens, copied_slots):
    checks.block_causal_layout_(state, fixed, ring, sizes, private_pages, pages, lengths, copy_src, copy_dst,
                                scatter_src, scatter_dst, scatter_dst2, page_size, window_tokens, copied_slots)
    S, W = page_size, window_tokens
    C, P, k, _, before = state.unbind()
    pad = (-P) % S
    base = (P + pad) // S  # the first page of the table that is a ring page
    off = pad - k * S

    def page_at(i):
        in_ring = ring[(i - base).clamp(0, ring.shape[0] - 1)]
        if not fixed.shape[0]:
            return in_ring.long()
        return torch.where(i < base, fixed[i.clamp(0, fixed.shape[0] - 1)], in_ring).long()

    def slot_at(y):
        return page_at(y // S) * S + y % S

    def part_of(flat, start, *shape):
        count = 1
        for n in shape:
            count *= n
        return flat[start:start + count].view(shape)

    for b, m, private_len, list_len, rows, extra, *starts in sizes.tolist():
        at_block, at_pages, at_private, at_copy, at_scatter = starts
        private = part_of(private_pages, at_private, m, private_len).long()
        s = (C + torch.arange(m) * b)[:, None]
        a_end = torch.minimum(P, s)
        has_b = s > P
        b_begin = torch.where(has_b, torch.maximum(P, s - W) + off, a_end)
        b_end = torch.where(has_b, s + off, a_end)
        a_pages, tail = a_end // S, a_end % S
        first, last = (b_begin + S - 1) // S, b_end // S
        head = torch.minimum(b_end, first * S) - b_begin
        own_start = torch.where(last >= first, b_end - last * S, 0)
        full_pages = a_pages + (last - first).clamp(min=0)
        copied = tail + head + own_start
        part_of(lengths, at_block, m).copy_((full_pages * S + copied)[:, 0])

        i = torch.arange(list_len)[None]
        full = page_at(torch.where(i < a_pages, i, first + i - a_pages))
        own = private.gather(1, (i - full_pages).clamp(0, private_len - 1))
        listed = torch.where(i < full_pages, full, torch.where(i < full_pages + private_len, own, 0))
        part_of(pages, at_pages, m, list_len).copy_(listed)

        q = torch.arange(copied_slots)[None].expand(m, -1)
        y = torch.where(q < tail, a_pages * S + q,
                        torch.where(q < tail + head, b_begin + q - tail, last * S + q - tail - head))
        x = torch.where(y < P, y, y - off)
        to = private.gather(1, q // S) * S + q % S
        visible, old = q < copied, x < C
        # Once the fixed region is full its tail never moves, and its private copies stay where they are.
        moving = (y >= P) | (before < P)
        part_of(copy_src, at_copy, m, copied_slots).copy_(torch.where(visible & old & moving, slot_at(y), -1))
        part_of(copy_dst, at_copy, m, copied_slots).copy_(torch.where(visible & old & moving, to, -1))

        r = torch.arange(rows)
        x_row = C + r
        table = slot_at(torch.where(x_row < P, x_row, x_row + off))
        j, o = r // b, r % b
        own_slot = copied[j, 0] + o
        mine = private[j, own_slot // S] * S + own_slot % S
        part_of(scatter_src, at_scatter, rows).copy_(r)
        part_of(scatter_dst, at_scatter, rows).copy_(table)
        part_of(scatter_dst2, at_scatter, rows).copy_(mine)
        # A copied slot whose token is not committed was staged by an earlier causal block of the same forward, which
        # therefore writes it (causal block 0 has none).
        staged = (visible & ~old)[1:]
        at_extra = at_scatter + rows
        part_of(scatter_src, at_extra, extra).copy_(torch.where(staged, (x - C)[1:], -1).reshape(-1))
        part_of(scatter_dst, at_extra, extra).copy_(torch.where(staged, to[1:], -1).reshape(-1))
        part_of(scatter_dst2, at_extra, extra).fill_(-1)
