"""One layer of attention through the paged cache, K/V write included, against dense attention over contiguous K/V.

    python benchmarks/bench_block_causal_attention.py --preset cosmos3            # every backend that is installed
    python benchmarks/bench_block_causal_attention.py --preset wan-1.3b --sweep   # every cut and tile of each
    python benchmarks/bench_block_causal_attention.py --chunk-cycle --layers 36 --backend cudnn

Every call is checked before it is timed: against the exact window in fp32 (and, to show what exactness is worth,
against a window rounded down to a whole page). Times are medians of CUDA graph replays, with the L2 cache flushed
before each, in rounds over all calls, so that all see the same clocks. The dense baseline attends over the visible
keys alone, contiguous, with nothing to write.
"""

import argparse
import datetime
import functools
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bc_diffusers import BlockCausalKVCache, RolloutSpec, block_causal_attention
from bc_diffusers.attention import BACKENDS, CallShape, cudnn, explain_backends, fa4
from bc_diffusers.attention.backends import Backend
from bc_diffusers.graphs import capturing


sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from block_causal_reference import causal_block_spans, dense_attention, visible_positions  # noqa: E402


DEVICE, DTYPE, PAGE = torch.device("cuda", 0), torch.bfloat16, 128


@dataclass(frozen=True)
class Preset:
    heads: int
    kv_heads: int
    head_dim: int
    frame: int  # tokens of a latent frame
    chunk_frames: int
    window_frames: int
    pin: int

    @property
    def chunk(self):
        return self.frame * self.chunk_frames

    @property
    def spec(self):
        return RolloutSpec(self.window_frames * self.frame, self.chunk,
                           {self.chunk: 1, self.frame: self.chunk_frames}, self.pin)


PRESETS = {
    "cosmos3": Preset(32, 8, 128, frame=394, chunk_frames=4, window_frames=96, pin=512),
    "wan-1.3b": Preset(12, 12, 128, frame=1560, chunk_frames=3, window_frames=18, pin=0),
    "wan-14b": Preset(40, 40, 128, frame=1560, chunk_frames=3, window_frames=18, pin=0),
}


def randn(*shape):
    return torch.randn(*shape, device=DEVICE).to(DTYPE)


class Rollout:
    """A cache whose window is full and has slid, the K and V of its history by position, and one chunk's q, k, v."""

    def __init__(self, preset: Preset, layers=1):
        self.preset, spec = preset, preset.spec
        self.cache = BlockCausalKVCache(
            num_layers=layers, num_kv_heads=preset.kv_heads, head_dim=preset.head_dim, page_size=PAGE, dtype=DTYPE,
            device=DEVICE, pool_tokens=BlockCausalKVCache.pool_tokens_for(spec, PAGE)).open(spec, preset.pin)
        chunks = -(-(preset.pin + spec.window_tokens) // preset.chunk) + 2
        kv = (preset.kv_heads, preset.head_dim)
        self.k, self.v = randn((chunks + 1) * preset.chunk, *kv), randn((chunks + 1) * preset.chunk, *kv)
        for i in range(chunks):
            here = slice(i * preset.chunk, (i + 1) * preset.chunk)
            for layer in range(layers):
                self.cache.write_range(layer, here.start, self.k[here], self.v[here])
            self.cache.commit(preset.chunk)
        self.committed = self.cache.committed
        self.own = slice(self.committed, self.committed + preset.chunk)
        self.q = randn(preset.chunk, preset.heads, preset.head_dim)

    def visible(self, size, round_to=1):
        """(rows, positions) of each causal block; the window's start rounded down to a multiple of `round_to`."""
        spec, out = self.preset.spec, []
        for start, end in causal_block_spans(self.committed, self.preset.chunk, size):
            window = spec.window_tokens + (start - spec.window_tokens - self.preset.pin) % round_to
            positions = visible_positions(start, end, self.preset.pin, window)
            out.append((slice(start - self.committed, end - self.committed), torch.tensor(positions, device=DEVICE)))
        return out

    def reference(self, size, round_to=1):
        out = torch.empty(self.q.shape, dtype=torch.float32, device=DEVICE)
        for rows, positions in self.visible(size, round_to):
            out[rows] = dense_attention(self.q[rows], self.k[positions], self.v[positions])
        return out

    def tera_ops(self, size):
        p = self.preset
        return sum(4e-12 * (rows.stop - rows.start) * len(positions) * p.heads * p.head_dim
                   for rows, positions in self.visible(size))

    # What is timed --------------------------------------------------------------------------------------------------
    def paged(self, backend, size, layer=0):
        plan, view = self.cache.plan(self.preset.chunk, size), self.cache.layer(layer)
        q, k, v = self.q[None], self.k[None, self.own], self.v[None, self.own]
        return lambda: block_causal_attention(q, k, v, plan, view, backend=backend)[0]

    def dense(self, size):
        """Contiguous K and V of what each causal block sees; one launch a causal block."""
        parts = [(self.q[rows], self.k[positions], self.v[positions]) for rows, positions in self.visible(size)]
        return lambda: torch.cat([sdpa(*part) for part in parts]) if len(parts) > 1 else sdpa(*parts[0])

    def concatenated(self):
        (_, positions), = self.visible(self.preset.chunk)
        history = positions[:-self.preset.chunk]
        hk, hv, k, v = self.k[history], self.v[history], self.k[self.own], self.v[self.own]
        return lambda: sdpa(self.q, torch.cat([hk, k]), torch.cat([hv, v]))


def sdpa(q, k, v):
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        out = F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), enable_gqa=True)
    return out[0].transpose(0, 1)


class Timer:
    """CUDA graphs of calls, timed in turns."""

    def __init__(self, iterations, rounds=5):
        self.each, self.rounds, self.kept = -(-iterations // rounds), rounds, []
        self.flush = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)

    def capture(self, call):
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, torch.cuda.graph_pool_handle(), DEVICE):
            call()
        self.kept.append(call)  # the graph reads what the call holds
        return graph

    def milliseconds(self, graphs):
        """(median, least) of each graph's replays."""
        events = [[] for _ in graphs]
        for _ in range(self.rounds):
            for graph, mine in zip(graphs, events, strict=True):
                graph.replay()
                for i in range(self.each):
                    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    self.flush.fill_(i % 200)
                    start.record()
                    graph.replay()
                    stop.record()
                    mine.append((start, stop))
        torch.cuda.synchronize()
        times = [[a.elapsed_time(b) for a, b in mine] for mine in events]
        return [(statistics.median(mine), min(mine)) for mine in times]


def variants(names, sweep):
    """Names of backends to time; with `sweep`, also each with its cut fixed, registered under a name of its own."""
    chosen = []
    for name in names:
        chosen.append(name)
        if sweep and name == "cudnn":
            fixed = [(f"cudnn, {runs} runs", functools.partial(cudnn.run, runs=runs)) for runs in (0, 1, 2, 3, 4, 6)]
        elif sweep and name == "fa4":
            fixed = [(f"fa4, tile {tile}, {runs} runs", functools.partial(fa4.run, tile=tile, runs=runs))
                     for tile in (128, 192) for runs in (0, 2, 3)]
        else:
            fixed = []
        for title, run in fixed:
            BACKENDS[title] = Backend(title, BACKENDS[name].refuses, run)
            chosen.append(title)
    return chosen


def bench_layer(preset, names, sweep, timer):
    rollout, rows = Rollout(preset), []
    passes = {"denoise": preset.chunk, "clean": preset.frame}
    exact = {name: rollout.reference(size) for name, size in passes.items()}
    aligned = {name: rollout.reference(size, PAGE) for name, size in passes.items()}

    graphs = []

    def add(name, kind, call):
        row = {"what": name, "pass": kind}
        rows.append(row)
        try:
            out = call().float()
            row["error"] = (out - exact[kind]).abs().max().item()
            row["aligned_error"] = (out - aligned[kind]).abs().max().item()
            if row["error"] > 2e-3:
                raise AssertionError(f"off by {row['error']:.1e}: not timed")
            graphs.append((row, timer.capture(call)))
        except Exception as problem:
            row["failed"] = f"{type(problem).__name__}: {problem}"[:200]

    add("dense contiguous, cuDNN", "denoise", rollout.dense(preset.chunk))
    add("concatenate, then dense", "denoise", rollout.concatenated())
    add(f"dense contiguous, {preset.chunk_frames} launches", "clean", rollout.dense(preset.frame))
    for name in variants(names, sweep):
        for kind, size in passes.items():
            if ", 1 runs" not in name or kind == "clean":
                add(name, kind, rollout.paged(name, size))
    for (row, _), (median, least) in zip(graphs, timer.milliseconds([graph for _, graph in graphs]), strict=True):
        row |= {"ms": median, "min_ms": least, "tflops": rollout.tera_ops(passes[row["pass"]]) / median * 1e3}
    print("\n".join([HEADER, *(line(row, rows) for row in rows)]), flush=True)
    return rows, max(t.abs().max().item() for t in exact.values())


HEADER = f"{'what':<34} {'pass':<8} {'ms':>8} {'min':>8} {'x dense':>8} {'TFLOP/s':>8} {'error':>9} {'page-al.':>9}"


def line(row, rows):
    if "failed" in row:
        return f"{row['what']:<34} {row['pass']:<8} {row['failed']}"
    return (f"{row['what']:<34} {row['pass']:<8} {row['ms']:>8.4f} {row['min_ms']:>8.4f} "
            f"{row['ms'] / rows[0].get('ms', float('nan')):>8.3f} {row['tflops']:>8.1f} {row['error']:>9.2e} "
            f"{row['aligned_error']:>9.2e}")


def clocks():
    """What the driver says of the card's clocks now, MHz (read only)."""
    query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.strip()


def bench_cycle(preset, backend, layers, timer):
    """A chunk's attention in all layers: 4 denoising forwards, the clean pass, the commit, each a CUDA graph."""
    rollout = Rollout(preset, layers)
    cache, state = rollout.cache, rollout.cache._state

    def forward(size):
        calls = [rollout.paged(backend, size, layer) for layer in range(layers)]
        return lambda: [call() for call in calls]

    sizes = (preset.chunk, preset.frame)
    one = timer.milliseconds([timer.capture(rollout.paged(backend, size)) for size in sizes])
    one = {size: median for size, (median, _) in zip(sizes, one, strict=True)}
    graphs = [timer.capture(forward(preset.chunk))] * 4 + [timer.capture(forward(preset.frame))]
    torch.cuda.synchronize()
    commit = torch.cuda.CUDAGraph()
    with capturing(commit, torch.cuda.graph_pool_handle(), DEVICE):
        state.commit(cache._pool, preset.chunk)
    marks = []
    for _ in range(8):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(graphs) + 2)]
        events[0].record()
        for graph, event in zip([*graphs, commit], events[1:], strict=True):
            graph.replay()
            event.record()
        marks.append(events)
    busy = clocks()
    torch.cuda.synchronize()
    steps = [statistics.median(e[i].elapsed_time(e[i + 1]) for e in marks[2:]) for i in range(len(graphs) + 1)]
    total = statistics.median(e[0].elapsed_time(e[-1]) for e in marks[2:])
    expected = layers * (4 * one[preset.chunk] + one[preset.frame])
    result = {"backend": backend, "layers": layers, "cycle_ms": total, "denoise_ms": steps[:4], "clean_ms": steps[4],
              "commit_ms": steps[5], "one_layer_ms": list(one.values()), "sum_of_layers_ms": expected,
              "over_sum": total / expected - 1, "clocks": busy}
    print(f"{backend}, {layers} layers: cycle {total:.2f} ms = denoise {' + '.join(f'{t:.2f}' for t in steps[:4])} + "
          f"clean {steps[4]:.2f} + commit {steps[5]:.3f}; {layers} x one layer (4 x {one[preset.chunk]:.3f} + "
          f"{one[preset.frame]:.3f}) is {expected:.2f}: {100 * result['over_sum']:+.1f} %; clocks (SM, memory, power) "
          f"{busy}", flush=True)
    return result


def plot(path, rows, title):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 1.2 + 0.32 * len(rows)), constrained_layout=True)
    for ax, kind in zip(axes, ("denoise", "clean"), strict=True):
        mine = [row for row in rows if row["pass"] == kind and "ms" in row][::-1]
        colours = ["#999999" if "dense" in row["what"] else "#2a6fbb" for row in mine]
        bars = ax.barh([row["what"] for row in mine], [row["ms"] for row in mine], color=colours)
        ax.bar_label(bars, [f"{row['ms']:.2f}" for row in mine], padding=3)
        ax.axvline(rows[0]["ms"], color="#444444", linestyle=":", linewidth=1)
        ax.set(title={"denoise": "denoising forward", "clean": "clean pass, several causal blocks"}[kind],
               xlabel="ms a layer (dotted: dense denoising forward)")
        ax.margins(x=0.15)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="cosmos3")
    parser.add_argument("--backend", action="append", choices=[n for n in BACKENDS if n != "reference"],
                        help="time this one (may be given again); default: all that can serve")
    parser.add_argument("--sweep", action="store_true", help="also time every cut and tile of each backend")
    parser.add_argument("--chunk-cycle", action="store_true", help="4 denoising forwards, clean pass and commit")
    parser.add_argument("--layers", type=int, default=36, help="of the chunk cycle")
    parser.add_argument("--iters", type=int, default=40)
    parser.add_argument("--json", help="write the numbers there")
    parser.add_argument("--plot", help="write a bar chart there")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device")
    torch.manual_seed(0)
    preset, timer = PRESETS[args.preset], Timer(args.iters)
    shape = CallShape(DEVICE, DTYPE, preset.heads, preset.kv_heads, preset.head_dim, PAGE)
    serves = {name: reason for name, reason in explain_backends(shape).items() if name != "reference"}
    names = args.backend or [name for name, reason in serves.items() if reason is None]
    about = {"date": datetime.date.today().isoformat(), "device": torch.cuda.get_device_name(),
             "torch": torch.__version__, "cudnn": torch.backends.cudnn.version(), "preset": args.preset,
             "rows": preset.chunk, "keys": preset.pin + preset.spec.window_tokens + preset.chunk,
             "heads": f"{preset.heads}/{preset.kv_heads} x {preset.head_dim}", "page": PAGE, "iterations": args.iters}
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    for name, reason in serves.items():
        if reason is not None:
            print(f"{name} is left out: {reason}")
    result, start = {**about, "left_out": {n: r for n, r in serves.items() if r is not None}}, time.perf_counter()
    with torch.inference_mode():
        if args.chunk_cycle:
            result["cycles"] = [bench_cycle(preset, name, args.layers, Timer(args.iters)) for name in names]
        else:
            result["layer"], result["reference_max"] = bench_layer(preset, names, args.sweep, timer)
            print(f"|reference| max {result['reference_max']:.4f}; {time.perf_counter() - start:.0f} s in all")
    if args.json:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(json.dumps(result, indent=1))
    if args.plot and "layer" in result:
        title = (f"{args.preset}: {preset.chunk} queries, {about['keys']} keys, {about['heads']}, "
                 f"{about['device']}")
        plot(args.plot, result["layer"], title)


if __name__ == "__main__":
    main()
