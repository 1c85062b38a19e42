"""resize_prefix: the fixed region's first tokens become more or fewer, everything behind keeps its K and V."""

import pytest
import torch

from bc_diffusers import BlockCausalKVCache, RolloutSpec, block_causal_attention


LAYERS, HEADS, DIM = 2, 2, 8


def random_kv(n, seed, device):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, n, HEADS, DIM, generator=generator).to(device)


class Dense:
    """The same rollout as plain tensors by position."""

    def __init__(self, device, page_size, window, chunk, block, prefix, others, max_pin):
        self.device = device
        self.window, self.chunk_tokens, self.block, self.others = window, chunk, block, others
        spec = RolloutSpec(window, chunk, {chunk: 1, block: -(-chunk // block)}, max_pin)
        self.cache = BlockCausalKVCache(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, page_size=page_size,
                                        pool_tokens=BlockCausalKVCache.pool_tokens_for(spec, page_size),
                                        dtype=torch.float32, device=device)
        self.cache.open(spec, prefix + others)
        self.prefix = prefix
        self.kv = torch.zeros(2, 0, HEADS, DIM, device=device)
        if prefix:
            self.write_prefix(seed=99)
            self.cache.commit(prefix)

    def write_prefix(self, seed):
        new = random_kv(self.prefix, seed, self.device)
        for layer in range(LAYERS):
            self.cache.write_range(layer, 0, *(new * (layer + 1)))
        self.kv = torch.cat((new, self.kv[:, self.prefix:]), 1)

    def resize(self, new, seed):
        self.cache.resize_prefix(self.prefix, new)
        self.kv = torch.cat((torch.zeros(2, new, HEADS, DIM, device=self.device), self.kv[:, self.prefix:]), 1)
        self.prefix = new
        if new:
            self.write_prefix(seed)

    def forward(self, n, size, seed):
        """Checks a forward of n tokens in every layer against dense attention."""
        staged, pin = random_kv(n, seed, self.device), self.prefix + self.others
        kv = torch.cat((self.kv, staged), 1)
        plan, start = self.cache.plan(n, size), self.kv.shape[1]
        q = random_kv(n, seed + 1, self.device)[:1]
        for layer in range(LAYERS):
            out = block_causal_attention(q, *(staged * (layer + 1))[:, None], plan, layer)
            for s in range(0, n, size):
                e = min(s + size, n)
                x = torch.arange(start + e, device=self.device)
                seen = x[(x >= start + s - self.window) | (x < pin)]
                k, v = (kv[:, seen] * (layer + 1)).transpose(1, 2)
                expected = torch.nn.functional.scaled_dot_product_attention(q[0, s:e].transpose(0, 1), k, v)
                torch.testing.assert_close(out[0, s:e], expected.transpose(0, 1), rtol=0, atol=1e-5)
        return kv

    def step(self, n, seed):
        self.forward(n, self.chunk_tokens, seed)
        self.kv = self.forward(n, self.block, seed + 2)
        self.cache.commit()
        assert self.cache.committed == self.kv.shape[1]


@pytest.mark.parametrize("others", [0, 5, 30])  # pinned behind the prefix; 30 are not all committed at once
@pytest.mark.parametrize("window", [0, 7, 40])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_attention_sees_the_new_prefix_and_the_kept_history(device, page_size, window, others):
    rollout = Dense(device, page_size, window, chunk=11, block=3, prefix=6, others=others, max_pin=20 + others)
    for i, new in enumerate((9, 9, 2, 17, 0, 20, 1)):
        rollout.step(11 if i % 3 else 8, seed=10 * i)
        rollout.resize(new, seed=500 + i)
    rollout.step(11, seed=900)


def test_addresses_stay_and_so_do_plans_of_the_future(device):
    rollout = Dense(device, 4, 9, chunk=8, block=8, prefix=3, others=0, max_pin=10)
    before = {name: t.data_ptr() for name, t in rollout.cache.device_tensors()}
    key = rollout.cache.plan(8, 8).graph_key
    rollout.step(8, 0)
    rollout.resize(10, 1)
    assert {name: t.data_ptr() for name, t in rollout.cache.device_tensors()} == before
    assert rollout.cache.plan(8, 8).graph_key == key


@pytest.mark.parametrize("old, new, message", [
    (3, 11, "makes pin_tokens 11, the spec's max_pin_tokens is 10"),
    (3, -1, "prefix of -1 tokens"),
    (4, 3, "must be committed and pinned: 11 are committed, 3 pinned"),
])
def test_misuse_is_refused_and_leaves_the_cache_as_it_was(device, old, new, message):
    rollout = Dense(device, 4, 9, chunk=8, block=8, prefix=3, others=0, max_pin=10)
    rollout.step(8, 0)
    with pytest.raises(ValueError, match=message):
        rollout.cache.resize_prefix(old, new)
    rollout.step(8, 20)
