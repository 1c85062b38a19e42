"""A cache and the position-based reference side by side: what is done to one is done to the other."""

import torch

from bc_diffusers import BlockCausalKVCache, block_causal_attention
from block_causal_reference import ReferenceRollout, causal_block_spans, kept_positions, visible_positions


TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def pool_of(cache):
    """The pool, [layers, pages, 2, kv_heads, page, head_dim]: the only thing of six dimensions that kernels read."""
    (pool,) = [tensor for _, tensor in cache.device_tensors() if tensor.dim() == 6]
    return pool


def snapshot(cache):
    """Everything that tells two states of a cache apart: host counters, mirror and all that kernels read.

    NaN compares unequal to itself, so tensors are kept as bytes.
    """
    host = {"pool_bytes": cache.pool_bytes, "page_table": [int(page) for page in cache.page_table()]}
    host.update(committed=cache.committed, window_start=cache.window_start)
    return host, {name: tensor.detach().cpu().clone() for name, tensor in cache.device_tensors()}


def assert_same_state(before, after):
    assert before[0] == after[0]
    assert before[1].keys() == after[1].keys()
    for name, tensor in before[1].items():
        assert torch.equal(_bytes(tensor), _bytes(after[1][name])), f"{name} changed"


def _bytes(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


class Rollout:
    """Runs a rollout through a cache and through the reference.

    Values of K and V, by ``data``:
        "random": normal, other ones in every layer and at every call.
        "coded": V of position x is one-hot over (kv head, head_dim) at x, times layer + 1, and queries are 0, so the
            output counts how often every single position was seen.
        "stamped": K and V of position x in layer i are x + 1 + 4096·i in every element, to be read out of the pool.
    """

    def __init__(
        self,
        spec,
        pin_tokens=0,
        *,
        page,
        device,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        dtype=torch.float32,
        data="random",
        seed=0,
        pool_tokens=None,
        backend="reference",
    ):
        self.backend = backend
        self.layers, self.heads, self.kv_heads, self.head_dim = layers, heads, kv_heads, head_dim
        self.page, self.device, self.dtype, self.data = page, device, dtype, data
        self.generator = torch.Generator().manual_seed(seed)
        self.cache = BlockCausalKVCache(
            num_layers=layers,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            pool_tokens=pool_tokens or BlockCausalKVCache.pool_tokens_for(spec, page_size=page),
            page_size=page,
            dtype=dtype,
            device=device,
        )
        self.open(spec, pin_tokens)

    # -- the rollout ------------------------------------------------------------------------------------------------

    def open(self, spec, pin_tokens=0):
        self.spec, self.pin_tokens = spec, pin_tokens
        self.cache.open(spec, pin_tokens=pin_tokens)
        self.reference = ReferenceRollout(
            self.layers,
            self.kv_heads,
            self.head_dim,
            window_tokens=spec.window_tokens,
            pin_tokens=pin_tokens,
            device=self.device,
        )

    def reopen(self, spec=None, pin_tokens=0):
        self.cache.close()
        self.open(spec or self.spec, pin_tokens)

    def forward(self, num_tokens, size, *, padding=0, plan=None):
        """One pass over the staged positions in every layer, checked against the reference. Padding rows are NaN."""
        plan = plan or self.cache.plan(num_tokens, size)
        for layer in range(self.layers):
            k, v = self._kv(layer, self.cache.committed, num_tokens)
            q = self._normal(num_tokens, self.heads) * (0 if self.data == "coded" else 2)
            self.reference.write(layer, self.cache.committed, k, v)
            q, k, v = (self._pad(t, padding) for t in (q, k, v))
            out = block_causal_attention(q, k, v, plan, layer=layer, backend=self.backend)
            assert out.shape == q.shape and out.dtype == q.dtype
            assert not out[:, num_tokens:].any(), "padding rows must come back as zeros"
            if self.data == "coded":
                self._check_counts(out, layer, num_tokens, size)
            else:
                expected = self.reference.attend(layer, q, num_tokens, size)
                error = (out.float() - expected).abs().max().item()
                assert error <= TOLERANCE[self.dtype], f"layer {layer}: off by {error}"
        return plan

    def commit(self, num_tokens, *, explicit=False):
        self.cache.commit(num_tokens) if explicit else self.cache.commit()
        self.reference.commit(num_tokens)
        assert self.cache.committed == self.reference.committed
        assert self.cache.window_start == self.reference.window_start

    def step(self, num_tokens, size, *, passes=1, padding=0):
        for _ in range(passes):
            self.forward(num_tokens, size, padding=padding)
        self.commit(num_tokens)

    def write(self, start, stop, layers=None):
        for layer in range(self.layers) if layers is None else layers:
            k, v = self._kv(layer, start, stop - start)
            self.cache.write_range(layer, start, k, v)
            self.reference.write(layer, start, k, v)

    def zero_values(self, start, stop):
        self.cache.zero_values(start, stop)
        self.reference.zero_values(start, stop)

    def put(self, num_tokens):
        """Commits tokens without a forward: write_range at the end, then commit(n)."""
        self.write(self.cache.committed, self.cache.committed + num_tokens)
        self.commit(num_tokens, explicit=True)

    def skip(self, num_tokens, size):
        """Commits tokens that nobody will look at."""
        self.cache.plan(num_tokens, size)
        self.commit(num_tokens)

    def poison(self):
        """NaN in every slot that is on no listed page and holds no kept token."""
        pool = pool_of(self.cache)
        harmless = torch.ones(pool.shape[1], self.page, dtype=torch.bool)
        for size, _ in self.spec.causal_blocks:
            harmless[self.cache.causal_block_pages(size).cpu().long().flatten()] = False
        for x in kept_positions(self.cache.committed, self.pin_tokens, self.spec.window_tokens):
            harmless[self.slot(x)] = False
        pages, slots = (t.to(self.device) for t in harmless.nonzero(as_tuple=True))
        pool[:, pages, :, :, slots] = float("nan")
        return pages.numel()

    # -- what the pool holds ----------------------------------------------------------------------------------------

    def slot(self, x):
        """(pool page, offset) of a kept or staged position: history starts on a page of its own behind the pin."""
        table, page, pin = self.cache.page_table(), self.page, self.pin_tokens
        if x < pin:
            return int(table[x // page]), x % page
        evicted = max(0, self.cache.window_start - pin) // page
        ring = table[-(-pin // page) :]
        return int(ring[(x - pin) // page - evicted]), (x - pin) % page

    def listed(self, size, index, own, layer=0):
        """V (first element) at the keys of one causal block, in the order of its page list: keys before, own keys."""
        pages = self.cache.causal_block_pages(size)[index].cpu().tolist()
        before = int(self.cache.causal_block_lengths(size)[index])
        keys = pool_of(self.cache)[layer, pages].cpu()[:, :, 0, :, 0]  # [pages, 2, page]
        assert torch.equal(keys[:, 0], keys[:, 1]), "K and V of a stamped rollout are the same"
        keys = keys[:, 1].flatten()[: before + own].tolist()
        assert len(keys) == before + own, "the page list is too short for its length"
        return keys[:before], keys[before:]

    def write_staged(self, num_tokens, size):
        """What a forward writes, without its attention."""
        self.cache.plan(num_tokens, size)
        for layer in range(self.layers):
            k, v = self._kv(layer, self.cache.committed, num_tokens)
            self.cache.write_staged(layer, k, v)

    def check_lists(self, num_tokens, size, layers=None):
        """After write_staged of stamped data: every list holds exactly the visible keys, in every layer."""
        for j, (start, end) in enumerate(causal_block_spans(self.cache.committed, num_tokens, size)):
            visible = visible_positions(start, end, self.pin_tokens, self.spec.window_tokens)
            for layer in range(self.layers):
                before, own = self.listed(size, j, end - start, layer)
                before, own = ([x - 1 - 4096 * layer for x in part] for part in (before, own))
                assert own == list(range(start, end)), (self.spec, j, own)
                assert sorted(before + own) == visible, (self.spec, self.pin_tokens, self.cache.committed, j, before)

    # -- data -------------------------------------------------------------------------------------------------------

    def _check_counts(self, out, layer, num_tokens, size):
        group = self.heads // self.kv_heads
        for start, end in causal_block_spans(self.cache.committed, num_tokens, size):
            visible = visible_positions(start, end, self.pin_tokens, self.spec.window_tokens)
            expected = self.reference.read(layer, visible)[1].sum(0).repeat_interleave(group, 0)
            rows = slice(start - self.cache.committed, end - self.cache.committed)
            counts = out[0, rows] * len(visible)
            wrong = (counts - expected).abs().amax(dim=(0, 1)) if counts.numel() else counts
            assert torch.allclose(counts, expected.expand_as(counts), atol=1e-2), (
                f"layer {layer}, causal block [{start}, {end}), pin {self.pin_tokens}, {self.spec}: "
                f"wrongly counted codes {wrong.gt(1e-2).nonzero().flatten().tolist()[:20]}"
            )

    def _kv(self, layer, start, n):
        if self.data == "random":
            return self._normal(n, self.kv_heads), self._normal(n, self.kv_heads)
        if self.data == "stamped":
            x = (torch.arange(start, start + n) + 1 + 4096 * layer).view(-1, 1, 1)
            x = x.expand(n, self.kv_heads, self.head_dim).to(self.device, self.dtype)
            return x, x.clone()
        codes = self.kv_heads * self.head_dim
        assert start + n <= codes, f"{codes} codes do not name {start + n} positions"
        v = torch.zeros(n, codes)
        v[torch.arange(n), torch.arange(start, start + n)] = layer + 1
        return self._normal(n, self.kv_heads), v.view(n, self.kv_heads, self.head_dim).to(self.device, self.dtype)

    def _normal(self, n, heads):
        x = torch.randn(n, heads, self.head_dim, generator=self.generator)
        return x.to(self.device, self.dtype)

    def _pad(self, x, rows):
        if rows:
            x = torch.cat([x, x.new_full((rows, *x.shape[1:]), float("nan"))])
        return x[None]
