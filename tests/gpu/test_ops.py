"""The CUDA operators against the CPU ones: the same random call on both, then every byte of every storage."""

import pytest
import torch
from op_cases import CASES, assert_same_storages, checkable_seeds, mirrored, noise
from op_refusals import REFUSALS

from bc_diffusers import ops


DEVICE = "cuda"
ROUNDED = ("merge_partials_", "qk_norm_rope_", "residual_norm_")  # the others move or compute integers: bit for bit
SEEDS = {"merge_partials_": 80, "qk_norm_rope_": 160, "residual_norm_": 80, "scatter_kv_slots_": 80}


def call(name, args, kwargs):
    getattr(ops, name)(*args, **kwargs)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_cpu_implementation(name):
    for seed in range(SEEDS.get(name, 40)):
        args, kwargs = CASES[name](seed)
        on_gpu = mirrored(args, kwargs, DEVICE)
        call(name, args, kwargs)
        call(name, *on_gpu)
        try:
            assert_same_storages(on_gpu, (args, kwargs), exact=name not in ROUNDED)
        except AssertionError as error:
            shapes = [(tuple(t.shape), t.stride(), t.dtype) if isinstance(t, torch.Tensor) else t for t in args]
            raise AssertionError(f"seed {seed}: {shapes} {kwargs}") from error


@pytest.mark.parametrize("name,args,kwargs,message", REFUSALS, ids=lambda x: x if isinstance(x, str) else None)
def test_refuses_in_the_same_words(name, args, kwargs, message):
    with pytest.raises(ValueError, match=message) as on_cpu:
        call(name, args, kwargs)
    with pytest.raises(RuntimeError) as on_gpu:
        call(name, *mirrored(args, kwargs, DEVICE))
    assert str(on_gpu.value).splitlines()[0] == str(on_cpu.value)


def test_refuses_two_devices():
    with pytest.raises(RuntimeError, match="on one device, got rows on cuda:0, shift on cpu"):
        ops.rotate_rows_(torch.zeros(3, device=DEVICE), torch.tensor(1))
    with pytest.raises(RuntimeError, match="on one device, got layer_pool on cuda:0, dst on cpu"):
        args, kwargs = mirrored(*CASES["scatter_kv_slots_"](0), DEVICE)
        call("scatter_kv_slots_", (*args[:3], args[3].cpu()), {})


def test_empty_inputs_launch_nothing(launches):
    def ints(n):
        return torch.zeros(n, dtype=torch.int32, device=DEVICE)

    x, pool = torch.zeros(0, 2, 8, device=DEVICE), torch.zeros(4, 2, 2, 4, 8, device=DEVICE)
    state, sizes = torch.zeros(5, dtype=torch.int64, device=DEVICE), ints(22).view(2, 11)
    shift = torch.ones((), dtype=torch.int64, device=DEVICE)

    def run():
        ops.rotate_rows_(torch.empty(0, 7, device=DEVICE), shift)
        ops.rotate_rows_(torch.empty(7, 0, device=DEVICE), shift)
        ops.block_causal_layout_(state, ints0, ring, sizes, ints0, ints0, ints0, ints0, ints0, ints0, ints0, ints0, 4,
                                 8, 3)
        ops.block_causal_layout_(state, ints0, ring, sizes[:0], ints0, ring, ints0, ints0, ints0, ints0, ints0, ints0,
                                 4, 8, 3)
        ops.scatter_kv_slots_(x, x, pool, ints0)
        ops.scatter_kv_slots_(x, x, pool, ring, src=ring)
        ops.copy_kv_slots_(pool[None], ints0, ints0)
        ops.copy_kv_slots_(pool[None, :0], ring, ring)
        ops.merge_partials_(torch.empty(2, 0, 3, 8, device=DEVICE), torch.empty(2, 0, 3, device=DEVICE), empty_out)
        ops.qk_norm_rope_(x, x, None, None, None, None, 1e-6)
        ops.qk_norm_rope_(x, x, None, None, None, None, 1e-6, v=x, layer_pool=pool, dst=ints0)
        ops.residual_norm_(empty_out[0:0, 0], None, None, None, None, 1.0, 1e-6, norm_out=empty_out[0:0, 0])

    ints0, ring, empty_out = ints(0), ints(3), torch.empty(0, 3, 8, device=DEVICE)
    profile = launches(run)
    assert profile.kernels == [] and profile.copies == []


@pytest.mark.parametrize("name", CASES)
def test_opcheck(name):
    for seed in checkable_seeds(name):
        args, kwargs = mirrored(*CASES[name](seed), DEVICE)
        torch.library.opcheck(getattr(torch.ops.bc_diffusers, name).default, args, kwargs)


def test_compiles_into_one_graph():
    """All operators between torch code in one function, compiled by Inductor: the same results, one graph."""
    def step(q, k, v, weight, cos, sin, pool, dst, ring, shift):
        q, k = q * 2, k * 2
        ops.qk_norm_rope_(q, k, weight, weight, cos, sin, 1e-6)
        ops.scatter_kv_slots_(k, v, pool[0], dst)
        ops.copy_kv_slots_(pool, dst, dst + 32)
        ops.rotate_rows_(ring, shift)
        lse = q.float().sum(-1).expand(2, -1, -1)
        out = torch.empty_like(q)
        ops.merge_partials_(torch.stack([q, q + 1]), lse, out)
        return out + q, ring * 2

    def inputs():
        q = noise(8, 4, 16).to(DEVICE)
        angles = noise(8, 8, seed=1).to(DEVICE)
        return (q, noise(8, 2, 16, seed=2).to(DEVICE), noise(8, 2, 16, seed=3).to(DEVICE),
                noise(16, seed=4).to(DEVICE), angles.cos(), angles.sin(),
                torch.zeros(3, 20, 2, 2, 4, 16, device=DEVICE), torch.arange(8, dtype=torch.int32, device=DEVICE),
                torch.arange(9, dtype=torch.int32, device=DEVICE), torch.tensor(2, device=DEVICE))

    eager, compiled = inputs(), inputs()
    expected, got = step(*eager), torch.compile(step, fullgraph=True)(*compiled)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(compiled, eager)


@pytest.mark.parametrize("layers,pages", [(1, 8400), (12, 800)])
def test_a_pool_beyond_two_to_the_31_elements_and_4_gib(layers, pages):
    heads, page, dim = 8, 128, 128
    shape = (layers, pages, 2, heads, page, dim)
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of free GPU memory")
    pool = torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE)
    assert pool.numel() > 2**31 and pool.numel() * 2 > 4 << 30
    k, v = (noise(64, heads, dim, dtype=torch.bfloat16, seed=i).to(DEVICE) for i in range(2))
    last = torch.arange(pages * page - 64, pages * page, dtype=torch.int32, device=DEVICE)
    ops.scatter_kv_slots_(k, v, pool[-1], last, dst2=last - 7000)
    ops.copy_kv_slots_(pool, last, last - last[0])
    ops.qk_norm_rope_(k.clone(), k, None, None, None, None, 1e-6, v=v, layer_pool=pool[-1], dst=last - 14000)
    for first in (last[0], last[0] - 7000, 0, last[0] - 14000):
        slots = torch.arange(64, device=DEVICE) + first
        assert torch.equal(pool[-1, slots // page, 0, :, slots % page], k)
        assert torch.equal(pool[-1, slots // page, 1, :, slots % page], v)
    assert int(torch.count_nonzero(pool[-1].view(torch.int32).any(-1))) == 4 * 64 * 2 * heads
    if layers > 1:
        assert not pool[:-1, -1].any() and not pool[:-1, 0].any()


def test_runs_on_the_current_stream():
    """Behind a long kernel on the same stream the operator must wait for it."""
    stream = torch.cuda.Stream()
    rows, shift = torch.zeros(1000, device=DEVICE), torch.tensor(3, device=DEVICE)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        rows.copy_(torch.arange(1000.0, device=DEVICE))
        ops.rotate_rows_(rows, shift)
    stream.synchronize()
    assert torch.equal(rows.cpu(), torch.arange(1000.0).roll(-3))


def test_merges_into_one_of_its_partials():
    partials, lse = noise(3, 9, 12, 64).to(DEVICE), noise(3, 9, 12, seed=1).to(DEVICE)
    expected = torch.empty(9, 12, 64, device=DEVICE)
    ops.merge_partials_(partials, lse, expected)
    ops.merge_partials_(partials, lse, partials[1])
    assert torch.equal(partials[1], expected)
