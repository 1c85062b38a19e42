"""Rollouts of the cache on the GPU: every device tensor as on the CPU, commits in CUDA graphs, what is launched."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from op_cases import noise, random_spec

from bc_diffusers.cache import BlockCausalKVCache, RolloutSpec


# Cosmos3-like proportions at a fiftieth of the size: the window divides nothing, two causal-block sizes, a pin.
SPEC = RolloutSpec(window_tokens=749, max_staged_tokens=32, causal_blocks={32: 1, 8: 4}, max_pin_tokens=10)


def make(device, spec, page, layers=2, heads=2, dim=8, dtype=torch.bfloat16):
    return BlockCausalKVCache(num_layers=layers, num_kv_heads=heads, head_dim=dim, page_size=page, dtype=dtype,
                              device=device, pool_tokens=BlockCausalKVCache.pool_tokens_for(spec, page_size=page))


def assert_same_tensors(on_gpu, on_cpu):
    for (name, a), (_, b) in zip(on_gpu.device_tensors(), on_cpu.device_tensors(), strict=True):
        assert torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8)), name


def stage(caches, n, size, seed):
    """One forward's writes, the same on every cache, two rows of padding included."""
    for cache in caches:
        cache.plan(n, size)
        for layer in range(cache.num_layers):
            k, v = (noise(n + 2, cache.num_kv_heads, cache.head_dim, dtype=cache.dtype, seed=seed + 2 * layer + i)
                    for i in range(2))
            cache.write_staged(layer, k.to(cache.device), v.to(cache.device))


@pytest.mark.parametrize("seed", range(12))
def test_every_device_tensor_equals_the_cpu_caches(seed):
    r = random.Random(seed)
    spec, page = random_spec(r), 1 << r.randrange(6)
    dtype, dim = r.choice([torch.bfloat16, torch.float32]), r.choice([3, 8, 16])
    caches = [make(device, spec, page, dim=dim, dtype=dtype) for device in ("cuda", "cpu")]
    for rollout in range(2):
        pin = r.randrange(spec.max_pin_tokens + 1)
        for cache in caches:
            cache.open(spec, pin_tokens=pin)
        assert_same_tensors(*caches)
        for step in range(14):
            size, count = r.choice(spec.causal_blocks)
            n = r.randrange(1, min(size * count, spec.max_staged_tokens) + 1)
            stage(caches, n, size, seed=1000 * step)
            assert_same_tensors(*caches)
            for cache in caches:
                cache.commit()
            assert_same_tensors(*caches)
            start = max(caches[0].window_start, pin)
            if r.random() < 0.4 and caches[0].committed > start:
                length = min(4, caches[0].committed - start)
                k, v = (noise(length, 2, dim, dtype=dtype, seed=step + i) for i in range(2))
                for cache in caches:
                    cache.write_range(1, start, k.to(cache.device), v.to(cache.device))
                    cache.zero_values(caches[0].committed - 1, caches[0].committed)
                assert_same_tensors(*caches)
        for cache in caches:
            cache.close()


def capture(call):
    """A graph of one call, captured without a run before it."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def test_a_commit_captured_before_the_window_is_full_replays_over_eviction_and_a_reopen():
    page = 16
    on_gpu, on_cpu = make("cuda", SPEC, page), make("cpu", SPEC, page)
    for cache in (on_gpu, on_cpu):
        cache.open(SPEC, pin_tokens=10)
    state, graphs = on_gpu._state, {}
    for n in (32, 20):
        graphs[n] = capture(lambda n=n: state.commit(on_gpu._pool, n))
    captured = {name: t.data_ptr() for name, t in on_gpu.device_tensors()}
    for rollout, pin in enumerate((10, 3, 0)):
        for step in range(36):
            n = 20 if step % 7 == 3 else 32
            stage((on_gpu, on_cpu), n, 8 if step % 2 else 32, seed=1000 * step)
            on_cpu.commit()
            # The device part is replayed; the host part of `commit` runs with nothing to launch.
            state.commit, eager = lambda pool, n: graphs[n].replay(), state.commit
            on_gpu.commit()
            state.commit = eager
            assert_same_tensors(on_gpu, on_cpu)
        assert on_gpu.window_start > 300 + pin, "the window slid"
        for cache in (on_gpu, on_cpu):
            cache.close()
            cache.open(SPEC, pin_tokens=(3, 0, 0)[rollout])
    assert captured == {name: t.data_ptr() for name, t in on_gpu.device_tensors()}


def test_a_forward_and_its_commit_replay_as_one_graph():
    on_gpu, on_cpu = make("cuda", SPEC, 8), make("cpu", SPEC, 8)
    k, v = (noise(34, 2, 8, dtype=torch.bfloat16, seed=i).to("cuda") for i in range(2))
    for cache in (on_gpu, on_cpu):
        cache.open(SPEC, pin_tokens=7)
    plan = on_gpu.plan(32, 8)

    def chunk():
        for layer in range(2):
            on_gpu.layer(layer).write(k, v, plan)
        on_gpu._state.commit(on_gpu._pool, 32)

    graph = capture(chunk)
    for step in range(40):
        for i, t in enumerate((k, v)):
            t.copy_(noise(34, 2, 8, dtype=torch.bfloat16, seed=100 * step + i))
        graph.replay()
        on_cpu.plan(32, 8)
        for layer in range(2):
            on_cpu.write_staged(layer, k.cpu(), v.cpu())
        on_cpu.commit()
        assert_same_tensors(on_gpu, on_cpu)


def test_a_commit_launches_four_kernels_whatever_the_layers(launches):
    for layers in (1, 36):
        cache = make("cuda", SPEC, 16, layers=layers).open(SPEC, pin_tokens=10)
        for _ in range(30):
            cache.plan(32, 8)
            cache.commit()

        def step(cache=cache):
            cache.plan(32, 8)
            cache.commit()

        profile = launches(step)
        assert len(profile.kernels) == 4, profile.kernels
        assert profile.copies == [] and profile.host_to_device == [] and profile.synchronisations == []


def test_staging_launches_one_kernel_a_layer(launches):
    cache = make("cuda", SPEC, 16, layers=5).open(SPEC)
    k = torch.zeros(32, 2, 8, dtype=torch.bfloat16, device="cuda")
    cache.plan(32, 8)
    profile = launches(lambda: [cache.write_staged(layer, k, k) for layer in range(5)])
    assert len(profile.kernels) == 5 and profile.copies == [] and profile.synchronisations == []


POOLS = """
import torch
from bc_diffusers.cache import BlockCausalKVCache, RolloutSpec
spec = RolloutSpec(window_tokens=749, max_staged_tokens=32, causal_blocks={32: 1, 8: 4}, max_pin_tokens=10)
for layers, page in ((1, 16), (3, 16), (40, 32), (200, 8)):  # the first loads the library and the kernels
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    cache = BlockCausalKVCache(num_layers=layers, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16, device="cuda",
                               pool_tokens=BlockCausalKVCache.pool_tokens_for(spec, page), page_size=page)
    print(before - torch.cuda.mem_get_info()[0], cache.pool_bytes,
          BlockCausalKVCache.pool_bytes_for(spec, page, layers, 8, 128, torch.bfloat16))
    cache.shutdown()
"""


def test_pool_bytes_is_what_the_driver_loses():
    """In a process that holds no other memory. Other processes on the device may take some at the same moment."""
    for _ in range(5):
        out, err = fresh_process({}, POOLS).communicate()
        rows = [tuple(map(int, line.split())) for line in out.splitlines()][1:]
        assert len(rows) == 3, err
        if all(lost == held == told for lost, held, told in rows):
            return
    pytest.fail(f"what the driver lost, pool_bytes, pool_bytes_for: {rows}")


FRESH = """
import torch
from bc_diffusers.cache import BlockCausalKVCache, RolloutSpec
spec = RolloutSpec(window_tokens=40, max_staged_tokens=8, causal_blocks={8: 1})
pool = BlockCausalKVCache.pool_tokens_for(spec, page_size=4)
cache = BlockCausalKVCache(num_layers=1, num_kv_heads=1, head_dim=8, pool_tokens=pool, page_size=4,
                           dtype=torch.float32, device="cuda").open(spec)
graph = torch.cuda.CUDAGraph()
torch.cuda.synchronize()
plan, k = cache.plan(8, 8), torch.ones(8, 1, 8, device="cuda")
with torch.cuda.graph(graph):
    cache.layer(0).write(k, k, plan)
    cache._state.commit(cache._pool, 8)
graph.replay()
torch.cuda.synchronize()
print(cache._state.state.tolist())
"""


def fresh_process(env, code=FRESH):
    root = str(Path(__file__).resolve().parents[2])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]), **env}
    return subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True)


def test_two_fresh_processes_build_once_and_capture_their_first_commit(tmp_path):
    """No kernel of the library has run before the capture; one process builds, the other waits, a third builds nothing
    and one with another architecture list builds anew."""
    env = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    both = [fresh_process(env) for _ in range(2)]
    outputs = [process.communicate() for process in both]
    third = fresh_process(env).communicate()
    for out, err in (*outputs, third):
        assert out.strip() == "[8, 0, 0, 0, 0]", err
    assert sum("compiling the CUDA operators" in err for _, err in outputs) == 1
    assert "compiling" not in third[1]
    assert len(list(tmp_path.glob("bc_diffusers/*/_cuda_ops.so"))) == 1
    major, minor = torch.cuda.get_device_capability()
    out, err = fresh_process(env | {"TORCH_CUDA_ARCH_LIST": f"{major}.{minor}+PTX"}).communicate()
    assert out.strip() == "[8, 0, 0, 0, 0]" and "compiling the CUDA operators" in err, err
