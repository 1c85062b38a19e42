"""Cosmos3 through the cache at its own geometry, random weights: milliseconds a forward, memory, graphs, compile.

    python benchmarks/bench_cosmos3.py                         36 layers, 480x832, a full window of 95 frames (CUDA)
    python benchmarks/bench_cosmos3.py --layers 4 --compile    also the compiled blocks
    python benchmarks/bench_cosmos3.py --tiny                  a few seconds on a CPU: does the script work?

Each way of running (eager, CUDA graph, compiled) gives the same velocity as the eager one, or the run fails. The
attention row is the cached attention of all layers alone (K/V write included), timed on the same cache.
"""

import argparse
import dataclasses
import json
import statistics
import time

import torch
from diffusers import Cosmos3OmniTransformer

from bc_diffusers import BlockCausalKVCache, block_causal_attention
from bc_diffusers.attention import CallShape, choose_backend
from bc_diffusers.models import VideoFormat, adapter_class_for
from bc_diffusers.pipelines import PRESETS
from bc_diffusers.pipelines.resources import PAGE_SIZE, rollout_spec


TINY = {"head_dim": 16, "hidden_size": 64, "intermediate_size": 96, "latent_channel": 4, "patch_latent_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96, "rope_axes_dim": [4, 2, 2]}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=832)
    parser.add_argument("--prompt-tokens", type=int, default=301, help="a length that divides nothing")
    parser.add_argument("--window-frames", type=int, default=PRESETS["cosmos3"].window_frames)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--compile", action="store_true", help="also with compile_repeated_blocks")
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--json", help="where the numbers go, besides the screen")
    parser.add_argument("--tiny", action="store_true")
    return parser.parse_args()


class Bench:
    def __init__(self, args):
        self.args = args
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.type == "cpu" and not args.tiny:
            raise SystemExit("this benchmark needs a CUDA device; --tiny runs anywhere")
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.config = PRESETS["cosmos3"]
        height, width, window = (32, 64, 5) if args.tiny else (args.height, args.width, args.window_frames)
        self.window = window
        torch.manual_seed(0)
        default = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        with self.device:
            self.model = Cosmos3OmniTransformer(**(TINY if args.tiny else {}), num_hidden_layers=args.layers).eval()
        torch.set_default_dtype(default)
        adapter_class = adapter_class_for("Cosmos3OmniTransformer")
        self.adapter = adapter_class(self.model, VideoFormat(24.0, 4, 16))
        self.h, self.w = height // 16, width // 16
        per_frame = adapter_class.tokens_per_frame(self.model.config, self.h, self.w)
        self.frames = self.config.chunk_frames
        self.tokens, self.block = self.frames * per_frame, self.config.clean_block_frames * per_frame
        spec = rollout_spec(self.rollout(window), per_frame, self.config.max_sequence_length)
        layers = adapter_class.layer_geometry(self.model.config)
        self.layers = layers
        self.cache = BlockCausalKVCache(
            num_layers=layers.num_layers, num_kv_heads=layers.num_kv_heads, head_dim=layers.head_dim,
            pool_tokens=BlockCausalKVCache.pool_tokens_for(spec, PAGE_SIZE), page_size=PAGE_SIZE, dtype=self.dtype,
            device=self.device)
        self.rotary = self.adapter.make_rotary(self.frames, self.h, self.w, self.device)
        shape = CallShape(self.device, self.dtype, layers.num_heads, layers.num_kv_heads, layers.head_dim, PAGE_SIZE)
        self.backend = choose_backend(args.backend, shape).name
        n = min(args.prompt_tokens, self.config.max_sequence_length)
        self.prompt = {"prompt_ids": torch.randint(self.model.config.vocab_size, (n,), device=self.device)}
        self.cache.open(spec, n)
        self.latents = torch.randn(1, self.model.config.latent_channel, self.frames, self.h, self.w,
                                   device=self.device)
        self.timestep = torch.full((1,), 750.0, device=self.device)

    def rollout(self, window):
        return dataclasses.replace(self.config, window_frames=window)

    # ------------------------------------------------------------------------------------------------ what is timed
    def denoise(self):
        return self.adapter.forward(self.latents, self.timestep, self.prompt, rotary=self.rotary,
                                    plan=self.denoise_plan, backend=self.backend)

    def clean(self):
        return self.adapter.forward(self.latents, self.timestep, self.prompt, rotary=self.rotary,
                                    plan=self.clean_plan, backend=self.backend, clean_frames=self.frames)

    def attention(self, plan):
        g = self.layers
        q = torch.randn(1, self.tokens, g.num_heads, g.head_dim, dtype=self.dtype, device=self.device)
        k, v = torch.randn(2, 1, self.tokens, g.num_kv_heads, g.head_dim, dtype=self.dtype, device=self.device)

        def run():
            for layer in range(g.num_layers):
                block_causal_attention(q, k, v, plan, layer, backend=self.backend)
        return run

    def milliseconds(self, run):
        run()
        times = []
        for _ in range(self.args.repeat):
            if self.device.type == "cuda":
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                run()
                stop.record()
                stop.synchronize()
                times.append(start.elapsed_time(stop))
            else:
                begin = time.perf_counter()
                run()
                times.append(1000 * (time.perf_counter() - begin))
        return statistics.median(times)

    def captured(self, run):
        """The run as a CUDA graph: (replay, the tensor it fills)."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        return graph.replay, out

    # ------------------------------------------------------------------------------------------------ the run
    @torch.no_grad()
    def run(self):
        rows = {}
        begin = time.perf_counter()
        self.adapter.begin(self.cache, self.prompt)
        for frame in range(0, self.window + self.frames, self.frames):  # fills the window with clean passes
            self.rotary.set_start(frame)
            self.clean_plan = self.cache.plan(self.tokens, self.block)
            self.clean()
            self.cache.commit()
        rows["fill the window, s"] = time.perf_counter() - begin
        self.clean_plan = self.cache.plan(self.tokens, self.block)
        self.denoise_plan = self.cache.plan(self.tokens, self.tokens)
        rows["attention of a denoising forward, ms"] = self.milliseconds(self.attention(self.denoise_plan))
        rows["attention of a clean pass, ms"] = self.milliseconds(self.attention(self.clean_plan))
        ways = {"denoising forward": self.denoise, "clean pass": self.clean}
        expected = self.denoise().clone()
        for name, way in ways.items():
            rows[f"{name}, eager, ms"] = self.milliseconds(way)
        if self.device.type == "cuda" and self.backend != "reference":
            for name, way in ways.items():
                replay, out = self.captured(way)
                rows[f"{name}, CUDA graph, ms"] = self.milliseconds(replay)
                if way == self.denoise:
                    self.check("CUDA graph", out, expected)
        if self.args.compile:
            self.model.compile_repeated_blocks(fullgraph=True)
            self.check("compiled", self.denoise(), expected)
            for name, way in ways.items():
                rows[f"{name}, compiled, ms"] = self.milliseconds(way)
        rows["new prompt of the same length, ms"] = self.milliseconds(
            lambda: self.adapter.change_prompt(self.cache, self.prompt, self.prompt))
        rows["pool, GiB"] = self.cache.pool_bytes / 2**30
        rows["weights, GiB"] = sum(p.numel() * p.element_size() for p in self.model.parameters()) / 2**30
        if self.device.type == "cuda":
            rows["peak memory, GiB"] = torch.cuda.max_memory_allocated() / 2**30
        return rows

    def check(self, what, out, expected):
        error = (out - expected).abs().max().item()
        bound = 0.02 * expected.abs().max().item()
        if not error <= bound:
            raise SystemExit(f"{what} differs from eager by {error:.3g}, more than {bound:.3g}")


def main():
    args = arguments()
    if args.tiny:
        args.layers, args.prompt_tokens = min(args.layers, 2), 13
    bench = Bench(args)
    rows = bench.run()
    where = torch.cuda.get_device_name() if bench.device.type == "cuda" else "CPU"
    keys = bench.args.prompt_tokens + (bench.window + bench.frames) * bench.tokens // bench.frames
    print(f"{where}, {args.layers} layers, {bench.tokens} tokens a chunk over {keys} keys, backend {bench.backend}")
    for name, value in rows.items():
        print(f"  {name:45s}{value:10.2f}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"device": where, "backend": bench.backend, "layers": args.layers, **rows}, file, indent=1)


if __name__ == "__main__":
    main()
