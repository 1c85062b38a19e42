"""Train the tiny block-causal text-to-video model.

    python examples/train_tiny/train.py --out runs/tiny                       # from nothing: VAE, then the transformer
    python examples/train_tiny/train.py --out runs/tiny --init FOLDER         # go on from a pipeline folder, VAE
    frozen python examples/train_tiny/train.py --out runs/tiny --resume runs/tiny    # go on from a checkpoint of
    this script python examples/train_tiny/train.py --out /tmp/tiny --smoke               # everything once in tiny,
    on a CPU

The lengths of the stages are seconds, so that a run fits the time there is on a machine; a stage of 0 seconds is left
out. Leaves in `--out`: `model/` (a stock pipeline folder, fp16), checkpoint files of at most 16 MiB, `log.json`,
`losses.png`, `samples.png`.
"""

import argparse
import json
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import checkpoint
import tiny_nets
import torch
from captions import caption, held_out_prompts
from figures import contact_sheet, loss_curves
from pools import clip_pool
from score import PARTS, batch_maker, score
from stages import Schedule, fill_with_clips, self_forcing, teacher_forcing
from train_step import Layout, TrainStep
from vae_stage import train_vae


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for results")
    parser.add_argument("--init", type=Path, help="pipeline folder to start from")
    parser.add_argument("--resume", type=Path, help="folder with this script's checkpoint")
    parser.add_argument("--vae", type=float, help="seconds of VAE training (default: 200; 0 with --init, --resume)")
    parser.add_argument("--teacher", type=float, default=400.0, help="seconds of teacher forcing")
    parser.add_argument("--own", type=float, default=200.0, help="seconds of distillation on own rollouts")
    parser.add_argument("--clips", type=int, default=16384, help="rendered clips in the pool")
    parser.add_argument("--batch", type=int, default=48, help="clips a step")
    parser.add_argument("--extra", type=int, default=3, help="more noisy copies of chunk 0 a clip")
    parser.add_argument("--lr", type=float, default=8e-4, help="peak learning rate of teacher forcing")
    parser.add_argument("--own-lr", type=float, default=4e-4, help="peak learning rate on own rollouts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true", help="no torch.compile and no flex attention on a GPU")
    parser.add_argument("--guide", type=Path, help="teacher.pt of an earlier run (default: the net as it then is)")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS, help="what the final score covers")
    parser.add_argument("--smoke", action="store_true", help="two steps of everything, tiny, on the CPU")
    args = parser.parse_args(arguments)
    if args.vae is None:
        args.vae = 0.0 if args.init or args.resume else 200.0
    return args


class Run:
    """Networks, settings and log of one training run."""

    def __init__(self, args):
        self.args, self.begin, self.log = args, time.monotonic(), []
        self.device = torch.device("cuda" if torch.cuda.is_available() and not args.smoke else "cpu")
        self.cuda = self.device.type == "cuda"
        # Without the cache of casts: a captured graph must not read one that was made outside of it.
        bf16 = partial(torch.autocast, "cuda", dtype=torch.bfloat16, cache_enabled=False)
        self.autocast = bf16 if self.cuda else nullcontext
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        smaller = {"num_layers": 1, "ffn_dim": 64} if args.smoke else None
        build = partial(tiny_nets.load, args.init) if args.init else partial(tiny_nets.build, transformer=smaller)
        self.nets = build(device=self.device)
        self.layout = Layout(2, 3, 1) if args.smoke else Layout(batch=args.batch, extra=args.extra)
        args.out.mkdir(parents=True, exist_ok=True)

    def say(self, *words):
        print(f"[{time.monotonic() - self.begin:6.1f}]", *words, flush=True)

    def schedule(self, seconds, peak, **kwargs):
        limit = {"steps": 2} if self.args.smoke else {"seconds": seconds}
        return Schedule(**limit, peak=peak, **kwargs)

    def score(self, name, nets, parts, sigmas=None):
        """Score `nets` by batched rollouts, note it, and return the videos."""
        if not parts:
            return None
        clips = (2, 1, 1) if self.args.smoke else (200, 40, 40)
        make = batch_maker(*nets, autocast=self.autocast, sigmas=sigmas)
        table, misses, videos = score(make, *clips, parts=parts)
        self.log.append(dict(stage="score", name=name, **table))
        self.say(name, json.dumps(table))
        for _, prompt, criteria in misses[:12]:
            self.say("  miss:", prompt, "->", ", ".join(criteria))
        return videos

    def write_log(self):
        (self.args.out / "log.json").write_text(json.dumps(self.log, indent=0))
        loss_curves(self.log, self.args.out / "losses.png")


def train(args):
    """The whole recipe; returns the `Run`."""
    run = Run(args)
    vae, transformer, text = run.nets
    if args.resume:
        checkpoint.load_vae(args.resume, vae)
    if args.vae:
        small = {"clips": 4, "frames": 9, "batch": 2, "every": 1} if args.smoke else {}
        steps = train_vae(vae, run.schedule(args.vae, 2e-3), run.log, run.autocast, seed=args.seed, **small)
        run.say(f"VAE: {steps} steps, {run.log[-1]['psnr']:.2f} dB")
    vae.eval().requires_grad_(False)
    step = TrainStep(transformer, text, run.layout, run.autocast, compile_blocks=run.cuda and not args.no_compile)
    if args.resume:
        checkpoint.load(args.resume, step)
    pool = clip_pool(vae, 4 if args.smoke else args.clips, run.layout.chunks, args.seed + 100, run.autocast)
    run.say("clips", tuple(pool.latents.shape))
    every, small = (1, {"size": 2, "rounds": 1}) if args.smoke else (100, {})
    fill_with_clips(step, pool, torch.arange(run.layout.batch, device=run.device) % len(pool.latents), slice(None))
    step.capture()
    run.say("step ready, a CUDA graph" if step.graph else "step ready")
    if args.teacher:
        steps = teacher_forcing(step, pool, run.schedule(args.teacher, args.lr), run.log, every)
        run.say(f"teacher forcing: {steps} steps", run.log[-1])
        checkpoint.save(args.out, step, vae)
        checkpoint.save_nets(args.out / "teacher.pt", step.average)
        run.score("after teacher forcing", (vae, *step.average), ("prompts",) if args.parts else ())
    if args.own:
        plan = run.schedule(args.own, args.own_lr, flat=0.2, warmup=50)
        guide = checkpoint.load_nets(args.guide, step.average) if args.guide else None
        steps = self_forcing(step, pool, vae, plan, run.log, 1000 + args.seed, every=every, teacher=guide, **small)
        used = [entry["answers_used"] for entry in run.log if "answers_used" in entry]
        run.say(f"self forcing: {steps} steps; answers used {used[0]:.2f} -> {used[-1]:.2f}", run.log[-1])
    checkpoint.save(args.out, step, vae)
    size = tiny_nets.save(args.out / "model", vae, *step.average)
    run.say(f"model folder: {size} bytes")
    run.write_log()
    videos = run.score("final", (vae, *step.average), args.parts)
    if videos is not None:
        captions = [caption(a) for a in held_out_prompts(len(videos)).tolist()]
        contact_sheet(videos[:12], captions[:12], args.out / "samples.png")
    run.write_log()
    return run


if __name__ == "__main__":
    train(parse())
