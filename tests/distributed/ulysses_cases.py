"""Run by `accelerate launch` on every rank: each case compares several ranks with one, and the results go to files.

    accelerate launch ... ulysses_cases.py FOLDER [DEVICE] [CASE...]
"""

import contextlib
import json
import sys
import traceback
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from diffusers import (
    ContextParallelConfig,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from diffusers.utils import logging

import bc_diffusers
from bc_diffusers import BlockCausalKVCache, BlockCausalVideoPipeline, RolloutSpec, block_causal_attention, graphs
from bc_diffusers.attention import processor
from bc_diffusers.distributed import join_launch, make_grid


PROMPT = "a large red circle moves right slowly on a white background"
# 16 pixels are a token: 4x4 = 16 tokens a latent frame divide by 2 and 4; 3x5 = 15 do not, alone or in threes.
WHOLE, PADDED = {"height": 64, "width": 64}, {"height": 48, "width": 80}
CASES, CUDA_CASES = {}, {}


def case(function):
    CASES[function.__name__] = function
    return function


def cuda_case(function):
    CUDA_CASES[function.__name__] = function
    return function


class Ranks:
    """What the cases share: a pipeline with a small transformer of random weights, and how to run it on ranks."""

    def __init__(self, device: str):
        self.device = torch.device(device)
        self.world = dist.get_world_size()
        # On a GPU a matrix product of fewer rows may use another kernel, so there bits differ.
        self.exact = self.device.type == "cpu"
        self.head_dim = 24 if self.exact else 64  # what the GPU's attention kernels take
        self.parts = DiffusionPipeline.from_pretrained(bc_diffusers.embedded_model(), dtype=torch.float32)
        self.parts.to(self.device)

    def transformer(self, heads: int = 4) -> WanTransformer3DModel:
        torch.manual_seed(0)
        made = WanTransformer3DModel(num_attention_heads=heads, attention_head_dim=self.head_dim, in_channels=8,
                                     out_channels=8, text_dim=64, freq_dim=32, ffn_dim=64, num_layers=2)
        return made.to(self.device).eval()

    def pipeline(self, transformer=None, **rollout) -> BlockCausalVideoPipeline:
        components = {**self.parts.components, "transformer": transformer or self.transformer()}
        pipe = BlockCausalVideoPipeline(**components, preset="embedded", **rollout)
        pipe.set_progress_bar_config(disable=True)
        pipe.cuda_graphs = pipe.transformer.dtype == torch.bfloat16  # the reference backend cannot be captured
        return pipe

    def degrees(self) -> list[int]:
        return [d for d in (2, 4) if d <= self.world]

    def equal(self, got: torch.Tensor, want: torch.Tensor, exact: bool = True) -> None:
        assert got.shape == want.shape, (got.shape, want.shape)
        if self.exact and exact:
            difference = (got - want).abs().max().item()
            assert torch.equal(got, want), f"differs by up to {difference}"
        else:
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5 if self.exact else 1e-3)

    def compare(self, size: dict, frames: int, exact: bool = True, run=None, **rollout) -> None:
        """A rollout on 1 rank and on every degree of ranks gives the same latents."""
        pipe = self.pipeline(**rollout)
        run = run or latents_of
        want = run(pipe, num_frames=frames, **size)
        assert want.isfinite().all()
        for degree in self.degrees():
            pipe.enable_context_parallel(ulysses_degree=degree)
            self.equal(run(pipe, num_frames=frames, **size), want, exact)
        pipe.enable_context_parallel(ulysses_degree=1)
        self.equal(run(pipe, num_frames=frames, **size), want)


def latents_of(pipe, **kwargs) -> torch.Tensor:
    with pipe.stream(PROMPT, seed=3, output_type="latent", **kwargs) as stream:
        return torch.cat([chunk.latents for chunk in stream], 2)


def refused(function, *parts: str) -> None:
    try:
        function()
    except (ValueError, RuntimeError) as error:
        for part in parts:
            assert part in str(error), f"{part!r} is not in {error}"
    else:
        raise AssertionError(f"nothing was raised (expected {parts})")


# ---------------------------------------------------------------------------------------------------- rollouts
@case
def chunk_full(ranks):
    ranks.compare(WHOLE, 45)


@case
def frame_causal(ranks):
    ranks.compare(WHOLE, 45, clean_block_frames=1)


@case
def padded_chunk(ranks):
    ranks.compare(PADDED, 45)


@case
def padded_frame_causal(ranks):
    ranks.compare(PADDED, 45, clean_block_frames=1)


@case
def eviction_and_sink(ranks):
    ranks.compare(WHOLE, 81, window_frames=4, sink_frames=2)
    ranks.compare(PADDED, 81, window_frames=4, sink_frames=2, clean_block_frames=2)


@case
def short_last_chunk(ranks):
    ranks.compare(PADDED, 13, exact=False)  # 4 latent frames: the last chunk is 15 tokens, under 8 a rank


@case
def fewer_rows_than_ranks(ranks):
    ranks.compare({"height": 16, "width": 16}, 5, exact=False, chunk_frames=1)  # one token a chunk


@case
def prompt_change(ranks):
    def run(pipe, **kwargs):
        with pipe.stream(PROMPT, seed=3, output_type="latent", **kwargs) as stream:
            out = [next(stream).latents]
            assert stream.set_prompt("a small blue square on black") == 1
            return torch.cat(out + [chunk.latents for chunk in stream], 2)

    ranks.compare(WHOLE, 33, run=run)


@case
def guidance(ranks):
    """Two histories, both shared."""
    ranks.compare(PADDED, 33, run=lambda pipe, **kwargs: latents_of(
        pipe, guidance_scale=3.0, negative_prompt="a blurry square", **kwargs))


@case
def first_frame_given(ranks):
    """Timesteps then differ from token to token."""
    image = torch.rand(3, 48, 80, generator=torch.Generator().manual_seed(1))
    ranks.compare(PADDED, 21, run=lambda pipe, **kwargs: latents_of(pipe, image=image, **kwargs))


@case
def fused_projections(ranks):
    transformer = ranks.transformer()
    transformer.fuse_qkv_projections()
    pipe = ranks.pipeline(transformer)
    want = latents_of(pipe, num_frames=21, **PADDED)
    pipe.enable_context_parallel(ulysses_degree=2)
    ranks.equal(latents_of(pipe, num_frames=21, **PADDED), want)


@case
def fused_norm_and_rotation(ranks):
    """The operator that GPUs use, with every rank's own rows of the rotary tables."""
    with mock.patch.object(processor, "FUSED_ON", {ranks.device.type}), \
            mock.patch.object(processor.ops, "qk_norm_rope_", wraps=processor.ops.qk_norm_rope_) as calls:
        pipe = ranks.pipeline()
        pipe.enable_context_parallel(ulysses_degree=2)
        fused = latents_of(pipe, num_frames=21, **PADDED)
    assert calls.call_count > 0
    pipe.enable_context_parallel(ulysses_degree=1)
    with mock.patch.object(processor, "FUSED_ON", set()):
        ranks.equal(fused, latents_of(pipe, num_frames=21, **PADDED), exact=False)


@case
def bfloat16_noise(ranks):
    """Sharing a video adds no more error than bfloat16 has on one rank."""
    exact = latents_of(ranks.pipeline(), num_frames=21, **PADDED)
    pipe = ranks.pipeline(ranks.transformer().to(torch.bfloat16))
    alone = (latents_of(pipe, num_frames=21, **PADDED) - exact).pow(2).mean().sqrt()
    pipe.enable_context_parallel(ulysses_degree=ranks.world)
    shared = (latents_of(pipe, num_frames=21, **PADDED) - exact).pow(2).mean().sqrt()
    assert 0 < shared <= 1.2 * alone, (shared, alone)


@case
def compiled_blocks(ranks):
    """One graph of a block, the exchanges inside it."""
    pipe = ranks.pipeline()
    want = latents_of(pipe, num_frames=21, **PADDED)
    pipe.enable_context_parallel(ulysses_degree=2)
    pipe.transformer.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    ranks.equal(latents_of(pipe, num_frames=21, **PADDED), want, exact=False)


@case
def other_families(ranks):
    """SkyReels-V2, LTX-Video, Cosmos3 (grouped heads, its prompt in the cache); chunks of 18 tokens, then 9."""
    from tiny_pipelines import STOCK

    sizes = {"skyreels": (48, 48), "cosmos3": (48, 48), "ltx": (96, 96)}
    rollout = {"chunk_frames": 2, "window_frames": 3, "sink_frames": 1, "clean_block_frames": 1,
               "denoising_sigmas": [1.0, 0.5], "default_fps": 24, "max_sequence_length": 64}
    for name, (height, width) in sizes.items():
        pipe = BlockCausalVideoPipeline.from_pipe(STOCK[name]().to(ranks.device), preset="self-forcing", **rollout)
        pipe.set_progress_bar_config(disable=True)
        frames = 8 * pipe.vae_scale_factor_temporal + 1  # 9 latent frames: the last chunk is short

        def run():
            with pipe.stream("a red cat", seed=1, num_frames=frames, height=height, width=width,  # noqa: B023
                             output_type="latent") as stream:
                out = [next(stream).latents]
                stream.set_prompt("the sea is of waves")
                return torch.cat(out + [chunk.latents for chunk in stream], 2)

        want = run()
        assert want.shape[2] == 9 and want.isfinite().all()
        pipe.enable_context_parallel(ulysses_degree=2)
        ranks.equal(run(), want, exact=False)
        with mock.patch.object(processor, "FUSED_ON", {ranks.device.type}):
            ranks.equal(run(), want, exact=False)


# ---------------------------------------------------------------------------------------------------- noise, frames
@case
def ranks_agree_on_noise(ranks):
    pipe = ranks.pipeline()
    grid = pipe.enable_context_parallel(ulysses_degree=2)
    torch.manual_seed(100 + grid.rank)  # what no seed, no generator and a generator of its own differ by
    own = torch.Generator().manual_seed(100 + grid.rank)
    noise = torch.randn(1, 8, 4, 8, 8)
    for kwargs in ({}, {"generator": own}, {"latents": noise}, {"latents": noise, "generator": own}):
        length = {} if "latents" in kwargs else {"num_frames": 13}
        with pipe.stream(PROMPT, output_type="latent", **WHOLE, **length, **kwargs) as stream:
            latents = torch.cat([chunk.latents for chunk in stream], 2)
        first = grid.ulysses.broadcast(latents, latents.device)
        assert torch.equal(latents, first), f"the ranks of a group differ with {list(kwargs)}"


@case
def first_rank_has_the_frames(ranks):
    pipe = ranks.pipeline()
    want = pipe(PROMPT, num_frames=21, **WHOLE, generator=torch.Generator().manual_seed(5)).frames
    grid = pipe.enable_context_parallel(ulysses_degree=2)
    got = pipe(PROMPT, num_frames=21, **WHOLE, generator=torch.Generator().manual_seed(5)).frames
    assert (got is not None) == grid.has_frames
    if grid.has_frames:
        ranks.equal(torch.from_numpy(got), torch.from_numpy(want))


@case
def cache_is_shared(ranks):
    pipe = ranks.pipeline()
    sizes = {}
    for degree in [1, *ranks.degrees()]:
        pipe.enable_context_parallel(ulysses_degree=degree)
        with pipe.stream(PROMPT, num_chunks=2, output_type="latent", **WHOLE) as stream:
            cache = stream.cache
            sizes[degree] = sum(t.numel() for name, t in cache.device_tensors() if name == "pool")
            list(stream)
        with pipe.stream(PROMPT, num_chunks=1, output_type="latent", **WHOLE) as stream:
            assert stream.cache is cache, "the second stream of a geometry takes the first one's cache"
            list(stream)
    assert all(sizes[1] == degree * size for degree, size in sizes.items()), sizes


@case
def stock_pipeline_is_whole(ranks):
    """Our hooks act in cached forwards only: the same transformer serves a stock pipeline on each rank alone."""
    pipe = ranks.pipeline()
    scheduler = FlowMatchEulerDiscreteScheduler(shift=5.0)
    stock = WanPipeline(**{**pipe.components, "scheduler": scheduler})
    stock.set_progress_bar_config(disable=True)

    def run():
        return stock(PROMPT, num_frames=9, height=48, width=80, num_inference_steps=2, guidance_scale=1.0,
                     generator=torch.Generator().manual_seed(2), output_type="latent").frames

    want = run()
    pipe.enable_context_parallel(ulysses_degree=2)
    latents_of(pipe, num_frames=9, **PADDED)
    assert torch.equal(run(), want)


# ---------------------------------------------------------------------------------------------------- diffusers' own
def enable_parallelism(transformer, **config) -> None:
    """diffusers' own method; on a machine without accelerators it only lacks a device number."""
    count = torch.accelerator.device_count
    if not torch.cuda.is_available():
        torch.accelerator.device_count = lambda: 1
    try:
        transformer.enable_parallelism(config=ContextParallelConfig(**config))
    finally:
        torch.accelerator.device_count = count


@case
def diffusers_parallelism_in_either_order(ranks):
    want = latents_of(ranks.pipeline(), num_frames=33, **WHOLE)
    before = ranks.transformer()
    enable_parallelism(before, ulysses_degree=ranks.world)
    ranks.equal(latents_of(ranks.pipeline(before), num_frames=33, **WHOLE), want)
    pipe = ranks.pipeline()
    ranks.equal(latents_of(pipe, num_frames=33, **WHOLE), want)
    enable_parallelism(pipe.transformer, ulysses_degree=ranks.world)
    ranks.equal(latents_of(pipe, num_frames=33, **WHOLE), want)
    refused(lambda: latents_of(pipe, num_frames=33, **PADDED), "45 tokens", "enable_context_parallel")
    refused(lambda: latents_of(pipe, num_chunks=None, height=16, width=48), "9 tokens")
    refused(lambda: pipe.enable_context_parallel(ulysses_degree=2), "enable_parallelism")


@case
def refusals_of_diffusers_configs(ranks):
    for config, part in (({"ring_degree": ranks.world}, "ring_degree"),
                         ({"ulysses_degree": ranks.world, "ulysses_anything": True}, "ulysses_anything")):
        transformer = ranks.transformer()
        enable_parallelism(transformer, **config)
        refused(lambda: latents_of(ranks.pipeline(transformer), num_frames=9, **WHOLE), part)  # noqa: B023
    transformer = ranks.transformer(heads=3)
    enable_parallelism(transformer, ulysses_degree=ranks.world)
    refused(lambda: latents_of(ranks.pipeline(transformer), num_frames=9, **WHOLE), "3 attention heads")


@case
def refusals_of_degrees(ranks):
    pipe = ranks.pipeline(ranks.transformer(heads=3))
    refused(lambda: pipe.enable_context_parallel(ulysses_degree=2), "3 attention heads", "that work are 1")
    refused(lambda: ranks.pipeline().enable_context_parallel(ulysses_degree=3), "does not divide",
            f"{ranks.world} processes", "1, 2")
    refused(lambda: ranks.pipeline().enable_context_parallel(ulysses_degree=0), "at least 1")
    pipe = ranks.pipeline()
    pipe.enable_context_parallel(ulysses_degree=2)
    refused(lambda: latents_of(pipe, num_frames=9, parity=True, **WHOLE), "parity")
    assert pipe.enable_context_parallel(ulysses_degree=1).ulysses is None


# ---------------------------------------------------------------------------------------------------- attention alone
@case
def grouped_heads(ranks):
    """8 query heads on 4 K/V heads, a padded sequence, chunk-full and frame-causal, past the window."""
    tokens, block, dim = 45, 15, 16
    spec = RolloutSpec(window_tokens=70, max_staged_tokens=tokens, causal_blocks={tokens: 1, block: 3},
                       max_pin_tokens=20)
    pool = BlockCausalKVCache.pool_tokens_for(spec, 16)

    def cache(kv_heads):
        made = BlockCausalKVCache(num_layers=1, num_kv_heads=kv_heads, head_dim=dim, pool_tokens=pool, page_size=16,
                                  dtype=torch.float32, device=ranks.device)
        return made.open(spec, pin_tokens=20)

    for degree in ranks.degrees():
        group = make_grid(degree, 8, 4, ranks.device).ulysses
        whole, shared = cache(4), cache(4 // degree)
        noise = torch.Generator().manual_seed(7)
        for step in range(6):
            q, k, v = (torch.randn(1, tokens, heads, dim, generator=noise).to(ranks.device) for heads in (8, 4, 4))
            size = block if step % 2 else tokens
            want = block_causal_attention(q, k, v, whole.plan(tokens, size), layer=0)
            local = [group.split_tokens(x) for x in (q, k, v)]
            assert local[0].shape[1] == -(-tokens // degree)
            exchanged = group.exchange_qkv(*local, num_tokens=tokens)
            assert [x.shape[2] for x in exchanged] == [8 // degree, 4 // degree, 4 // degree]
            out = block_causal_attention(*exchanged, shared.plan(tokens, size), layer=0)
            out = group.join_tokens(group.exchange_output(out, local[0].shape[1]), tokens)
            ranks.equal(out, want)
            whole.commit()
            shared.commit()


@case
def broadcasts(ranks):
    grid = make_grid(ranks.world, 4, 4, ranks.device)
    assert grid.ulysses.broadcast_object({"rank": grid.rank}, ranks.device) == {"rank": 0}
    got = grid.ulysses.broadcast(torch.full((2, 3), float(grid.rank)), ranks.device)
    assert torch.equal(got, torch.zeros(2, 3))
    assert grid.share(range(5)) == list(range(5))
    alone = make_grid(1, 4, 4, ranks.device)
    assert alone.share(range(5)) == list(range(alone.rank, 5, ranks.world)) and alone.has_frames


@case
def votes(ranks):
    group = make_grid(ranks.world, 4, 4, ranks.device).ulysses
    assert group.all_agree(True, ranks.device)
    for rank in range(ranks.world):
        assert not group.all_agree(group.rank != rank, ranks.device)
    assert not group.all_agree(False, ranks.device)


@cuda_case
def captured_graph(ranks):
    """Exchange, cached attention and the way back in one CUDA graph, replayed past the window, equal eager runs."""
    tokens, dim, heads = 360, 64, 4
    spec = RolloutSpec(window_tokens=500, max_staged_tokens=tokens, causal_blocks={tokens: 1})
    pool = BlockCausalKVCache.pool_tokens_for(spec, 128)
    group = make_grid(ranks.world, heads, heads, ranks.device).ulysses
    rows = -(-tokens // ranks.world)
    q, k, v = (torch.randn(1, rows, heads, dim, device=ranks.device, dtype=torch.bfloat16) for _ in range(3))

    def run(cache):
        with torch.no_grad():
            exchanged = group.exchange_qkv(q, k, v, tokens)
            out = block_causal_attention(*exchanged, cache.plan(tokens, tokens), layer=0)
            return group.exchange_output(out, rows)

    caches = [BlockCausalKVCache(num_layers=1, num_kv_heads=heads // ranks.world, head_dim=dim, pool_tokens=pool,
                                 page_size=128, dtype=torch.bfloat16, device=ranks.device) for _ in range(2)]
    eager, replayed = (cache.open(spec) for cache in caches)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(replayed)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(replayed)
    for _ in range(5):
        for x in (q, k, v):
            x.normal_()
        graph.replay()
        assert torch.equal(out, run(eager))
        replayed.plan(tokens, tokens)
        eager.commit()
        replayed.commit()


@cuda_case
def pipeline_graphs(ranks):
    """Every full chunk's forwards are captured with their exchanges; the graphs serve a second stream too."""
    pipe = ranks.pipeline(ranks.transformer().to(torch.bfloat16))
    pipe.enable_context_parallel(ulysses_degree=2)
    pipe.cuda_graphs = False
    want = latents_of(pipe, num_frames=81, **PADDED)
    pipe.cuda_graphs, captures = True, []
    for _ in range(2):
        with pipe.stream(PROMPT, seed=3, output_type="latent", num_frames=81, **PADDED) as stream:
            graphs = stream._resources.graphs
            latents = torch.cat([chunk.latents for chunk in stream], 2)
        assert torch.equal(latents, want)
        captures.append(graphs.captures)
    assert captures[0] > 0 and captures[0] == captures[1] and graphs.replays > 10


@cuda_case
def a_capture_that_fails_on_one_rank(ranks):
    """Then no rank replays that pass, and the video is the same."""
    pipe = ranks.pipeline(ranks.transformer().to(torch.bfloat16))
    grid = pipe.enable_context_parallel(ulysses_degree=2)
    pipe.cuda_graphs = False
    want = latents_of(pipe, num_frames=81, **PADDED)
    pipe.cuda_graphs, capturing, seen = True, graphs.capturing, []

    @contextlib.contextmanager
    def first_fails(*args):
        with capturing(*args):
            yield
            seen.append(1)
            if len(seen) == 1 and grid.ulysses.rank == 1:
                raise RuntimeError("this rank cannot capture its first pass")

    with mock.patch.object(graphs, "capturing", first_fails), \
            pipe.stream(PROMPT, seed=3, output_type="latent", num_frames=81, **PADDED) as stream:
        runner = stream._resources.graphs
        latents = torch.cat([chunk.latents for chunk in stream], 2)
    assert torch.equal(latents, want)
    counts = grid.ulysses.broadcast_object((len(seen), len(runner), runner.captures, runner.replays), ranks.device)
    assert (len(seen), len(runner), runner.captures, runner.replays) == counts
    assert runner.captures == len(runner) - 1 and runner.replays > 0


def run_cases(folder: Path, device: str, names: list[str]) -> None:
    join_launch(cpu=device == "cpu")
    if device != "cpu":
        device = f"{device}:{torch.cuda.current_device()}"
    logging.disable_progress_bar()
    ranks, results = Ranks(device), {}
    cases = CASES if device == "cpu" else CASES | CUDA_CASES
    for name in names or cases:
        try:
            cases[name](ranks)
            results[name] = "passed"
        except Exception:  # the ranks are out of step now: the launch ends here
            results[name] = traceback.format_exc()
            raise
        finally:
            (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()


if __name__ == "__main__":
    run_cases(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "cpu", sys.argv[3:])
