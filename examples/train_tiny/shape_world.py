"""The procedural world: one flat shape moves over a flat background, bounces off the walls, and may change on the way.

All positions are in pixels of a `RES` x `RES` picture, x to the right and y down; colours are RGB in [-1, 1].
An object is six attributes, in the order of `COLUMNS`; each is an index into the list of names of that column.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


RES = 96
CHUNK = 3  # latent frames in a chunk; a latent frame is 4 frames, the first one a single frame
FRAMES_PER_CHUNK = 12
RAMP = 6  # frames that a change of colour, shape, size or background takes

COLORS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (45, 85, 225),
    "yellow": (245, 210, 40),
    "purple": (150, 55, 190),
    "orange": (245, 135, 30),
}
SHAPES = ("circle", "square", "triangle")
SIZES = {"small": 11.0, "large": 17.0}  # pixels, the radius of the circle
SPEEDS = {"slowly": 1.0, "quickly": 2.25}  # pixels a frame
DIRECTIONS = {"right": (1, 0), "left": (-1, 0), "down": (0, 1), "up": (0, -1), "still": (0, 0)}
BACKGROUNDS = {"white": (245, 245, 245), "black": (15, 15, 15), "gray": (128, 128, 128)}

COLUMNS = ("color", "shape", "size", "speed", "direction", "background")
_LISTS = (COLORS, SHAPES, SIZES, SPEEDS, DIRECTIONS, BACKGROUNDS)
NAMES = {column: list(names) for column, names in zip(COLUMNS, _LISTS)}
STILL = NAMES["direction"].index("still")
AREA = (3.14159265, 3.0976, 2.4028)  # of circle, square, triangle at radius 1
NO_SWITCH_FRAME = 10**6


def palette(names, device="cpu"):
    """`{name: (r, g, b)}` in bytes -> float tensor [n, 3] in [-1, 1]."""
    return torch.tensor(list(names.values()), dtype=torch.float32, device=device) / 127.5 - 1


def first_frame_of_chunk(chunk):
    """The first frame that chunk number `chunk` (an int or an integer tensor, >= 1) decodes to: chunk 0 has 9
    frames."""
    return FRAMES_PER_CHUNK * chunk - 3


@dataclass
class Looks:
    """What is drawn, before motion: radius [n, T], color and background [n, T, 3], shape weights [n, T, 3]."""

    radius: torch.Tensor
    color: torch.Tensor
    background: torch.Tensor
    shape: torch.Tensor


def random_attributes(n, generator):
    """-> int64 [n, 6]; one object in ten stays still."""
    device = generator.device
    draw = lambda high: torch.randint(high, (n,), generator=generator, device=device)  # noqa: E731
    moves = draw(4)
    still = torch.rand(n, generator=generator, device=device) < 0.1
    direction = torch.where(still, STILL, moves)
    return torch.stack([draw(6), draw(3), draw(2), draw(2), direction, draw(3)], 1)


def changed_attributes(before, generator, rates=(0.35, 0.45, 0.15, 0.15, 0.6, 0.3)):
    """A second object [n, 6]: each column is drawn again at its rate; where none was, the colour is."""
    after = random_attributes(len(before), generator)
    rate = torch.tensor(rates, device=generator.device)
    change = torch.rand(before.shape, generator=generator, device=generator.device) < rate
    change[:, 0] |= ~change.any(1)
    return torch.where(change, after, before)


def segment_looks(attributes):
    """attributes [n, 2, 6] (before and after the switch) -> a tuple radius [n, 2], color, background, shape [n, 2,
    3]."""
    device = attributes.device
    radius = torch.tensor(list(SIZES.values()), device=device)[attributes[..., 2]]
    color = palette(COLORS, device)[attributes[..., 0]]
    background = palette(BACKGROUNDS, device)[attributes[..., 5]]
    return radius, color, background, F.one_hot(attributes[..., 1], 3).float()


def spoil_first_segment(looks, rows, generator):
    """Make the first segment of the clips `rows` (bool [n]) look wrong: blended shape and colour, wrong size, or no
    object.

    A model that drifted off its prompt has such a history; clips like this teach it to come back.
    """
    radius, color, background, shape = (x.clone() for x in looks)
    n, device = len(rows), generator.device
    uniform = lambda *size: torch.rand(*size, generator=generator, device=device)  # noqa: E731
    other_shape = F.one_hot(torch.randint(3, (n,), generator=generator, device=device), 3).float()
    other_color = palette(COLORS, device)[torch.randint(6, (n,), generator=generator, device=device)]
    blend_shape, blend_color = uniform(n, 1), (uniform(n, 1) - 0.4).clamp(min=0)
    scale = 0.6 + 0.75 * uniform(n)
    absent = uniform(n) < 0.25
    shape[rows, 0] = torch.lerp(shape[:, 0], other_shape, blend_shape)[rows]
    color[rows, 0] = torch.lerp(color[:, 0], other_color, blend_color)[rows]
    radius[rows, 0] = torch.where(absent, -1.5, radius[:, 0] * scale)[rows]
    return radius, color, background, shape


def ramp_looks(looks, switch_frame, frames):
    """Cross-fade the two segments over RAMP frames from `switch_frame` [n] on -> Looks over time."""
    time = torch.arange(frames, device=switch_frame.device)[None]
    weight = ((time - switch_frame[:, None] + 1).float() / RAMP).clamp(0, 1)

    def mix(x):
        w = weight.view(*weight.shape, *[1] * (x.dim() - 2))
        return torch.lerp(x[:, 0, None].float(), x[:, 1, None].float(), w)

    radius, color, background, shape = looks
    return Looks(mix(radius), mix(color), mix(background), mix(shape))


def move(attributes, radius, switch_frame, steer, generator):
    """Constant speed and bounces -> centres [n, T, 2].

    The direction is the one at the start of a segment: at `switch_frame` the second segment's direction is taken up at
    once where `steer` (bool [n]) says so, else the motion goes on. At frame 0 at least 40 % of the way lies ahead.
    """
    device, (n, frames) = attributes.device, radius.shape
    directions = torch.tensor(list(DIRECTIONS.values()), dtype=torch.float32, device=device)
    speeds = torch.tensor(list(SPEEDS.values()), device=device)
    velocities = directions[attributes[..., 4]] * speeds[attributes[..., 3]][..., None]
    margin = 1.18 * radius.clamp(min=8.0)
    low, high = margin[..., None], RES - margin[..., None]
    start = torch.rand(n, 2, generator=generator, device=device)
    ahead = directions[attributes[:, 0, 4]]
    start = torch.where(ahead > 0, start * 0.6, torch.where(ahead < 0, 0.4 + start * 0.6, start))
    position, velocity = low[:, 0] + start * (high - low)[:, 0], velocities[:, 0]
    track = [position]
    for t in range(1, frames):
        velocity = torch.where(((switch_frame == t) & steer)[:, None], velocities[:, 1], velocity)
        position = position + velocity
        lo, hi = low[:, t], high[:, t]
        over, under = position > hi, position < lo
        velocity = torch.where(over, -velocity.abs(), torch.where(under, velocity.abs(), velocity))
        position = torch.where(over, 2 * hi - position, torch.where(under, 2 * lo - position, position))
        position = position.clamp(min=lo, max=hi)
        track.append(position)
    return torch.stack(track, 1)


def shape_distances(x, y, radius):
    """Signed distance (negative inside) to circle, square and triangle of `radius`, whose centroid is the origin."""
    circle = (x * x + y * y).sqrt() - radius
    square = torch.maximum(x.abs() + 0 * y, y.abs() + 0 * x) - 0.88 * radius
    triangle = torch.maximum(y + 0 * x, 0.8660254 * x.abs() - 0.5 * y) - 0.68 * radius
    return circle, square, triangle


def render(centers, looks):
    """-> video [n, 3, T, RES, RES] in [-1, 1] and the object's coverage [n, 1, T, RES, RES] in [0, 1]."""
    grid = torch.arange(RES, device=centers.device) + 0.5
    x = grid[None, None, None, :] - centers[..., 0, None, None]
    y = grid[None, None, :, None] - centers[..., 1, None, None]
    radius = looks.radius[..., None, None]
    weights = looks.shape[..., None, None].unbind(2)
    # The triangle hangs .34 radius lower, so that all three shapes have their bounding box around the centre.
    circle, square, _ = shape_distances(x, y, radius)
    triangle = shape_distances(x, y - 0.34 * radius, radius)[2]
    distance = circle * weights[0] + square * weights[1] + triangle * weights[2]
    cover = (0.5 - distance).clamp(0, 1).unsqueeze(1)
    back, front = (c.transpose(1, 2)[..., None, None] for c in (looks.background, looks.color))
    return torch.lerp(back, front, cover), cover


@dataclass
class Clips:
    """A batch of clips. `video` [n, 3, T, RES, RES]; `attributes` [n, 2, 6]; `switch_chunk` [n] (the number of chunks:
    no switch); `recovers` [n]: the first segment looks wrong and is not to be learnt; `cover` as in `render`."""

    video: torch.Tensor
    attributes: torch.Tensor
    switch_chunk: torch.Tensor
    recovers: torch.Tensor
    cover: torch.Tensor


def make_clips(n, chunks, generator, switch=0.55, recover=0.22, frames=None):
    """Draw and render `n` clips of `chunks` chunks (12 * chunks - 3 frames), on the generator's device."""
    device = generator.device
    frames = frames or FRAMES_PER_CHUNK * chunks - 3
    first = random_attributes(n, generator)
    second = changed_attributes(first, generator)
    kind = torch.rand(n, generator=generator, device=device)
    switches, recovers = kind < switch, (kind >= switch) & (kind < switch + recover)
    at = torch.randint(1, max(2, chunks), (n,), generator=generator, device=device)
    at = torch.where(switches | recovers, at, chunks)
    second = torch.where(switches[:, None], second, first)
    attributes = torch.stack([first, second], 1)
    switch_frame = torch.where(at < chunks, first_frame_of_chunk(at), NO_SWITCH_FRAME)
    looks = spoil_first_segment(segment_looks(attributes), recovers, generator)
    looks = ramp_looks(looks, switch_frame, frames)
    video, cover = render(move(attributes, looks.radius, switch_frame, switches, generator), looks)
    return Clips(video, attributes, at, recovers, cover)


def render_attributes(attributes, frames, generator, switch_frame=None):
    """The ground truth of given attributes: [n, 6], or [n, 2, 6] with a switch -> video [n, 3, T, RES, RES]."""
    if attributes.dim() == 2:
        attributes = torch.stack([attributes, attributes], 1)
    n = len(attributes)
    at = torch.full((n,), NO_SWITCH_FRAME if switch_frame is None else switch_frame, device=attributes.device)
    looks = ramp_looks(segment_looks(attributes), at, frames)
    steer = torch.ones(n, dtype=torch.bool, device=attributes.device)
    return render(move(attributes, looks.radius, at, steer, generator), looks)[0]
