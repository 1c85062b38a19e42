"""Score a model: does each clip show what its prompt says? Plain image arithmetic, see measure.py.

    python examples/train_tiny/score.py                        # the embedded model, the whole protocol
    python examples/train_tiny/score.py FOLDER --clips 24 --parts prompts
    python examples/train_tiny/score.py --prove                # the scorer itself, on rendered and on VAE-coded clips

Three parts: `prompts` (81 frames each), `long` (480 frames, judged on the last quarter) and `switch` (the prompt
changes at chunk 4; 81 frames). Attributes and seeds are fixed, and no training clip is drawn from these seeds.
"""

import argparse
import json
import random
import time
from pathlib import Path

import torch
from captions import caption, held_out_prompts, token_ids
from measure import BACKGROUNDS, COLORS, CRITERIA, NAMES, has_object, judge, measure, nearest, turned
from shape_world import RES, STILL, first_frame_of_chunk, render_attributes


NAMED = ("color", "background", "direction", "shape")  # what a prompt must name
SWITCH_CHUNK = 4
PARTS = ("prompts", "long", "switch")


def together(results, names):
    return torch.stack([results[name] for name in names]).all(0)


def share(flags):
    return round(flags.float().mean().item(), 4)


def judge_all(videos, attributes, batch=20):
    """`judge` and `has_object` in batches that fit in memory."""
    parts = []
    for video, rows in zip(videos.split(batch), attributes.split(batch)):
        info = measure(video)
        parts.append({**judge(info, rows.to(video.device)), "object": has_object(info)})
    return {name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]}


def summary(results):
    table = {name: share(results[name]) for name in CRITERIA}
    table["named"] = share(together(results, NAMED))
    table["all"] = share(together(results, CRITERIA))
    table["without_object"] = int((~results["object"]).sum())
    table["clips"] = len(results["object"])
    return table


def score_prompts(make, clips=200):
    """`make(prompts, seeds, chunks)` -> videos [n, T, 3, H, W] in [0, 1], where `prompts` is a dict {chunk: [n
    captions]}."""
    attributes = held_out_prompts(clips)
    videos = make({0: [caption(a) for a in attributes.tolist()]}, [1000 + i for i in range(clips)], 7)
    results = judge_all(videos, attributes)
    misses = [
        (i, caption(attributes[i].tolist()), [name for name in CRITERIA if not results[name][i]])
        for i in (~together(results, CRITERIA)).nonzero()[:, 0].tolist()
    ]
    return summary(results), misses, videos


def score_long(make, clips=40, frames=480):
    """All criteria but the direction, over the last quarter of long rollouts; earlier quarters for comparison."""
    attributes = held_out_prompts(clips)
    chunks = -(-(frames + 3) // 12)
    videos = make({0: [caption(a) for a in attributes.tolist()]}, [2000 + i for i in range(clips)], chunks)[:, :frames]
    table = {}
    for quarter in range(4):
        part = videos[:, quarter * frames // 4 : (quarter + 1) * frames // 4]
        results = judge_all(part, attributes)
        table[f"quarter_{quarter + 1}"] = share(together(results, [c for c in CRITERIA if c != "direction"]))
        table[f"object_{quarter + 1}"] = share(results["object"])
    table["clips"] = clips
    return table


def switch_attributes(attribute, clips, seed=3):
    """-> attributes [n, 6] before and after: moving objects, of which only `attribute` changes."""
    rng, column = random.Random(seed), list(NAMES).index(attribute)
    before = held_out_prompts(clips).clone()
    choices = STILL if attribute == "direction" else len(NAMES[attribute])
    for row in before:
        row[4] = rng.randrange(STILL)
    after = before.clone()
    for row in after:
        row[column] = rng.choice([value for value in range(choices) if value != row[column]])
    return before, after


def read_switch(videos, attribute, after, batch=20):
    """-> seen [3, n]: in each chunk from the prompt change on, is the new attribute there (over its last 6 frames)?
    And fair [n]: the clips that can be judged, all but some for the direction (see `turned`)."""
    seen, fair = [], []
    for video, rows in zip(videos.split(batch), after.split(batch)):
        info, rows = measure(video), rows.to(video.device)
        chunks, can_tell = [], torch.ones(len(rows), dtype=torch.bool, device=video.device)
        for chunk in range(SWITCH_CHUNK, SWITCH_CHUNK + 3):
            first = first_frame_of_chunk(chunk)
            last_half = slice(first + 6, first + 12)
            if attribute == "color":
                ok = nearest(info["color"][:, last_half].median(1).values, COLORS, 0.25) == rows[:, 0]
            elif attribute == "background":
                ok = nearest(info["background"][:, last_half].median(1).values, BACKGROUNDS, 0.15) == rows[:, 5]
            elif attribute == "shape":
                ok = info["shape"][:, last_half].mode(1).values == rows[:, 1]
            else:
                ok, can_tell = turned(info, first_frame_of_chunk(SWITCH_CHUNK), rows)
            chunks.append(ok)
        seen.append(torch.stack(chunks))
        fair.append(can_tell)
    return torch.cat(seen, 1).cpu(), torch.cat(fair).cpu()


def switch_row(videos, attribute, after):
    seen, fair = read_switch(videos, attribute, after)
    return {"first_chunk": share(seen[0][fair]), "third_chunk": share(seen[2][fair]), "judged": int(fair.sum())}


def score_switch(make, clips=40):
    """One attribute changes in the prompt at chunk 4: is it right in the first and by the third chunk from there?"""
    table = {"clips": clips}
    for number, attribute in enumerate(NAMED):
        before, after = switch_attributes(attribute, clips)
        prompts = {0: [caption(a) for a in before.tolist()], SWITCH_CHUNK: [caption(a) for a in after.tolist()]}
        videos = make(prompts, [3000 + 100 * number + i for i in range(clips)], SWITCH_CHUNK + 3)
        table[attribute] = switch_row(videos, attribute, after)
    return table


def score(make, clips=200, long_clips=40, switch_clips=40, parts=PARTS):
    """Run the protocol -> (table, misses, videos of the first part or None)."""
    table, misses, videos = {}, [], None
    if "prompts" in parts:
        table["prompts"], misses, videos = score_prompts(make, clips)
    if "long" in parts:
        table["long"] = score_long(make, long_clips)
    if "switch" in parts:
        table["switch"] = score_switch(make, switch_clips)
    return table, misses, videos


def batch_maker(vae, transformer, text, autocast=None, sigmas=None):
    """`make` by the compact rollout of rollout.py, all clips at once (the first seed seeds them all)."""
    from contextlib import nullcontext

    from rollout import Roller, generate, text_inputs
    from tiny_nets import SIGMAS, decode_normalised

    autocast = autocast or nullcontext
    device = next(transformer.parameters()).device
    roller = Roller(transformer, autocast)

    @torch.no_grad()
    def make(prompts, seeds, chunks):
        texts = {at: text_inputs(text, token_ids(p, device), autocast=autocast) for at, p in prompts.items()}
        generator = torch.Generator(device).manual_seed(seeds[0])
        current = lambda chunk: texts[max(at for at in texts if at <= chunk)]  # noqa: E731
        latents = generate(roller, current, chunks, RES // 8, sigmas=sigmas or SIGMAS, generator=generator)
        with autocast():
            return decode_normalised(vae, latents, 16)

    return make


def pipeline_maker(pipe):
    """`make` by the package's pipeline: one stream a clip, `set_prompt` at a prompt change."""

    def one(prompts, seed, chunks):
        frames = []
        with pipe.stream(prompts[0], num_chunks=chunks, seed=seed, output_type="pt") as stream:
            while len(frames) < chunks:
                if frames and len(frames) in prompts:
                    stream.set_prompt(prompts[len(frames)])
                frames.append(next(stream).frames.float().cpu())
        return torch.cat(frames)

    def make(prompts, seeds, chunks):
        return torch.stack([one({at: p[i] for at, p in prompts.items()}, s, chunks) for i, s in enumerate(seeds)])

    return make


def prove(vae, clips=200, decoded=60):
    """Score rendered clips, and the same after a VAE round trip: the scorer's own error, and the VAE's."""
    from tiny_nets import decode, encode

    attributes = held_out_prompts(clips)
    generator = torch.Generator().manual_seed(5)
    videos = torch.cat([render_attributes(rows, 81, generator) for rows in attributes.split(20)])
    table = {"rendered": summary(judge_all((videos / 2 + 0.5).transpose(1, 2), attributes))}
    with torch.no_grad():
        coded = [decode(vae, encode(vae, part).chunk(2, 1)[0]).clamp(-1, 1) for part in videos[:decoded].split(10)]
    coded = (torch.cat(coded) / 2 + 0.5).transpose(1, 2)
    table["after_vae"] = summary(judge_all(coded, attributes[:decoded]))
    table["rendered_switch"] = {}
    for attribute in NAMED:
        before, after = switch_attributes(attribute, 40)
        both = torch.stack([before, after], 1)
        video = render_attributes(both, 81, generator, first_frame_of_chunk(SWITCH_CHUNK))
        table["rendered_switch"][attribute] = switch_row((video / 2 + 0.5).transpose(1, 2), attribute, after)
    return table


def draw(args, videos, misses):
    """The pictures that the command line asks for."""
    from figures import contact_sheet

    if args.sheet:
        captions = [caption(a) for a in held_out_prompts(12).tolist()]
        contact_sheet(videos[:12], captions, args.sheet)
    if args.misses and misses:
        texts = [f"{prompt}: {', '.join(criteria)}" for _, prompt, criteria in misses[:8]]
        contact_sheet([videos[i] for i, *_ in misses[:8]], texts, args.misses, step=4)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="pipeline folder (default: the model in the package)")
    parser.add_argument("--clips", type=int, default=200)
    parser.add_argument("--long-clips", type=int, default=40)
    parser.add_argument("--switch-clips", type=int, default=40)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--batch", action="store_true", help="the compact batched rollout instead of the pipeline")
    parser.add_argument("--sigmas", type=float, nargs="+", help="noise levels before the shift (with --batch)")
    parser.add_argument("--prove", action="store_true", help="score rendered and VAE-coded clips instead of a model")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--json", type=Path, help="write the table here")
    parser.add_argument("--sheet", type=Path, help="write strips of the first 12 clips of `prompts` here, as a PNG")
    parser.add_argument("--misses", type=Path, help="write strips of the first 8 clips that miss here, as a PNG")
    args = parser.parse_args(arguments)
    if args.threads:
        torch.set_num_threads(args.threads)
    from tiny_nets import load

    folder, begin = args.folder, time.time()
    if folder is None:
        from bc_diffusers import embedded_model

        folder = embedded_model()
    misses, videos = [], None
    if args.prove:
        table = prove(load(folder)[0], args.clips, min(args.clips, 60))
    else:
        if args.batch:
            make = batch_maker(*load(folder), sigmas=args.sigmas)
        else:
            from bc_diffusers import BlockCausalVideoPipeline

            pipe = BlockCausalVideoPipeline.from_pretrained(folder, dtype=torch.float32)
            pipe.set_progress_bar_config(disable=True)
            make = pipeline_maker(pipe)
        table, misses, videos = score(make, args.clips, args.long_clips, args.switch_clips, args.parts)
    print(json.dumps(table, indent=1))
    for _, prompt, criteria in misses:
        print("miss:", prompt, "->", ", ".join(criteria))
    if videos is not None:
        draw(args, videos, misses)
    print(f"{time.time() - begin:.0f} s")
    if args.json:
        args.json.write_text(json.dumps(table, indent=1))
    return table


if __name__ == "__main__":
    main()
