"""The operators on the CPU against formulas written here, their refusals, opcheck and torch.compile."""

import math

import pytest
import torch
from op_cases import CASES, assert_same_storages, checkable_seeds, mirrored, noise, whole_storage
from op_refusals import REFUSALS

from bc_diffusers import ops


SEEDS = range(40)


def call(name, args, kwargs):
    getattr(ops, name)(*args, **kwargs)


@pytest.mark.parametrize("name,args,kwargs,message", REFUSALS, ids=lambda x: x if isinstance(x, str) else None)
def test_refuses(name, args, kwargs, message):
    before = [whole_storage(t).clone() for t in args if isinstance(t, torch.Tensor)]
    with pytest.raises(ValueError, match=message):
        call(name, args, kwargs)
    after = [whole_storage(t) for t in args if isinstance(t, torch.Tensor)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_refuses_two_devices():
    with pytest.raises(ValueError, match="all tensors must be on one device, got rows on cpu, shift on meta"):
        from bc_diffusers.ops import checks

        checks.rotate_rows_(torch.zeros(3), torch.zeros(1, dtype=torch.int64, device="meta"))


def test_a_device_without_kernels_is_refused_by_name():
    op = torch.ops.bc_diffusers.rotate_rows_.default
    from bc_diffusers.ops import _find_kernel

    with pytest.raises(NotImplementedError, match="rotate_rows_ has no kernel for tensors on cpu"):
        _find_kernel(op)(torch.zeros(3), torch.tensor(1))


@pytest.mark.parametrize("seed", SEEDS)
def test_rotate_rows(seed):
    (rows, shift), _ = CASES["rotate_rows_"](seed)
    before = rows.clone()
    ops.rotate_rows_(rows, shift)
    assert torch.equal(rows, before.roll(-int(shift), -1))


@pytest.mark.parametrize("seed", SEEDS)
def test_advance_state(seed):
    (state, n, window, page), _ = CASES["advance_state_"](seed)
    committed, pin, evicted, *_ = state.tolist()
    ops.advance_state_(state, n, window, page)
    after = committed + n
    kept_from = max(after - window, min(pin, after))
    pages = max(0, kept_from - pin) // page
    assert state.tolist() == [after, pin, pages, pages - evicted, committed]


def slots_of(pool):
    """[slots, 2, heads, dim], a copy, from a pool [pages, 2, heads, page, dim]."""
    return pool.permute(0, 3, 1, 2, 4).flatten(0, 1).clone()


@pytest.mark.parametrize("seed", SEEDS)
def test_scatter_kv_slots(seed):
    args, kwargs = CASES["scatter_kv_slots_"](seed)
    k, v, pool, dst = args
    expected = slots_of(pool.float())
    n = kwargs["num_tokens"] if kwargs["num_tokens"] >= 0 else k.shape[0]
    rows = kwargs["src"].tolist() if "src" in kwargs else range(dst.shape[0])
    for targets in (dst, kwargs["dst2"]):
        for row, slot in zip(rows, [] if targets is None else targets.tolist(), strict=targets is not None):
            if 0 <= row < n and slot >= 0:
                expected[slot, 0], expected[slot, 1] = k[row].float(), v[row].float()
    call("scatter_kv_slots_", args, kwargs)
    assert torch.equal(slots_of(pool.float()), expected)
    if "totals" in kwargs:
        size = kwargs["causal_block_size"]
        own = [min(size, n - j * size) for j in range(kwargs["totals"].shape[0])]
        assert kwargs["totals"].tolist() == [a + b if b > 0 else 0
                                             for a, b in zip(kwargs["lengths"].tolist(), own, strict=True)]


@pytest.mark.parametrize("seed", SEEDS)
def test_copy_kv_slots(seed):
    (pool, src, dst), _ = CASES["copy_kv_slots_"](seed)
    expected = [slots_of(layer.float()) for layer in pool]
    for layer in expected:
        for a, b in zip(src.tolist(), dst.tolist(), strict=True):
            if a >= 0 and b >= 0:
                layer[b] = layer[a]
    ops.copy_kv_slots_(pool, src, dst)
    for layer, slots in zip(pool, expected, strict=True):
        assert torch.equal(slots_of(layer.float()), slots)


@pytest.mark.parametrize("seed", SEEDS)
def test_merge_partials(seed):
    (partials, lse, out), kwargs = CASES["merge_partials_"](seed)
    rows = out.shape[0] if kwargs["num_tokens"] < 0 else kwargs["num_tokens"]
    given = lse
    if "keys" in kwargs:
        lse = lse.masked_fill((kwargs["keys"] == 0).view(-1, 1, 1), -torch.inf)
    if "tail_lse" in kwargs:
        lse = torch.cat([lse, kwargs["tail_lse"].flatten(0, 1)[None, :out.shape[0]]])
    weights = lse.double().softmax(0).nan_to_num(0)  # NaN: all partials of the row are empty
    expected = (partials.double().nan_to_num(0) * weights[..., None]).sum(0)
    expected[rows:] = 0
    ops.merge_partials_(partials, given, out, **kwargs)
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[out.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("seed", range(300))
def test_split_page_lists(seed):
    """Every list's keys are in the runs and its tail, each once; runs are even, and an empty row names page 0."""
    args, _ = CASES["split_page_lists_"](seed)
    state, pages, totals, tables, keys, lens, _, _, page = args
    ops.split_page_lists_(*args)
    blocks, total = pages.shape[0], totals.tolist()
    runs = tables.shape[0] - (blocks if blocks > 1 else 0)

    def listed(row, count):  # slots of a row's keys
        return [(int(p), o) for p in row for o in range(page)][:count]

    shared = [slot for i in range(runs) for slot in listed(tables[i], int(keys[i]))]
    for j in range(blocks):
        tail = listed(tables[runs + j], int(keys[runs + j])) if blocks > 1 else []
        assert sorted(shared + tail) == sorted(listed(pages[j], total[j]))
        if tail:
            assert tail[-1] == listed(pages[j], total[j])[-1], "own tokens stay last"
    used = -(-keys[:runs] // page)
    assert used.sum() == len({p for p, _ in shared}) and used[:-1].tolist() == sorted(used[:-1].tolist())[::-1]
    assert used.max() == -(-int(used.sum()) // runs)
    assert torch.equal(lens, keys.clamp(min=1))
    for i in range(tables.shape[0]):
        assert not tables[i, max(-(-int(keys[i]) // page), 0):].any() or i >= runs


def test_merge_equals_attention_over_all_keys():
    q, k, v = noise(5, 3, 16, seed=1), noise(40, 3, 16, seed=2), noise(40, 3, 16, seed=3)
    scores = torch.einsum("qhd,khd->qhk", q, k) / 4
    cuts = [(0, 7), (7, 7), (7, 30), (30, 40)]  # the second is empty
    lse = torch.stack([scores[..., a:b].logsumexp(-1) for a, b in cuts])
    partials = torch.stack([torch.einsum("qhk,khd->qhd", scores[..., a:b].softmax(-1), v[a:b]) for a, b in cuts])
    out = torch.empty(5, 3, 16)
    ops.merge_partials_(partials, lse, out)
    torch.testing.assert_close(out, torch.einsum("qhk,khd->qhd", scores.softmax(-1), v))


def norm_rope(x, weight, cos, sin, eps, interleaved):
    """By complex numbers, in float64."""
    rows, heads, dim = x.shape
    y = x.double()
    if weight is not None:
        over = y.flatten(1)[:, None] if weight.numel() == heads * dim and heads > 1 else y
        y = y / (over.pow(2).sum(-1, keepdim=True) / over.shape[-1] + eps).sqrt()
        y = y * weight.double().view(-1, dim)
    if cos is not None:
        order = torch.arange(dim).view(-1, 2) if interleaved else torch.arange(dim).view(2, -1).T
        turned = torch.complex(*y[..., order.T].unbind(-2)) * torch.complex(cos, sin)[:, None]
        y[..., order.T.flatten()] = torch.cat([turned.real, turned.imag], -1)
    return y


@pytest.mark.parametrize("seed", range(80))
def test_qk_norm_rope(seed):
    args, kwargs = CASES["qk_norm_rope_"](seed)
    q, k, q_weight, k_weight, cos, sin, eps = args
    turned = kwargs["interleaved"]
    new_q, new_k = norm_rope(q, q_weight, cos, sin, eps, turned), norm_rope(k, k_weight, cos, sin, eps, turned)
    before_k, pool = k.clone(), kwargs.get("layer_pool")
    slots = None if pool is None else slots_of(pool)
    call("qk_norm_rope_", args, kwargs)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[q.dtype]

    def same(got, expected):
        torch.testing.assert_close(got.double(), expected.double(), rtol=tolerance, atol=tolerance / 4)

    same(kwargs.get("q_out", q), new_q)
    if pool is None:
        same(kwargs.get("k_out", k), new_k)
        return
    assert torch.equal(k, before_k)
    n = kwargs["num_tokens"] if kwargs["num_tokens"] >= 0 else q.shape[0]
    for targets in (kwargs["dst"], kwargs["dst2"]):
        for row, slot in enumerate([] if targets is None else targets.tolist()):
            if row < n and slot >= 0:
                slots[slot, 0], slots[slot, 1] = new_k[row].to(k.dtype), kwargs["v"][row]
    same(slots_of(pool), slots)
    assert torch.equal(slots_of(pool)[:, 1], slots[:, 1]), "v is copied bit for bit"


@pytest.mark.parametrize("seed", range(60))
def test_residual_norm(seed):
    args, kwargs = CASES["residual_norm_"](seed)
    x, delta, gate, scale, shift, offset, eps = args
    total = x.double() if delta is None else x.double() + delta.double() * (1 if gate is None else gate.double())
    call("residual_norm_", args, kwargs)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[x.dtype]
    if delta is not None:
        torch.testing.assert_close(kwargs["sum_out"].double(), total, rtol=tolerance, atol=tolerance / 4)
        total = kwargs["sum_out"].double()  # the norm is that of the rounded sum
    if kwargs["norm_out"] is not None:
        total = total - total.mean(1, keepdim=True)
        expected = total / (total.square().mean(1, keepdim=True) + eps).sqrt()
        if scale is not None:
            expected = expected * (offset + scale.double()) + shift.double()
        torch.testing.assert_close(kwargs["norm_out"].double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("rotary", ["interleaved", "half-split"])
def test_a_rank_with_per_head_weights_computes_its_slice(parts, rotary):
    q, k, weight = noise(9, 8, 16), noise(9, 4, 16, seed=1), 1 + 0.1 * noise(16, seed=2)
    angles = noise(9, 8, seed=3)
    common = (weight, weight, angles.cos(), angles.sin(), 1e-6, rotary == "interleaved")
    slices = [(a.clone(), b.clone()) for a, b in zip(q.chunk(parts, 1), k.chunk(parts, 1), strict=True)]
    ops.qk_norm_rope_(q, k, *common)
    for rank, (a, b) in enumerate(slices):
        ops.qk_norm_rope_(a, b, *common)
        assert torch.equal(a, q.chunk(parts, 1)[rank]) and torch.equal(b, k.chunk(parts, 1)[rank])
    with pytest.raises(ValueError, match="cannot run on one tensor-parallel rank's slice"):
        ops.qk_norm_rope_(*slices[0], noise(128), weight, None, None, 1e-6)


@pytest.mark.parametrize("name", CASES)
def test_opcheck(name):
    for seed in checkable_seeds(name):
        args, kwargs = CASES[name](seed)
        torch.library.opcheck(getattr(torch.ops.bc_diffusers, name).default, args, kwargs)


@pytest.mark.parametrize("name", CASES)
def test_compiles_into_one_graph(name):
    args, kwargs = CASES[name](3)
    expected = mirrored(args, kwargs, "cpu")
    call(name, *expected)
    torch._dynamo.reset()  # it counts the traces of this line
    torch.compile(lambda a, k: call(name, a, k), fullgraph=True, backend="aot_eager")(args, kwargs)
    assert_same_storages((args, kwargs), expected, exact=True)


def test_inputs_may_be_huge_numbers():
    state = torch.tensor([10**14, 7, 10**14 // 4 - 50, 0, 10**14 - 5])
    ops.advance_state_(state, 5, 100, 4)
    assert state.tolist()[0] == 10**14 + 5 and state[2] == math.floor((10**14 + 5 - 100 - 7) / 4)
