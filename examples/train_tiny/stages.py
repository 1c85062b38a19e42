"""The transformer's two stages: teacher forcing on rendered clips, then its own rollouts answered by the teacher."""

import copy
import time

import torch
from pools import CHANNELS, LATENT, ClipPool, concatenate, draw_padding, own_pool, rollers
from shape_world import CHUNK
from tiny_nets import SIGMAS, shifted
from tqdm import tqdm


def per_frame(per_slot):
    """[B, slots] -> [B, 1, CHUNK * slots, 1, 1]."""
    return per_slot.repeat_interleave(CHUNK, 1)[:, None, :, None, None]


def object_weight(clean, sigma, strength=3.0):
    """Weight [B, 1, T, h, w] of the loss: the object fills a few cells of the picture, yet it is all that matters.

    A cell counts more the further `clean` [B, C, T, h, w] is from its frame's median, the background. At high noise
    the weight is halved: there it also tilts the expected picture towards having an object.
    """
    background = clean.flatten(3).median(-1).values[..., None, None]
    distance = (clean - background).square().mean(1, keepdim=True).sqrt()
    return 1 + strength * (1 - 0.5 * per_frame(sigma)) * distance.clamp(max=1.0)


def draw_sigma(n, slots, device):
    """Noise levels [n, slots]: the sampler's own (35 %), shift 5 (40 %), uniform (25 %)."""
    u, kind = torch.rand(n, slots, device=device), torch.rand(n, slots, device=device)
    levels = torch.tensor(shifted(SIGMAS), device=device)
    own = levels[torch.randint(len(levels), (n, slots), device=device)]
    return torch.where(kind < 0.35, own, torch.where(kind < 0.75, 5 * u / (1 + 4 * u), u))


def chunk_weights(pool, rows, layout):
    """[B, slots]: the chunk of a prompt change counts three times; what a clip shows before it recovers is not
    learnt."""
    chunk = torch.tensor([*range(layout.chunks), *[0] * layout.extra], device=rows.device)[None]
    at = pool.switch_chunk[rows][:, None]
    weight = 1.0 + 2.0 * (chunk == at).float()
    if isinstance(pool, ClipPool):
        weight = torch.where(pool.recovers[rows][:, None] & (chunk < at), 0.0, weight)
    return weight


def fill_with_clips(step, pool, rows, batch_rows, first_chunk=True):
    """Teacher forcing: put clips `rows` of `pool` into rows `batch_rows` (a slice) of the step's buffers."""
    lay, device, n = step.layout, step.device, len(rows)
    clean = pool.latents[rows].float()
    sigma = draw_sigma(n, lay.slots, device)
    weight = chunk_weights(pool, rows, lay)
    if not first_chunk:
        weight[:, 0] = 0.0
        weight[:, lay.chunks :] = 0.0
    target = torch.cat([clean, clean[:, :, :CHUNK].repeat(1, 1, lay.extra, 1, 1)], 2)
    noise = torch.randn_like(target)
    # The history of a rollout is never quite clean, so it is roughened in most clips.
    rough = 0.15 * torch.rand(n, 1, 1, 1, 1, device=device) * (torch.rand(n, 1, 1, 1, 1, device=device) < 0.7)
    step.history[batch_rows] = clean + rough * torch.randn_like(clean)
    step.noisy[batch_rows] = torch.lerp(target, noise, per_frame(sigma))
    step.target[batch_rows] = noise - target
    step.weight[batch_rows] = object_weight(target, sigma) * per_frame(weight)
    step.sigma[batch_rows] = sigma
    step.ids[batch_rows], step.switch_chunk[batch_rows] = pool.ids[rows], pool.switch_chunk[rows]
    step.padded_to[batch_rows] = draw_padding(n, device)


def fill_with_own(step, pool, rows, batch_rows):
    """Self-forcing: rows of an `OwnPool`; the velocity that leads straight to the teacher's answer is the target."""
    answer, noisy, sigma = pool.answer[rows].float(), pool.noisy[rows].float(), pool.sigma[rows]
    step.history[batch_rows] = pool.history[rows].float()
    step.noisy[batch_rows] = noisy
    step.target[batch_rows] = (noisy - answer) / per_frame(sigma)
    # Half way between errors in the velocity, which would favour the last passes, and errors in the picture.
    step.weight[batch_rows] = object_weight(answer, sigma) * per_frame(
        pool.use[rows] * sigma * chunk_weights(pool, rows, step.layout)
    )
    step.sigma[batch_rows] = sigma
    step.ids[batch_rows], step.switch_chunk[batch_rows] = pool.ids[rows], pool.switch_chunk[rows]
    step.padded_to[batch_rows] = pool.padded_to[rows]


class Schedule:
    """A stage's length in seconds or steps: says when it ends, and the learning rate (warm-up, flat, down to 2 %)."""

    def __init__(self, seconds=None, steps=None, peak=1e-3, warmup=200, flat=0.4):
        self.begin, self.seconds, self.steps = time.monotonic(), seconds, steps
        self.peak, self.warmup, self.flat = peak, warmup, flat
        self.step = 0

    def progress(self):
        by_steps = self.step / self.steps if self.steps else 0.0
        by_time = (time.monotonic() - self.begin) / self.seconds if self.seconds else 0.0
        return max(by_steps, by_time)

    def lr(self):
        decay = min(1.0, (1 - self.progress()) / (1 - self.flat))
        return self.peak * min(1.0, (self.step + 1) / self.warmup) * max(0.02, decay)

    def __iter__(self):
        layout = "{desc} {percentage:3.0f}%|{bar:30}| {elapsed}{postfix}"
        with tqdm(total=100, bar_format=layout, mininterval=5) as bar:
            self.bar = bar
            while self.progress() < 1:
                yield self.lr()
                self.step += 1
                bar.n = min(100, int(100 * self.progress()))
                bar.update(0)


def note(schedule, step, log, name, every):
    """Append the losses to `log` now and then; a loss that is not a number ends the training."""
    if schedule.step % every:
        return
    all_, first, later = step.losses.tolist()
    if not all_ < 100:
        raise FloatingPointError(f"{name}: loss {all_} at step {schedule.step}")
    rate = (time.monotonic() - schedule.begin) / max(1, schedule.step)
    losses = {"loss": all_, "chunk0": first, "later": later}
    log.append({"stage": name, "step": schedule.step, **losses, "seconds_a_step": rate})
    schedule.bar.set_description(name)
    schedule.bar.set_postfix(step=schedule.step, chunk0=f"{first:.3f}", later=f"{later:.3f}", ms=f"{1e3 * rate:.1f}")


def teacher_forcing(step, pool, schedule, log, every=100):
    """Train on rendered clips; every noisy chunk sees the clean ones before it."""
    n, batch = len(pool.latents), step.layout.batch
    for lr in schedule:
        rows = torch.randint(n, (batch,), device=step.device)
        fill_with_clips(step, pool, rows, slice(0, batch))
        step.run(lr, min(0.999, (schedule.step + 1) / (schedule.step + 10)))
        note(schedule, step, log, "teacher forcing", every)
    return schedule.step


def self_forcing(step, pool, vae, schedule, log, seed=0, size=1024, rounds=200, every=100, keep=3, teacher=None):
    """Distil the many-step teacher (by default the average as it is now) into the few passes of the sampler.

    Every `rounds` steps the student rolls out afresh, so that histories and inputs are its own; the
    last `keep` rollouts stay in use. A quarter of each batch stays rendered clips (without their chunk 0, whose
    average answer would undo the distillation).
    """
    teacher = teacher or tuple(copy.deepcopy(net) for net in step.average)
    pupil, guide = rollers(step.average[0], teacher[0], step.autocast)
    batch, device = step.layout.batch, step.device
    clips = max(1, batch // 4)
    pools, own = [], None
    for lr in schedule:
        if schedule.step % rounds == 0 and (own is None or schedule.progress() < 0.9):
            text = (step.average[1], teacher[1])
            seed += 1
            fresh = own_pool(pupil, guide, text, vae, size, step.layout.chunks, step.layout.extra, seed, step.autocast)
            pools = [*pools, fresh][-keep:]
            own = concatenate(pools)
            used = fresh.use[:, [0, *range(step.layout.chunks, step.layout.slots)]].mean().item()
            log.append({"stage": "own rollouts", "step": schedule.step, "answers_used": used})
        rows = torch.randint(len(pool.latents), (clips,), device=device)
        fill_with_clips(step, pool, rows, slice(0, clips), first_chunk=False)
        rows = torch.randint(len(own.history), (batch - clips,), device=device)
        fill_with_own(step, own, rows, slice(clips, batch))
        step.run(lr, min(0.995, (schedule.step + 1) / (schedule.step + 10)))
        note(schedule, step, log, "self forcing", every)
    return schedule.step


def expected_sizes(layout):
    """Shape of one clip's latents for `layout`, for error messages and tests."""
    return CHANNELS, CHUNK * layout.chunks, LATENT, LATENT
