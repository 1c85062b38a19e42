"""Attention cut over several sequences, on the CPU: the cut lists, a plain attention a sequence, and the merge."""

import random

import pytest
import torch
from cache_rollout import Rollout
from op_cases import random_spec

from bc_diffusers import ops
from bc_diffusers.attention import BACKENDS
from bc_diffusers.attention.backends import Backend
from bc_diffusers.attention.fa4 import best_tile
from bc_diffusers.attention.splits import Work, best_runs, cut_lists, makespan


def one_sequence(q, pool, table, keys, scale):
    """(out [rows, heads, dim], lse [rows, heads]) over the first `keys` slots of a page table."""
    page, group = pool.shape[3], q.shape[1] // pool.shape[2]
    listed = pool[table[:-(-keys // page)].long()].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :keys]
    k, v = listed.repeat_interleave(group, 1)
    scores = torch.einsum("rhd,hkd->rhk", q, k) * scale
    return torch.einsum("rhk,hkd->rhd", scores.softmax(-1), v), scores.logsumexp(-1)


def cut_attention(runs):
    """A backend that does on the CPU what the GPU ones do when they cut a call."""
    def run(q, layer, plan, scale):
        n, size, blocks = plan.num_tokens, plan.causal_block_size, plan.num_causal_blocks
        work = Work(n, blocks, size, q.shape[1], layer.pool.shape[2], q.shape[2], layer.pool.shape[3],
                    plan.pages.shape[1], plan._views.geometry.private_pages, 132)
        cut = cut_lists(plan._state.state, plan.pages, plan.totals, work, runs, plan.cache.spec.window_tokens)
        assert cut.tables.shape[0] == work.sequences(runs)
        partials = torch.zeros(runs + (blocks > 1), n, *q.shape[1:])
        lse = torch.zeros(runs, n, q.shape[1])
        tail_lse = torch.zeros(blocks, size, q.shape[1]) if blocks > 1 else None
        for i in range(runs):
            partials[i], lse[i] = one_sequence(q[:n], layer.pool, cut.tables[i], int(cut.lens[i]), scale)
        for j in range(blocks if blocks > 1 else 0):
            rows = slice(j * size, min((j + 1) * size, n))
            partials[-1, rows], own = one_sequence(q[rows], layer.pool, cut.tables[runs + j], int(cut.lens[runs + j]),
                                                   scale)
            tail_lse[j, :own.shape[0]] = own
        out = torch.zeros_like(q)
        ops.merge_partials_(partials, lse, out[:n], -1, cut.keys, tail_lse)
        return out

    return run


@pytest.mark.parametrize("seed", range(25))
def test_cut_attention_is_exact(seed, monkeypatch):
    r = random.Random(seed)
    spec, page, runs = random_spec(r), 1 << r.randrange(2, 6), r.randrange(1, 6)
    monkeypatch.setitem(BACKENDS, "cut", Backend("cut", lambda shape: None, cut_attention(runs)))
    rollout = Rollout(spec, r.randrange(spec.max_pin_tokens + 1), page=page, device=torch.device("cpu"), layers=1,
                      seed=seed, backend="cut")
    for _ in range(10):
        size, count = r.choice(spec.causal_blocks)
        n = r.randrange(1, min(size * count, spec.max_staged_tokens) + 1)
        rollout.step(n, size, padding=r.choice([0, 3]))


def test_makespan():
    assert makespan([(4, 2.0)], 4) == 2 and makespan([(5, 2.0)], 4) == 4
    assert makespan([(4, 2.0), (2, 3.0), (1, 1.0)], 4) == 5


def cosmos(**changes):
    return Work(**{"rows": 1576, "causal_blocks": 1, "causal_block_size": 1576, "heads": 32, "kv_heads": 8,
                   "head_dim": 128, "page_size": 128, "list_length": 312, "private_pages": 15, "processors": 132}
                | changes)


def test_calls_are_cut_where_the_last_round_would_be_nearly_empty():
    # 13 tiles of 32 heads are 416 blocks, 3.2 rounds on 132 processors.
    assert best_runs(cosmos()) > 1
    assert best_runs(cosmos(processors=104)) == 0, "exactly 4 rounds"
    assert best_runs(cosmos(rows=60, causal_block_size=60, heads=2, kv_heads=2, list_length=3)) == 0
    assert best_tile(cosmos()) == (192, 0), "33 tiles of 8 packed heads are exactly 2 rounds"
    assert best_tile(cosmos(rows=4680, causal_block_size=4680, heads=12, kv_heads=12, list_length=256))[0] == 128


def test_tables_are_wide_enough_and_no_wider_than_the_lists():
    work = cosmos(causal_blocks=4, causal_block_size=394, list_length=302, private_pages=6)
    assert work.sequences(4) == 8 and work.table_width(4) == 74 and work.tail_pages == 18
    assert cosmos().table_width(1) == 312
