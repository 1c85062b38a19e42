"""A whole chunk through the pipeline (denoising passes, clean pass, commit, with --decode the VAE), random weights.

    python benchmarks/bench_chunk.py                        Wan 2.1 1.3B at 480x832, bfloat16 (CUDA)
    python benchmarks/bench_chunk.py --compile              with compile_repeated_blocks
    python benchmarks/bench_chunk.py --profile              also the kernels of one chunk, the longest first
    python benchmarks/bench_chunk.py --model 14b --layers 8
    python benchmarks/bench_chunk.py --model tiny           a few seconds on a CPU: does the script work?

Milliseconds are medians over the chunks after the window has filled; the start is measured from the call of `stream`
on a pipeline that is already on the device.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, FlowMatchLCMScheduler, WanTransformer3DModel
from transformers import UMT5Config, UMT5EncoderModel

import bc_diffusers
from bc_diffusers import BlockCausalVideoPipeline


# FlashDreams 0.1.0, Wan 2.1 1.3B, the same chunk (4 + 1 forwards, window 21, no decode), on an H200: 405.8 ms.
FLASHDREAMS_MS = 405.8

MODELS = {
    "1.3b": {"num_attention_heads": 12, "attention_head_dim": 128, "num_layers": 30, "ffn_dim": 8960},
    "14b": {"num_attention_heads": 40, "attention_head_dim": 128, "num_layers": 40, "ffn_dim": 13824},
    "tiny": {"num_attention_heads": 2, "attention_head_dim": 24, "num_layers": 2, "ffn_dim": 64},
}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="1.3b")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=832)
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--preset", default="self-forcing")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--decode", action="store_true", help="decode each chunk with a Wan 2.1 VAE")
    parser.add_argument("--profile", action="store_true", help="list the kernels of the last full chunk (CUDA)")
    parser.add_argument("--json", type=Path, help="where the numbers go, besides the screen")
    return parser.parse_args()


def random_pipeline(args, device) -> BlockCausalVideoPipeline:
    """The model's geometry with random weights. The text encoder is a stand-in: prompts come as embeddings."""
    config = {**MODELS[args.model], **({"num_layers": args.layers} if args.layers else {})}
    small = args.model == "tiny"
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, args.dtype))
    with torch.device(device):
        transformer = WanTransformer3DModel(**config, cross_attn_norm=True, text_dim=64 if small else 4096).eval()
        vae = AutoencoderKLWan(**({"base_dim": 4, "dim_mult": [1, 1, 1, 1]} if small else {})).eval()
        text_encoder = UMT5EncoderModel(UMT5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)).eval()
    torch.set_default_dtype(torch.float32)
    if device == "cuda":
        transformer.rope.to(torch.float32)
    return BlockCausalVideoPipeline(tokenizer=None, text_encoder=text_encoder, vae=vae, transformer=transformer,
                                    scheduler=FlowMatchLCMScheduler(), preset=args.preset)


def kernels_of(run, rows=24) -> list[str]:
    """The CUDA kernels of one call, as lines: milliseconds, how many, each, name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    table = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            count, ms = table.get(event.name, (0, 0.0))
            table[event.name] = count + 1, ms + event.time_range.elapsed_us() / 1000
    ordered = sorted(table.items(), key=lambda item: -item[1][1])
    lines = [f"{sum(ms for _, ms in table.values()):9.2f} ms in {sum(n for n, _ in table.values())} kernels"]
    return lines + [f"{ms:9.2f} ms {n:5d} x {1000 * ms / n:8.1f} us  {name[:120]}" for name, (n, ms) in ordered[:rows]]


def main():
    args = arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        if args.model != "tiny":
            raise SystemExit("this benchmark needs a CUDA device; --model tiny runs anywhere")
        args.height, args.width, args.dtype = 32, 48, "float32"
    pipe = random_pipeline(args, device)
    pipe.set_progress_bar_config(disable=True)
    if args.compile:
        pipe.transformer.compile_repeated_blocks(fullgraph=True)
    text = torch.randn(1, 512, pipe.transformer.config.text_dim, dtype=pipe.transformer.dtype, device=device)
    full = -(-pipe.rollout.window_frames // pipe.rollout.chunk_frames)  # chunks until the window is full
    rows, memory = [], []
    start = time.perf_counter()
    given = {"prompt_embeds": text, "num_chunks": args.chunks + 1 + args.profile, "seed": 0, "height": args.height,
             "width": args.width, "output_type": "pt" if args.decode else "latent", "attention_backend": args.backend}
    stream = pipe.stream(**given)
    for chunk in stream:
        if device == "cuda":
            torch.cuda.synchronize()
            memory.append(torch.cuda.memory_reserved() / 2**30)
        if chunk.index == 0:
            first = time.perf_counter() - start
        if not torch.isfinite(chunk.latents).all():
            raise SystemExit(f"chunk {chunk.index} is not finite")
        rows.append({name: 1000 * seconds for name, seconds in chunk.timings.items()})
        if args.profile and chunk.index == args.chunks - 1:
            break
    profiled = kernels_of(lambda: next(stream)) if args.profile else []
    stream.close()
    steady = rows[full:-1]  # the last chunk has no clean pass
    times = {name: statistics.median(row[name] for row in steady) for name in steady[0]}
    generate = statistics.median(row["denoise"] + row["clean"] for row in steady)
    frames = pipe.rollout.chunk_frames * pipe.vae_scale_factor_temporal
    result = {
        "model": args.model, "layers": pipe.transformer.config.num_layers, "size": [args.height, args.width],
        "dtype": args.dtype, "backend": args.backend, "compile": args.compile, "decode": args.decode,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "torch": torch.__version__,
        "bc_diffusers": bc_diffusers.__version__, "chunks": args.chunks,
        "ms": times, "denoise_and_clean_ms": generate, "frames_per_second": 1000 * frames / times["total"],
        "start_to_first_chunk_s": first, "slowest_ms": max(row["total"] for row in steady),
        "reserved_GiB": [memory[full], memory[-1]] if memory else None,
    }
    if (args.model, args.layers, args.height, args.width) == ("1.3b", None, 480, 832):
        result["ratio_to_flashdreams"] = generate / FLASHDREAMS_MS
    print("\n".join([json.dumps(result, indent=1), *profiled]))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
