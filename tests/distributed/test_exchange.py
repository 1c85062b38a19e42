"""The exchange and the hooks, for any shape: ranks are threads here, so that hundreds of shapes take a second."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bc_diffusers.attention import ulysses
from bc_diffusers.attention.holder import PlanHolder
from bc_diffusers.attention.ulysses import SequenceEnds, UlyssesGroup


class Threads:
    """Collectives among threads. Each thread is a rank; `run(function)` calls `function(group)` on all."""

    def __init__(self, degree: int):
        self.degree, self.barrier, self.slots = degree, threading.Barrier(degree, timeout=30), [None] * degree
        self.own = threading.local()

    def _post(self, x):
        self.slots[self.own.rank] = x
        self.barrier.wait()
        posted = list(self.slots)
        self.barrier.wait()
        return posted

    def all_to_all_single(self, received, sent, group):
        assert received.is_contiguous() and sent.is_contiguous()
        parts = [x.chunk(self.degree)[self.own.rank] for x in self._post(sent)]
        received.copy_(torch.cat(parts))

    def all_gather(self, received, sent, group):
        assert received.is_contiguous() and sent.is_contiguous()
        received.copy_(torch.cat(self._post(sent)))

    def run(self, function) -> list:
        def on_rank(rank):
            self.own.rank = rank
            return function(UlyssesGroup(None, self.degree, rank))

        dist = SimpleNamespace(all_to_all_single=self.all_to_all_single)
        with mock.patch.multiple(ulysses, dist=dist, _all_gather=self.all_gather), \
                ThreadPoolExecutor(self.degree) as pool:
            return list(pool.map(on_rank, range(self.degree)))


@given(degree=st.integers(1, 4), tokens=st.integers(1, 13), groups=st.integers(1, 3), queries=st.integers(1, 3),
       dim=st.integers(1, 3))
def test_exchange_is_a_cut_along_heads_and_back(degree, tokens, groups, queries, dim):
    """K/V heads = `groups` a rank, query heads = `queries` times as many."""
    kv_heads = groups * degree
    heads = kv_heads * queries
    q, k, v = (torch.randn(1, tokens, n, dim) for n in (heads, kv_heads, kv_heads))

    def on_rank(group):
        local = [group.split_tokens(x) for x in (q, k, v)]
        rows = -(-tokens // degree)
        assert [x.shape[1] for x in local] == [rows] * 3
        exchanged = group.exchange_qkv(*local, num_tokens=tokens)
        for x, whole in zip(exchanged, (q, k, v)):
            assert torch.equal(x, group.own_heads(whole))
        back = group.exchange_output(exchanged[0], rows)
        assert torch.equal(back, local[0])  # the padding comes back as zeros
        return group.join_tokens(back, tokens)

    assert all(torch.equal(out, q) for out in Threads(degree).run(on_rank))


@given(degree=st.integers(1, 4), tokens=st.integers(1, 9), shape=st.lists(st.integers(1, 3), max_size=2))
def test_split_and_join_any_shape(degree, tokens, shape):
    x = torch.randn(1, tokens, *shape)
    for out in Threads(degree).run(lambda group: group.join_tokens(group.split_tokens(x), tokens)):
        assert torch.equal(out, x)


class Toy(torch.nn.Module):
    """Calls its block by position or by name; records what the block and the last module see."""

    def __init__(self, by_name: bool, flat: bool):
        super().__init__()
        self.block, self.last, self.by_name, self.flat = torch.nn.Identity(), torch.nn.Identity(), by_name, flat
        self.block.forward = self._block
        self.seen = {}

    def _block(self, *args, **kwargs):
        self.seen["block"] = kwargs["tokens"] if kwargs else args[1]
        return self.seen["block"]

    def forward(self, x, timestep=None):
        self.seen["timestep"] = timestep
        x = x[0] if self.flat else x
        return self.last(self.block(tokens=x) if self.by_name else self.block("other", x))


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("flat", [False, True])
def test_hooks_act_in_cached_forwards_only(by_name, flat):
    x, timestep = torch.randn(1, 5, 2), torch.arange(5.0)[None]

    def on_rank(group):
        toy, holder = Toy(by_name, flat), PlanHolder()
        holder.share_sequence(group)
        holder.place_hooks(toy, SequenceEnds(toy.block, toy.last, position=1, name="tokens"))
        assert torch.equal(toy(x), x[0] if flat else x) and toy.seen["block"].shape[-2] == 5
        holder.active = SimpleNamespace()  # a prompt's forward has no plan
        assert toy(x).shape[-2] == 5 and toy.seen["block"].shape[-2] == 5
        holder.active = SimpleNamespace(plan=SimpleNamespace(num_tokens=5), ulysses=group)
        assert torch.equal(toy(x, timestep=timestep), x[0] if flat else x)
        assert toy.seen["block"].shape[-2] == 3 and toy.seen["timestep"].shape == (1, 3)
        toy(x, timestep=torch.ones(1))
        assert toy.seen["timestep"].shape == (1,)
        holder.share_sequence(None)
        assert toy(x).shape[-2] == 5 and toy.seen["block"].shape[-2] == 5
        return True

    assert all(Threads(2).run(on_rank))


def test_hooks_move_to_a_module_that_took_the_place():
    def on_rank(group):
        toy, holder = Toy(False, False), PlanHolder()
        holder.share_sequence(group)
        holder.place_hooks(toy, SequenceEnds(toy.block, toy.last, position=1))
        before = toy.last
        toy.last = torch.nn.Sequential(before)  # as a LoRA wraps a layer
        holder.place_hooks(toy, SequenceEnds(toy.block, toy.last, position=1))
        assert not before._forward_hooks and len(toy.last._forward_hooks) == 1
        assert len(toy.block._forward_pre_hooks) == 1
        holder.active = SimpleNamespace(plan=SimpleNamespace(num_tokens=5), ulysses=group)
        return toy(torch.randn(1, 5, 2)).shape[1] == 5

    assert all(Threads(2).run(on_rank))


def test_two_ways_at_once_are_refused():
    holder = PlanHolder()
    config = SimpleNamespace(context_parallel_config=None)
    holder.processors = [SimpleNamespace(_parallel_config=config)]
    assert holder.ulysses is None
    holder.share_sequence(UlyssesGroup(None, 2, 0))
    with pytest.raises(RuntimeError, match="use one of them"):
        _ = holder.ulysses
