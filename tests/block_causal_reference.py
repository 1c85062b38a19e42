"""Block-causal attention over an endless rollout, stated by position: dense, fp32, no pages, no kernels.

It is written from the contract alone and shares nothing with the library, so tests and benchmarks can both hold the
library against it, on any device. C tokens are committed, the first P = ``pin_tokens`` of them stay for ever, and W =
``window_tokens``. A forward of n tokens cut in causal blocks of size b stages positions [C, C + n); causal block j is
[s, e) with s = C + j·b and e = min(s + b, C + n), and its queries see exactly

    { x < e :  x >= s − W  or  x < P }
"""

import torch


def causal_block_spans(committed, num_tokens, size):
    """Positions [start, end) of every causal block of one forward; the last may be short."""
    end = committed + num_tokens
    return [(start, min(start + size, end)) for start in range(committed, end, size)]


def visible_positions(start, end, pin_tokens, window_tokens):
    """Ascending positions that the causal block [start, end) sees, its own included: a list of ints."""
    window = max(0, start - window_tokens)
    pinned = min(pin_tokens, end)
    return list(range(min(pinned, window))) + list(range(window, end))


def kept_positions(committed, pin_tokens, window_tokens):
    """Ascending positions that some later forward may still see: a list of ints."""
    pinned = min(pin_tokens, committed)
    return list(range(pinned)) + list(range(max(pinned, committed - window_tokens), committed))


def block_causal_mask(chunks, size, pin_tokens, window_tokens, device=None):
    """The mask of a whole rollout in one dense forward.

    Args:
        chunks: tokens of each committed chunk, in order.
        size: causal block size of the pass that was committed; a chunk never shares a causal block with another.

    Returns:
        bool [sum(chunks), sum(chunks)], True where the row's query sees the column's key.
    """
    total = sum(chunks)
    mask = torch.zeros(total, total, dtype=torch.bool, device=device)
    committed = 0
    for chunk in chunks:
        for start, end in causal_block_spans(committed, chunk, size):
            mask[start:end, max(0, start - window_tokens) : end] = True
            mask[start:end, : min(pin_tokens, end)] = True
        committed += chunk
    return mask


def dense_attention(q, k, v, scale=None):
    """softmax(q kᵀ · scale) v in fp32, one K/V head after the other so that real geometries fit in memory.

    Args:
        q: [rows, heads, head_dim]. Query head h reads K/V head h // (heads / kv_heads).
        k, v: [keys, kv_heads, head_dim].
        scale: 1/sqrt(head_dim) unless given.

    Returns:
        fp32 [rows, heads, head_dim].
    """
    rows, heads, head_dim = q.shape
    group = heads // k.shape[1]
    scale = head_dim**-0.5 if scale is None else scale
    out = torch.empty(rows, heads, head_dim, dtype=torch.float32, device=q.device)
    for head in range(k.shape[1]):
        mine = slice(head * group, (head + 1) * group)
        scores = (q[:, mine].float() * scale).transpose(0, 1) @ k[:, head].float().T
        out[:, mine] = (torch.softmax(scores, dim=-1) @ v[:, head].float()).transpose(0, 1)
    return out


class ReferenceRollout:
    """K and V of one rollout by position, and the attention that the contract asks for.

    Only what a later forward may see is kept, so it follows a rollout of any length. A position that was never written
    in a layer reads as NaN. K and V are stored in the dtype in which they come; arithmetic is fp32.
    """

    def __init__(self, num_layers, num_kv_heads, head_dim, *, window_tokens, pin_tokens=0, device="cpu"):
        self.num_layers, self.window_tokens, self.pin_tokens = num_layers, window_tokens, pin_tokens
        self.committed = 0
        self._row_shape = (num_kv_heads, head_dim)
        self._device = torch.device(device)
        self._rows = {}  # position -> row of the two tensors below
        self._k = self._v = None  # [layers, rows, kv_heads, head_dim]

    @property
    def window_start(self):
        return max(min(self.pin_tokens, self.committed), self.committed - self.window_tokens)

    def write(self, layer, start, k, v):
        """Sets [start, start + n) in one layer; k, v [n, kv_heads, head_dim]."""
        positions = range(start, start + k.shape[0])
        self._make_room([x for x in positions if x not in self._rows], k.dtype)
        rows = self._index(positions)
        self._k[layer, rows], self._v[layer, rows] = k, v

    def zero_values(self, start, stop):
        """V = 0 at [start, stop) in every layer, where anything was written."""
        rows = self._index([x for x in range(start, stop) if x in self._rows])
        if rows.numel():
            self._v[:, rows] = 0

    def read(self, layer, positions):
        """(k, v), each [len(positions), kv_heads, head_dim], in the order asked for."""
        rows = self._index(positions)
        return self._k[layer, rows], self._v[layer, rows]

    def attend(self, layer, q, num_tokens, size):
        """What a forward over the staged positions must return; K and V of these must have been written.

        Args:
            q: [1, rows, heads, head_dim], rows >= num_tokens.

        Returns:
            fp32 [1, rows, heads, head_dim], 0 in the rows past ``num_tokens``.
        """
        out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        for start, end in causal_block_spans(self.committed, num_tokens, size):
            k, v = self.read(layer, visible_positions(start, end, self.pin_tokens, self.window_tokens))
            own = slice(start - self.committed, end - self.committed)
            out[0, own] = dense_attention(q[0, own], k, v)
        return out

    def commit(self, num_tokens):
        """The staged tokens become history; what nobody can see any more is dropped, left-over staged tokens too."""
        self.committed += num_tokens
        kept = kept_positions(self.committed, self.pin_tokens, self.window_tokens)
        kept = [x for x in kept if x in self._rows]
        if self._k is None:
            return
        rows = self._index(kept)
        self._k, self._v = self._k[:, rows], self._v[:, rows]
        self._rows = {x: row for row, x in enumerate(kept)}

    def _index(self, positions):
        return torch.tensor([self._rows[x] for x in positions], dtype=torch.long, device=self._device)

    def _make_room(self, positions, dtype):
        if self._k is None:
            self._k = torch.empty(self.num_layers, 0, *self._row_shape, dtype=dtype, device=self._device)
            self._v = self._k.clone()
        if positions:
            shape = (self.num_layers, len(positions), *self._row_shape)
            room = torch.full(shape, float("nan"), dtype=self._k.dtype, device=self._device)
            self._rows.update({x: self._k.shape[1] + i for i, x in enumerate(positions)})
            self._k, self._v = torch.cat([self._k, room], 1), torch.cat([self._v, room], 1)
