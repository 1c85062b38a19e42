"""What training draws from: latents of rendered clips, and the model's own rollouts with the teacher's answers."""

import random
from dataclasses import dataclass, fields

import torch
from captions import VOCABULARY, caption, clip_ids, token_ids
from measure import COLORS, MAX_STEP, heading, measure, nearest, wanted_area
from rollout import Roller, text_inputs
from shape_world import BACKGROUNDS, CHUNK, RES, changed_attributes, make_clips, random_attributes
from tiny_nets import SIGMAS, decode_normalised, encode, latent_statistics, shifted


LATENT = RES // 8
CHANNELS = 8
PADDED_TO = (32, 32, 32, 64, 128, 226, 512)  # lengths that pipelines pad prompts to; training draws one a clip
_SIZE_WORDS = [VOCABULARY[w] for w in ("small", "large", "big", "little", "tiny")]


def draw_padding(n, device):
    return torch.tensor(PADDED_TO, device=device)[torch.randint(len(PADDED_TO), (n,), device=device)]


@dataclass
class ClipPool:
    """Clips of rendered video: latents [N, C, T, h, w] normalised (bf16), ids [N, 2, L], switch_chunk and recovers
    [N]."""

    latents: torch.Tensor
    ids: torch.Tensor
    switch_chunk: torch.Tensor
    recovers: torch.Tensor


@dataclass
class OwnPool:
    """The student's own rollouts. `history` [N, C, T, h, w] is what it made; slot s of `noisy` [N, C, T + CHUNK *
    extra, h, w] is an input of one of its passes at noise level `sigma` [N, slots], `answer` what the teacher makes
    of it by many steps, `use` [N, slots] whether that answer fits the caption (checked in chunk 0, one elsewhere)."""

    history: torch.Tensor
    noisy: torch.Tensor
    answer: torch.Tensor
    sigma: torch.Tensor
    use: torch.Tensor
    ids: torch.Tensor
    switch_chunk: torch.Tensor
    padded_to: torch.Tensor


def concatenate(pools):
    """Pools of one kind -> one pool."""
    parts = {f.name: torch.cat([getattr(p, f.name) for p in pools]) for f in fields(pools[0])}
    return type(pools[0])(**parts)


@torch.no_grad()
def clip_pool(vae, n, chunks, seed, autocast, batch=512):
    """Render `n` clips and encode them with the (frozen) VAE."""
    device = next(vae.parameters()).device
    generator, rng = torch.Generator(device).manual_seed(seed), random.Random(seed)
    mean, std = latent_statistics(vae, torch.zeros((), device=device))
    pools = []
    for start in range(0, n, batch):
        clips = make_clips(min(batch, n - start), chunks, generator)
        with autocast():
            means = [encode(vae, part).float().chunk(2, 1)[0] for part in clips.video.split(128)]
        latents = ((torch.cat(means) - mean) / std).bfloat16()
        pools.append(ClipPool(latents, clip_ids(clips, rng), clips.switch_chunk, clips.recovers))
    return concatenate(pools)


def captioned_attributes(n, chunks, generator, rng):
    """Prompts without pictures -> attributes [n, 2, 6], ids [n, 2, L], switch chunk [n] (three in ten never
    switch)."""
    first = random_attributes(n, generator)
    second = changed_attributes(first, generator)
    device = first.device
    at = torch.randint(1, max(2, chunks), (n,), generator=generator, device=device)
    at = torch.where(torch.rand(n, generator=generator, device=device) < 0.7, at, chunks)
    sentences = [[caption(a, rng) for a in part.tolist()] for part in (first, second)]
    ids = torch.stack([token_ids(s, device) for s in sentences], 1)
    return torch.stack([first, second], 1), ids, at


def first_chunk_fits(video, attributes, ids):
    """Does a decoded chunk 0 [n, 9, 3, H, W] show what its caption says, from the first frame on? -> bool [n]."""
    info = measure(video)
    ratio = info["area"] / wanted_area(attributes)[:, None]
    named = torch.isin(ids, torch.tensor(_SIZE_WORDS, device=ids.device)).any(1)
    low, high = torch.where(named, 0.75, 0.3), torch.where(named, 1.4, 3.0)
    step = torch.stack([info["x"].diff(dim=1), info["y"].diff(dim=1)]).norm(dim=0)
    moved = heading(info["x"][:, -1] - info["x"][:, 0], info["y"][:, -1] - info["y"][:, 0])
    checks = (
        (nearest(info["color"], COLORS, 0.25) == attributes[:, :1]).all(1),
        (nearest(info["background"], BACKGROUNDS, 0.15) == attributes[:, 5:]).all(1),
        (info["shape"] == attributes[:, 1:2]).all(1),
        ((ratio > low[:, None]) & (ratio < high[:, None])).all(1),
        (step.amax(1) < MAX_STEP) & (moved == attributes[:, 4]),
    )
    return torch.stack(checks).all(0)


class Recorder:
    """Keeps, for each row, the input of one randomly chosen pass."""

    # Where the object goes is decided in the early passes, so they are asked about more often.
    ODDS = (0.28, 0.22, 0.18, 0.14, 0.10, 0.08)

    def __init__(self, n, device):
        odds = torch.tensor([self.ODDS[min(i, len(self.ODDS) - 1)] for i in range(len(SIGMAS))], device=device)
        self.choice = torch.multinomial(odds, n, replacement=True)
        self.sigma = torch.tensor(shifted(SIGMAS), device=device)[self.choice]
        self.noisy = None

    def __call__(self, i, x):
        chosen = (self.choice == i)[:, None, None, None, None]
        self.noisy = torch.where(chosen, x, 0 if self.noisy is None else self.noisy)


@torch.no_grad()
def own_pool(student, teacher, text, vae, n, chunks, extra, seed, autocast):
    """Roll out `n` prompts with the student, whose history is its own, and let the teacher finish one pass of each
    chunk.

    student, teacher: `Roller`s; text: pair of text encoders. The teacher sees the student's history, made into keys
    and values by itself. Chunk 0 is answered 1 + `extra` times, as all chance lies there; answers that miss the
    caption are marked unused.
    """
    device = next(vae.parameters()).device
    generator, rng = torch.Generator(device).manual_seed(seed), random.Random(seed)
    attributes, ids, at = captioned_attributes(n, chunks, generator, rng)
    padded_to = draw_padding(n, device)
    flat, twice = ids.flatten(0, 1), padded_to.repeat_interleave(2)
    encoded = [[x.unflatten(0, (n, 2)) for x in text_inputs(t, flat, twice, autocast)] for t in text]

    def texts(chunk):
        segment = (at <= chunk).long()
        rows = torch.arange(n, device=device)
        return [(embeddings[rows, segment], bias[rows, segment]) for embeddings, bias in encoded]

    def answered(student_text, teacher_text):
        record = Recorder(n, device)
        noise = torch.randn(n, CHANNELS, CHUNK, LATENT, LATENT, device=device)
        x = student.denoise(noise, student_text, visit=record)
        return x, record.noisy, teacher.follow(record.noisy, record.sigma, teacher_text), record.sigma

    student.start(), teacher.start()
    slots, spare, history = [], [], []
    for chunk in range(chunks):
        student_text, teacher_text = texts(chunk)
        x, *slot = answered(student_text, teacher_text)
        slots.append(slot)
        if chunk == 0:
            spare = [answered(student_text, teacher_text)[1:] for _ in range(extra)]
        student.commit(x, student_text), teacher.commit(x, teacher_text)
        history.append(x)
    student.start(), teacher.start()
    noisy, answer, sigma = zip(*slots, *spare)
    use = torch.ones(n, chunks + extra, device=device)
    for s in (0, *range(chunks, chunks + extra)):
        with autocast():
            video = decode_normalised(vae, answer[s], 256)
        use[:, s] = first_chunk_fits(video, attributes[:, 0], ids[:, 0]).float()
    pack = lambda parts: torch.cat(parts, 2).bfloat16()  # noqa: E731
    stacked = torch.stack(sigma, 1)
    return OwnPool(pack(history), pack(noisy), pack(answer), stacked, use, ids, at, padded_to)


def rollers(student, teacher, autocast):
    return Roller(student, autocast), Roller(teacher, autocast)
