"""Every operator against its floor (the bytes it must move, over the bandwidth of a copying kernel) and torch code.

    python benchmarks/bench_ops.py [--out benchmarks/results/ops_h200]      # writes .txt and .json

Times are medians of CUDA graph replays, a graph being one call for each of many different buffers, together several
times larger than the L2 cache. Geometry: Cosmos3 (36 layers, 8 K/V heads of 128, 1576 tokens a chunk, window 37,430,
pin 512) and Wan 2.1 1.3B (12 heads of 128, 4680 tokens a chunk).
"""

import argparse
import datetime
import json
import statistics
import time
from pathlib import Path

import torch

from bc_diffusers import ops
from bc_diffusers.cache import BlockCausalKVCache, RolloutSpec


COSMOS = RolloutSpec(window_tokens=37430, max_staged_tokens=1576, causal_blocks={1576: 1, 394: 4}, max_pin_tokens=512)
LAYERS, KV_HEADS, DIM, CHUNK = 36, 8, 128, 1576
DTYPE = torch.bfloat16


def capture(call):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
        call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def device_us(call, repeats=30):
    """Median device time of one replay of `call`, microseconds."""
    graph, times = capture(call), []
    for _ in range(repeats + 3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return statistics.median(times[3:])


def copy_bandwidth():
    """Bytes read and written a microsecond when 2 GiB are copied, by a kernel and by the driver's memcpy."""
    a, b = (torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    a.normal_()
    by_kernel, by_memcpy = device_us(lambda: torch.neg(a, out=b), 10), device_us(lambda: b.copy_(a), 10)
    return 2 * a.nbytes / by_kernel, 2 * a.nbytes / by_memcpy


def small_copy_us(num_bytes, buffers=36):
    """Microseconds that a kernel takes to copy this little: at such sizes launch and ramp-up take their share."""
    a, b = (torch.ones(buffers, num_bytes // 2, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return device_us(lambda: [torch.neg(a[i], out=b[i]) for i in range(buffers)]) / buffers


class Table:
    def __init__(self):
        (self.bandwidth, self.memcpy), self.rows = copy_bandwidth(), []

    def add(self, name, num_bytes, ours, **others):
        """Times in microseconds a call; `others` by the name of what they are."""
        floor = num_bytes / self.bandwidth
        self.rows.append({"op": name, "us": ours, "bytes": num_bytes, "floor_us": floor, "of_copy": floor / ours,
                          **others})

    def text(self):
        lines = [f"{'operator':<58} {'us':>8} {'MB':>8} {'floor us':>9} {'% of copy':>9}   "
                 "torch code, us (ours faster by)"]
        for row in self.rows:
            others = ", ".join(f"{name} {us:.1f} ({us / row['us']:.1f}x)" for name, us in row.items()
                               if name not in ("op", "us", "bytes", "floor_us", "of_copy"))
            lines.append(f"{row['op']:<58} {row['us']:>8.2f} {row['bytes'] / 1e6:>8.2f} {row['floor_us']:>9.2f} "
                         f"{100 * row['of_copy']:>8.0f}%   {others}")
        return "\n".join(lines)


def make_cache(page, commits=40):
    """A Cosmos3 cache whose window is full and has slid."""
    cache = BlockCausalKVCache(num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=DIM, page_size=page, dtype=DTYPE,
                               device="cuda", pool_tokens=BlockCausalKVCache.pool_tokens_for(COSMOS, page_size=page))
    cache.open(COSMOS, pin_tokens=512)
    for _ in range(commits):
        cache.plan(CHUNK, CHUNK)
        cache.commit()
    return cache


def bench_scatter(table):
    cache = make_cache(128)
    packed = torch.randn(LAYERS, CHUNK, 2, KV_HEADS, DIM, device="cuda").to(DTYPE)
    token = 2 * KV_HEADS * DIM * DTYPE.itemsize
    for size in (1576, 394):
        plan = cache.plan(CHUNK, size)
        views = plan._views
        live = (views.src >= 0) & (views.src < CHUNK)
        written = sum(int((live & (t >= 0)).sum()) for t in (views.dst, views.dst2))
        index = [(views.src[use].long(), t[use].long() // 128, t[use].long() % 128)
                 for t in (views.dst, views.dst2) for use in [live & (t >= 0)]]

        def ours(plan=plan):
            for i in range(LAYERS):
                cache.layer(i).write(packed[i, :, 0], packed[i, :, 1], plan)

        def by_torch(index=index):
            for i in range(LAYERS):
                for row, page, offset in index:
                    cache.layer(i).pool[page, 0, :, offset] = packed[i, :, 0][row]
                    cache.layer(i).pool[page, 1, :, offset] = packed[i, :, 1][row]

        num_bytes = (CHUNK + written) * token + 12 * views.src.shape[0]
        table.add(f"scatter_kv_slots_ {CHUNK} x {KV_HEADS} x {DIM}, causal blocks of {size}", num_bytes,
                  device_us(ours) / LAYERS, **{"a plain copy of it": small_copy_us(num_bytes // 4 * 2)},
                  index_put=device_us(by_torch, 10) / LAYERS)
    one = views.dst[:CHUNK].contiguous()

    def table_only():
        for i in range(LAYERS):
            ops.scatter_kv_slots_(packed[i, :, 0], packed[i, :, 1], cache.layer(i).pool, one)

    table.add(f"scatter_kv_slots_ {CHUNK} x {KV_HEADS} x {DIM}, one destination", 2 * CHUNK * token,
              device_us(table_only) / LAYERS, **{"a plain copy of it": small_copy_us(CHUNK * token)})


def bench_merge(table):
    n, rows, heads, sets = 4, CHUNK, 32, 6
    partials = [torch.randn(n, rows, heads, DIM, device="cuda").to(DTYPE) for _ in range(sets)]
    lse = torch.randn(n, rows, heads, device="cuda")
    out = torch.empty(sets, rows, heads, DIM, device="cuda", dtype=DTYPE)

    def maths(p):
        return (p.float() * lse.softmax(0)[..., None]).sum(0).to(DTYPE)

    compiled = torch.compile(maths)

    def ours():
        for i in range(sets):
            ops.merge_partials_(partials[i], lse, out[i])

    table.add(f"merge_partials_ {n} x {rows} x {heads} x {DIM}", partials[0].nbytes + out[0].nbytes + lse.nbytes,
              device_us(ours) / sets, eager=device_us(lambda: [maths(p) for p in partials], 10) / sets,
              compiled=device_us(lambda: [compiled(p) for p in partials], 10) / sets)


def norm_rope(q, k, q_weight, k_weight, cos, sin, eps, interleaved):
    out = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        dims = (-2, -1) if weight.numel() > x.shape[-1] else (-1,)
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(dims, keepdim=True) + eps) * weight.float().view(-1, x.shape[-1])
        a, b = y.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else y.chunk(2, -1)
        turned = (a * cos[:, None] - b * sin[:, None], a * sin[:, None] + b * cos[:, None])
        out.append((torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)).to(x.dtype))
    return out


def bench_norm_rope(table, name, rows, heads, kv_heads, full, interleaved, sets=8):
    q = [torch.randn(rows, heads, DIM, device="cuda").to(DTYPE) for _ in range(sets)]
    k = [torch.randn(rows, kv_heads, DIM, device="cuda").to(DTYPE) for _ in range(sets)]
    q_weight = torch.ones(heads * DIM if full else DIM, device="cuda", dtype=DTYPE)
    k_weight = torch.ones(kv_heads * DIM if full else DIM, device="cuda", dtype=DTYPE)
    angles = torch.randn(rows, DIM // 2, device="cuda")
    shared = (q_weight, k_weight, angles.cos(), angles.sin(), 1e-6, interleaved)
    compiled = torch.compile(norm_rope, dynamic=False)
    num_bytes = 2 * (q[0].nbytes + k[0].nbytes) + 2 * angles.nbytes

    def ours():
        for i in range(sets):
            ops.qk_norm_rope_(q[i], k[i], *shared)

    table.add(f"qk_norm_rope_ {name}", num_bytes, device_us(ours) / sets,
              **{"a plain copy of it": small_copy_us(q[0].nbytes + k[0].nbytes, sets)},
              eager=device_us(lambda: [norm_rope(a, b, *shared) for a, b in zip(q, k, strict=True)], 10) / sets,
              compiled=device_us(lambda: [compiled(a, b, *shared) for a, b in zip(q, k, strict=True)], 10) / sets)
    pages = 4 * rows // 128
    pools = torch.zeros(sets, pages, 2, kv_heads, 128, DIM, device="cuda", dtype=DTYPE)
    dst = torch.arange(rows, dtype=torch.int32, device="cuda")
    dst2 = dst + 2 * rows

    def with_write():
        for i in range(sets):
            ops.qk_norm_rope_(q[i], k[i], *shared, v=k[i], layer_pool=pools[i], dst=dst, dst2=dst2)

    def apart():
        for i in range(sets):
            ops.qk_norm_rope_(q[i], k[i], *shared)
            ops.scatter_kv_slots_(k[i], k[i], pools[i], dst, dst2)

    # v is k's own memory here: read once from memory, so it counts as written only
    table.add(f"qk_norm_rope_ {name}, with slot write", 2 * q[0].nbytes + 5 * k[0].nbytes + 2 * angles.nbytes,
              device_us(with_write) / sets, **{"norm_rope then scatter": device_us(apart) / sets})


def residual_norm(x, delta, gate, scale, shift):
    total = (x.float() + delta * gate).to(x.dtype)
    normed = torch.nn.functional.layer_norm(total.float(), total.shape[1:], eps=1e-6)
    return total, (normed * (1 + scale) + shift).to(x.dtype)


def bench_residual_norm(table, name, rows, dim, sets=8):
    x, delta, total, normed = (torch.randn(sets, rows, dim, device="cuda").to(DTYPE) for _ in range(4))
    gate, scale, shift = torch.randn(3, 1, dim, device="cuda").unbind(0)
    compiled = torch.compile(residual_norm, dynamic=False)

    def ours():
        for i in range(sets):
            ops.residual_norm_(x[i], delta[i], gate, scale, shift, 1.0, 1e-6, total[i], normed[i])

    def by_torch(function):
        return lambda: [function(x[i], delta[i], gate, scale, shift) for i in range(sets)]

    table.add(f"residual_norm_ {name}", 4 * x[0].nbytes, device_us(ours) / sets,
              **{"a plain copy of it": small_copy_us(2 * x[0].nbytes, sets)},
              eager=device_us(by_torch(residual_norm), 10) / sets, compiled=device_us(by_torch(compiled), 10) / sets)


def bench_table(table):
    cache = make_cache(128, commits=1)
    state = cache._state
    ring = torch.arange(state.ring.shape[0], dtype=torch.int32, device="cuda")
    shift = torch.tensor(13, device="cuda")
    where = torch.arange(ring.shape[0], device="cuda")
    table.add(f"rotate_rows_ {ring.shape[0]} int32", 2 * ring.nbytes,
              device_us(lambda: [ops.rotate_rows_(ring, shift) for _ in range(100)]) / 100,
              gather=device_us(lambda: [ring.copy_(ring[(where + shift) % ring.shape[0]]) for _ in range(100)]) / 100)
    written = sum(t.nbytes for name, t in state.tensors() if name[:4] in ("page", "leng", "copy", "scat"))
    table.add("block_causal_layout_ Cosmos3, page 128", written,
              device_us(lambda: [state.layout() for _ in range(100)]) / 100)


def bench_commit(page):
    """32 consecutive commits: (bytes copied, kernels, device us, device us in a graph, host us), medians."""
    cache = make_cache(page)
    state, host, events, entries = cache._state, [], [], []
    token = 2 * LAYERS * KV_HEADS * DIM * DTYPE.itemsize
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(32):
            cache.plan(CHUNK, CHUNK)
            cache.commit()
            torch.cuda.synchronize()
    kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    one = len(kernels) // 32
    kernels.sort(key=lambda e: e.time_range.start)
    sums = [sum(e.time_range.elapsed_us() for e in kernels[i:i + one]) for i in range(0, len(kernels), one)]
    for _ in range(34):
        cache.plan(CHUNK, CHUNK)
        torch.cuda.synchronize()
        start = time.perf_counter()
        cache.commit()
        host.append((time.perf_counter() - start) * 1e6)
        entries.append(int((state.copy_src >= 0).sum()))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        state.commit(cache._pool, CHUNK)
    for _ in range(34):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        events.append(start.elapsed_time(stop) * 1e3)
    return {"page": page, "kernels": one, "copied_slots": statistics.median(entries),
            "bytes": 2 * token * statistics.median(entries), "host_to_device_bytes": sum(
                "HtoD" in e.name for e in kernels), "device_us": statistics.median(sums), "worst_us": max(sums),
            "graph_us": statistics.median(events[2:]), "host_us": statistics.median(host[2:])}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="write OUT.txt and OUT.json")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device")
    torch.manual_seed(0)
    table = Table()
    with torch.inference_mode():
        bench_scatter(table)
        bench_norm_rope(table, "Wan 1.3B, 4680 x 12/12 x 128, all heads", 4680, 12, 12, True, True)
        bench_norm_rope(table, "Cosmos3, 1576 x 32/8 x 128, per head, half-split", CHUNK, 32, 8, False, False)
        bench_residual_norm(table, "Wan 1.3B, 4680 x 1536, gated and modulated", 4680, 1536)
        bench_residual_norm(table, "Wan 14B, 4680 x 5120, gated and modulated", 4680, 5120, sets=4)
        bench_merge(table)
        bench_table(table)
        commits = [bench_commit(page) for page in (32, 128)]
    about = {"date": datetime.date.today().isoformat(), "device": torch.cuda.get_device_name(),
             "torch": torch.__version__, "cuda": torch.version.cuda,
             "copy_bandwidth_TB_s": round(table.bandwidth / 1e6, 3), "memcpy_TB_s": round(table.memcpy / 1e6, 3),
             "command": "python benchmarks/bench_ops.py"}
    lines = [", ".join(f"{name} {value}" for name, value in about.items()), "", table.text(), "",
             f"commit, Cosmos3, {LAYERS} layers, medians of 32 consecutive:"]
    lines += [f"  page {c['page']:>3}: {c['kernels']} kernels, {c['copied_slots']:.0f} slots copied "
              f"({c['bytes'] / 1e6:.1f} MB moved), {c['host_to_device_bytes']} host-to-device copies, device "
              f"{c['device_us']:.1f} us (worst {c['worst_us']:.1f}), as a graph {c['graph_us']:.1f} us, host "
              f"{c['host_us']:.1f} us" for c in commits]
    print("\n".join(lines))
    if args.out:
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        Path(f"{args.out}.txt").write_text("\n".join(lines) + "\n")
        Path(f"{args.out}.json").write_text(json.dumps({**about, "ops": table.rows, "commits": commits}, indent=1))


if __name__ == "__main__":
    main()
