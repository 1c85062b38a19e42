"""How a rollout scales over processes: time of a chunk, share of communication, cache bytes a rank.

    accelerate launch --num_processes 2 benchmarks/bench_scaling.py --model wan-1.3b --json scaling.json
    python benchmarks/bench_scaling.py --model wan-14b --simulate --measured scaling.json
    python benchmarks/bench_scaling.py --overhead --graphs              # what one rank pays for being ready to share

A launch of N processes measures one rank alone, N ranks with a video each, and every Ulysses degree that divides N, in
the steady state (window full), denoising and clean passes and commits, no decode. Weights are random: times do not
depend on them. `--simulate` predicts larger machines from a measured one-GPU chunk and the bandwidths of the links.
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import diffusers
import torch
import torch.distributed as dist
from scaling_model import Link, Machine, predict

from bc_diffusers import BlockCausalKVCache, RolloutSpec, block_causal_attention
from bc_diffusers.attention import ulysses
from bc_diffusers.attention.ulysses import UlyssesGroup
from bc_diffusers.distributed import join_launch, make_grid
from bc_diffusers.distributed.bulletin import Bulletin
from bc_diffusers.graphs import capturing
from bc_diffusers.models import adapter_class_for


PAGE_SIZE = 128


@dataclass(frozen=True)
class Geometry:
    """A model's shapes and one chunk of it. `denoise` passes and one clean pass make a chunk."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # 0: the attentions of all layers alone
    text: int  # text tokens of the cross-attention, width of their embeddings
    text_dim: int
    frames: int
    height: int  # of a latent frame, in tokens
    width: int
    window_tokens: int
    denoise: int = 4
    channels: int = 16
    ffn_matrices: int = 2
    family: str = "WanTransformer3DModel"

    @property
    def tokens(self) -> int:
        return self.frames * self.height * self.width

    @property
    def spec(self) -> RolloutSpec:
        return RolloutSpec(self.window_tokens, self.tokens, {self.tokens: 1})


GEOMETRIES = {
    # Wan 2.1 at 480x832: 30 x 52 tokens a latent frame; Self-Forcing's rollout, 18 frames of history.
    "wan-1.3b": Geometry(30, 12, 12, 128, 8960, 512, 4096, 3, 30, 52, 18 * 1560),
    "wan-14b": Geometry(40, 40, 40, 128, 13824, 512, 4096, 3, 30, 52, 18 * 1560),
    # Cosmos3's generation stream: grouped heads, no cross-attention. Whole, and the attentions of its layers alone.
    "cosmos3": Geometry(36, 32, 8, 128, 12288, 0, 0, 4, 2, 197, 37430, 4, 48, 3, "Cosmos3OmniTransformer"),
    "cosmos3-attention": Geometry(36, 32, 8, 128, 0, 0, 0, 4, 2, 197, 37430),
    # Small enough for a CPU.
    "tiny": Geometry(2, 4, 4, 24, 64, 32, 64, 3, 4, 4, 18 * 16, channels=8),
    "tiny-cosmos3": Geometry(2, 4, 2, 16, 96, 0, 0, 3, 4, 4, 18 * 16, 4, 4, 3, "Cosmos3OmniTransformer"),
    "tiny-attention": Geometry(2, 8, 4, 32, 0, 0, 0, 3, 4, 4, 18 * 16),
}


class Workload:
    """One rank's part of a rollout in its steady state."""

    def __init__(self, geometry: Geometry, group, device: torch.device, dtype: torch.dtype):
        self.geometry, self.group, self.device, self.dtype = geometry, group, device, dtype
        spec, shards = geometry.spec, 1 if group is None else group.degree
        self.cache = BlockCausalKVCache(
            num_layers=geometry.layers, num_kv_heads=geometry.kv_heads // shards, head_dim=geometry.head_dim,
            pool_tokens=BlockCausalKVCache.pool_tokens_for(spec, PAGE_SIZE), page_size=PAGE_SIZE, dtype=dtype,
            device=device)
        self.cache.open(spec)
        self.plan = None
        while self.cache.committed <= geometry.window_tokens:  # zeros do for history
            self.plan = self.cache.plan(geometry.tokens, geometry.tokens)
            self.cache.commit()

    def run_pass(self) -> None:
        raise NotImplementedError

    def chunk(self, run_pass) -> None:
        for _ in range(self.geometry.denoise + 1):
            self.plan = self.cache.plan(self.geometry.tokens, self.geometry.tokens)
            run_pass()
        self.cache.commit()

    def close(self) -> None:
        self.cache.shutdown()


class TransformerWorkload(Workload):
    def __init__(self, geometry, group, device, dtype, transformer):
        super().__init__(geometry, group, device, dtype)
        self.adapter = adapter_class_for(geometry.family)(transformer)
        self.adapter.holder.share_sequence(group)
        height, width = 2 * geometry.height, 2 * geometry.width  # a token is 2x2 latent pixels
        self.latents = torch.randn(1, geometry.channels, geometry.frames, height, width, device=device)
        self.timestep = torch.full((1,), 500.0, device=device)
        self.conditions = {"prompt_embeds": torch.randn(1, geometry.text, geometry.text_dim, device=device).to(dtype)}
        self.rotary = self.adapter.make_rotary(geometry.frames, height, width, device)

    def run_pass(self) -> None:
        self.adapter.forward(self.latents, self.timestep, self.conditions, plan=self.plan, rotary=self.rotary)


class AttentionWorkload(Workload):
    def __init__(self, geometry, group, device, dtype):
        super().__init__(geometry, group, device, dtype)
        self.views = [self.cache.layer(i) for i in range(geometry.layers)]
        rows = geometry.tokens if group is None else -(-geometry.tokens // group.degree)
        self.q, self.k, self.v = (torch.randn(1, rows, heads, geometry.head_dim, device=device).to(dtype)
                                  for heads in (geometry.heads, geometry.kv_heads, geometry.kv_heads))

    def run_pass(self) -> None:
        for view in self.views:
            q, k, v = self.q, self.k, self.v
            if self.group is not None:
                q, k, v = self.group.exchange_qkv(q, k, v, self.plan.num_tokens)
            out = block_causal_attention(q, k, v, self.plan, view)
            if self.group is not None:
                self.group.exchange_output(out, self.q.shape[1])


def make_workload(geometry: Geometry, group, device: torch.device, dtype: torch.dtype, transformer) -> Workload:
    """Of a model's transformer, or without one of its attentions alone."""
    if transformer is None:
        return AttentionWorkload(geometry, group, device, dtype)
    return TransformerWorkload(geometry, group, device, dtype, transformer)


def make_transformer(geometry: Geometry, device: torch.device, dtype: torch.dtype):
    if geometry.family == "WanTransformer3DModel":
        config = {"num_attention_heads": geometry.heads, "attention_head_dim": geometry.head_dim,
                  "ffn_dim": geometry.ffn, "in_channels": geometry.channels, "out_channels": geometry.channels,
                  "text_dim": geometry.text_dim, "num_layers": geometry.layers}
    else:
        d = geometry.head_dim
        axes = [d // 2 - 2 * (d // 6), d // 6, d // 6]
        config = {"num_attention_heads": geometry.heads, "num_key_value_heads": geometry.kv_heads, "head_dim": d,
                  "hidden_size": geometry.heads * d, "intermediate_size": geometry.ffn, "rope_axes_dim": axes,
                  "latent_channel": geometry.channels, "patch_latent_dim": 4 * geometry.channels,
                  "num_hidden_layers": geometry.layers, "vocab_size": 128}  # no text here, so no large vocabulary
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = getattr(diffusers, geometry.family)(**config)
    finally:
        torch.set_default_dtype(default)
    return model.eval()


# -------------------------------------------------------------------------------------------------- measuring
def captured(run_pass):
    """`run_pass` as a CUDA graph, its collectives inside."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run_pass()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with capturing(graph, torch.cuda.graph_pool_handle(), torch.device("cuda", torch.cuda.current_device())):
        run_pass()
    return graph.replay


def communication_left_out():
    """Every collective becomes a copy of the same size, so that the rest can be timed alone."""
    def copy(out, x, group):
        out.view(-1)[:x.numel()].copy_(x.reshape(-1))

    return mock.patch.multiple(ulysses, dist=SimpleNamespace(all_to_all_single=copy), _all_gather=copy)


@torch.no_grad()
def time_chunk(workload: Workload, chunks: int, graphs: bool) -> float:
    """Median milliseconds of a chunk on this rank."""
    device, times = workload.device, []
    run_pass = captured(workload.run_pass) if graphs else workload.run_pass

    def wait():
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for i in range(chunks + 2):
        wait()
        start = time.perf_counter()
        workload.chunk(run_pass)
        wait()
        if i >= 2:
            times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def slowest(milliseconds: float, group, device: torch.device) -> float:
    if not dist.is_initialized():
        return milliseconds
    value = torch.tensor([milliseconds], dtype=torch.float64, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX, group=group)
    return value.item()


def measure(name: str, degrees: list[int] | None, chunks: int, graphs: bool, device: torch.device,
            dtype: torch.dtype) -> list[dict]:
    """Rows of results, the same on every rank: rank 0 alone first, then each degree on all ranks."""
    geometry = GEOMETRIES[name]
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    if degrees is None:
        degrees = [d for d in range(1, world + 1) if world % d == 0 and geometry.kv_heads % d == 0]
    bulletin = Bulletin(rank)
    transformer = make_transformer(geometry, device, dtype) if geometry.ffn else None

    def timed(group, without_communication=False):
        work = make_workload(geometry, group, device, dtype, transformer)
        try:
            if without_communication:
                with communication_left_out():
                    return time_chunk(work, chunks, graphs), work.cache.pool_bytes
            return time_chunk(work, chunks, graphs), work.cache.pool_bytes
        finally:
            work.close()

    def row(degree, ranks, milliseconds, share, pool_bytes):
        return {"model": name, "ranks": ranks, "ulysses": degree, "ms_per_chunk": milliseconds,
                "communication_share": share, "cache_bytes": pool_bytes, "graphs": graphs, "device": str(device.type),
                "chip": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"}

    rows = []
    if rank == 0:  # the others sleep: no collective, which would keep their GPUs (or the CPU) busy
        alone, pool_bytes = timed(None)
        rows.append(row(1, 1, alone, 0.0, pool_bytes))
        bulletin.add(f"alone {name}")
    bulletin.wait_for(f"alone {name}", 1)
    for degree in degrees if world > 1 else []:
        group = make_grid(degree, geometry.heads, geometry.kv_heads, device).ulysses
        milliseconds, pool_bytes = timed(group)
        milliseconds, share = slowest(milliseconds, None, device), 0.0
        if group is not None:
            share = max(0.0, 1 - slowest(timed(group, True)[0], None, device) / milliseconds)
        rows.append(row(degree, world, milliseconds, share, pool_bytes))
    return rows


def measure_overhead(name: str, chunks: int, graphs: bool, device: torch.device, dtype: torch.dtype,
                     rounds: int = 3) -> list[dict]:
    """A rank without parallelism, with a Ulysses degree of 1, and one that exchanges with a group of itself alone
    (which the pipeline never does): medians of `rounds` rounds in turn, so that clocks drift alike for all."""
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0,
                                world_size=1)
    geometry = GEOMETRIES[name]
    transformer = make_transformer(geometry, device, dtype) if geometry.ffn else None
    ways = {"no parallelism": None, "ulysses 1": make_grid(1, geometry.heads, geometry.kv_heads, device).ulysses,
            "exchange with itself": UlyssesGroup(dist.group.WORLD, 1, 0)}
    times = {way: [] for way in ways}
    for _ in range(rounds):
        for way, group in ways.items():
            work = make_workload(geometry, group, device, dtype, transformer)
            try:
                times[way].append(time_chunk(work, chunks, graphs))
            finally:
                work.close()
    medians = {way: statistics.median(ms) for way, ms in times.items()}
    print(f"{name} on one {'GPU' if device.type == 'cuda' else 'CPU'}, graphs {'on' if graphs else 'off'}")
    for way, ms in medians.items():
        print(f"{way:>22} {ms:>9.2f} ms/chunk, {ms / medians['no parallelism']:.4f} x")
    return [{"model": name, "way": way, "ms_per_chunk": ms, "rounds": times[way], "graphs": graphs}
            for way, ms in medians.items()]


def print_rows(rows: list[dict]) -> None:
    alone = rows[0]["ms_per_chunk"]
    print(f"{rows[0]['model']} on {rows[0]['chip']}, graphs {'on' if rows[0]['graphs'] else 'off'}")
    print(f"{'ranks':>6} {'ulysses':>8} {'ms/chunk':>9} {'latency':>8} {'videos':>8} {'comm.':>7} "
          f"{'cache MiB/rank':>15}")
    for r in rows:
        videos = r["ranks"] // r["ulysses"]
        print(f"{r['ranks']:>6} {r['ulysses']:>8} {r['ms_per_chunk']:>9.2f} {alone / r['ms_per_chunk']:>7.2f}x "
              f"{videos * alone / r['ms_per_chunk']:>7.2f}x {r['communication_share']:>7.1%} "
              f"{r['cache_bytes'] / 2**20:>15.1f}")


# -------------------------------------------------------------------------------------------------- predicting
def one_gpu_milliseconds(name: str, measured: Path | None, given: float | None) -> float:
    if given is not None:
        return given
    if measured is None:
        raise SystemExit("--simulate needs the time of a chunk on one GPU: --measured FILE (written by --json) or "
                         "--chunk-ms MS")
    rows = [r for r in json.loads(measured.read_text()) if r["model"] == name and r["ranks"] == 1]
    if not rows:
        raise SystemExit(f"{measured} holds no one-GPU row of {name}")
    return rows[0]["ms_per_chunk"]


def simulate(name: str, chunk_ms: float, machine: Machine, measured: Path | None) -> None:
    geometry = GEOMETRIES[name]
    pool = BlockCausalKVCache.pool_bytes_for(geometry.spec, PAGE_SIZE, geometry.layers, geometry.kv_heads,
                                             geometry.head_dim, torch.bfloat16)
    known = {}
    if measured is not None:
        known = {(r["ranks"], r["ulysses"]): r["ms_per_chunk"] for r in json.loads(measured.read_text())
                 if r["model"] == name}
    print(f"{name}: predicted from {chunk_ms:.1f} ms a chunk on one GPU; {machine}")
    print(f"{'GPUs':>5} {'nodes':>6} {'ulysses':>8} {'ms/chunk':>9} {'latency':>8} {'videos':>8} {'comm.':>7} "
          f"{'cache MiB/rank':>15}  measured")
    for gpus in (1, 2, 4, 8, 16, 32):
        for degree in range(1, gpus + 1):
            if gpus % degree or geometry.heads % degree or geometry.kv_heads % degree:
                continue
            p = predict(geometry, chunk_ms, degree, machine)
            seen = known.get((gpus, degree))
            print(f"{gpus:>5} {-(-gpus // machine.gpus_per_node):>6} {degree:>8} {p.milliseconds:>9.1f} "
                  f"{chunk_ms / p.milliseconds:>7.2f}x {gpus // degree * chunk_ms / p.milliseconds:>7.2f}x "
                  f"{p.communication_share:>7.1%} {pool / degree / 2**20:>15.1f}  "
                  + ("" if seen is None else f"{seen:.1f} ms"))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=GEOMETRIES, default=["wan-1.3b"])
    parser.add_argument("--ulysses", type=int, nargs="+", help="degrees; all that divide by default")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--graphs", action="store_true", help="capture each pass in a CUDA graph")
    parser.add_argument("--overhead", action="store_true", help="one process: no parallelism, degree 1, exchange")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--json", type=Path, help="where the rows go")
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--measured", type=Path, help="rows of an earlier run")
    parser.add_argument("--chunk-ms", type=float, help="one GPU's chunk, instead of --measured")
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--link-gbs", type=float, default=300, help="GB/s a GPU sends within a node, as achieved")
    parser.add_argument("--network-gbs", type=float, default=40, help="GB/s a GPU sends to other nodes, as achieved")
    parser.add_argument("--link-us", type=float, default=20, help="microseconds a collective takes at least")
    parser.add_argument("--network-us", type=float, default=40, help="the same between nodes")
    parser.add_argument("--memory-gbs", type=float, default=3500, help="GB/s of the GPU's memory")
    args = parser.parse_args(arguments)
    if args.simulate:
        machine = Machine(args.gpus_per_node, Link(args.link_gbs, args.link_us),
                          Link(args.network_gbs, args.network_us), args.memory_gbs)
        for name in args.model:
            simulate(name, one_gpu_milliseconds(name, args.measured, args.chunk_ms), machine, args.measured)
        return
    kind = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    join_launch(cpu=kind == "cpu")
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    rows = []
    for name in args.model:
        if args.overhead:
            rows += measure_overhead(name, args.chunks, args.graphs, device, dtype)
            continue
        measured = measure(name, args.ulysses, args.chunks, args.graphs, device, dtype)
        if not dist.is_initialized() or dist.get_rank() == 0:
            print_rows(measured)
            rows += measured
    if args.json is not None and rows:
        args.json.write_text(json.dumps(rows, indent=1))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
