"""Read a clip with plain image arithmetic: background, colour, area, centre and shape of the object, frame by frame.

Nothing here is learnt. A video is [n, T, 3, H, W] in [0, 1]; every result is a tensor [n, T] or [n, T, 3].
"""

import torch
import torch.nn.functional as F
from shape_world import (
    AREA,
    BACKGROUNDS,
    COLORS,
    DIRECTIONS,
    NAMES,
    RES,
    SIZES,
    SPEEDS,
    STILL,
    palette,
    shape_distances,
)


OBJECT_CONTRAST = 0.18  # distance from the background, in RGB of [0, 1], from which on a pixel belongs to the object
MIN_AREA = 45.0  # pixels under which there is no object to speak of
MAX_STEP = 2 * max(SPEEDS.values())  # pixels a frame; further than this the object jumped
CRITERIA = ("color", "shape", "background", "size", "persists", "smooth", "direction", "speed")


def measure(video):
    """-> dict of background, color [n, T, 3]; area, x, y, shape (index of the best fitting one, -1: none) [n, T]."""
    video = video.float()
    height, width = video.shape[-2:]
    border = torch.cat([video[..., 0, :], video[..., -1, :], video[..., :, 0], video[..., :, -1]], -1)
    background = border.median(-1).values
    offset = video - background[..., None, None]
    mask = (offset.norm(dim=2) > OBJECT_CONTRAST).float()
    # Colour: over the pixels with all neighbours in the object, where there are any.
    inner = -F.max_pool2d(-mask, 3, 1, 1)
    inner = torch.where((inner.sum((-2, -1)) >= 12)[..., None, None], inner, mask)
    color = (video * inner[:, :, None]).sum((-2, -1)) / inner.sum((-2, -1)).clamp(min=1)[..., None]
    # How much of each pixel the object covers: its place on the line from the background's to the object's colour.
    line = color - background
    cover = (offset * line[..., None, None]).sum(2) / line.square().sum(-1).clamp(min=1e-4)[..., None, None]
    near = F.max_pool2d(mask, 3, 1, 1)
    cover = cover.clamp(0, 1) * near
    area = cover.sum((-2, -1))
    xs = torch.arange(width, device=video.device) + 0.5
    ys = torch.arange(height, device=video.device) + 0.5
    total = area.clamp(min=1)
    x, y = (cover.sum(-2) * xs).sum(-1) / total, (cover.sum(-1) * ys).sum(-1) / total
    shape = torch.where(area > MIN_AREA, best_shape(cover, area, x, y), -1)
    return {"background": background, "color": color, "area": area, "x": x, "y": y, "shape": shape}


def best_shape(cover, area, x, y):
    """The shape that overlaps `cover` [n, T, H, W] best, drawn with the same area and centroid -> index [n, T]."""
    height, width = cover.shape[-2:]
    dx = torch.arange(width, device=cover.device) + 0.5 - x[..., None, None]
    dy = (torch.arange(height, device=cover.device) + 0.5)[:, None] - y[..., None, None]
    overlaps = []
    for i, unit in enumerate(AREA):
        radius = (area / unit).sqrt()[..., None, None]
        drawn = (0.5 - shape_distances(dx, dy, radius)[i]).clamp(0, 1)
        union = torch.maximum(drawn, cover).sum((-2, -1)).clamp(min=1e-3)
        overlaps.append(torch.minimum(drawn, cover).sum((-2, -1)) / union)
    return torch.stack(overlaps).argmax(0)


def nearest(rgb, table, limit):
    """Index of the nearest colour of `table` ({name: bytes}) for rgb [..., 3] in [0, 1]; -1 further than `limit`."""
    distance = (rgb[..., None, :] - (palette(table, rgb.device) + 1) / 2).norm(dim=-1)
    value, index = distance.min(-1)
    return torch.where(value < limit, index, -1)


def heading(dx, dy, still=2.0):
    """Direction index of a displacement in pixels; under `still` pixels on both axes it stands still."""
    names = NAMES["direction"]
    horizontal = torch.where(dx > 0, names.index("right"), names.index("left"))
    vertical = torch.where(dy > 0, names.index("down"), names.index("up"))
    moving = torch.where(dx.abs() > dy.abs(), horizontal, vertical)
    return torch.where(torch.maximum(dx.abs(), dy.abs()) < still, STILL, moving)


def slices(info, length=12):
    """Medians over runs of `length` frames -> color, background indices and shape votes, each [n, runs]."""
    color, background, shape = [], [], []
    for start in range(0, info["area"].shape[1], length):
        part = slice(start, start + length)
        color.append(nearest(info["color"][:, part].median(1).values, COLORS, 0.25))
        background.append(nearest(info["background"][:, part].median(1).values, BACKGROUNDS, 0.15))
        shape.append(info["shape"][:, part].mode(1).values)
    return torch.stack(color, 1), torch.stack(background, 1), torch.stack(shape, 1)


def wanted_area(attributes):
    """Pixels that the object of each row of attributes [n, 6] covers."""
    radius = torch.tensor(list(SIZES.values()), device=attributes.device)[attributes[:, 2]]
    return torch.tensor(AREA, device=attributes.device)[attributes[:, 1]] * radius.square()


def judge(info, attributes):
    """Eight criteria over the whole clip, each bool [n], against attributes [n, 6].

    color, background: right in every run of 12 frames; shape: in more than 90 % of the runs; size: area within
    [.7, 1.5] of the wanted one in over 90 % of the frames; persists: within [.5, 2] in all; smooth: no step over
    MAX_STEP; direction: of the first 8 frames' displacement; speed: the median step within .35 pixels a frame.
    """
    color, background, shape = slices(info)
    ratio = info["area"] / wanted_area(attributes)[:, None]
    step = torch.stack([info["x"].diff(dim=1), info["y"].diff(dim=1)]).norm(dim=0)
    speeds = torch.tensor(list(SPEEDS.values()), device=attributes.device)[attributes[:, 3]]
    speeds = torch.where(attributes[:, 4] == STILL, 0.0, speeds)
    last = min(8, info["x"].shape[1] - 1)
    moved = heading(info["x"][:, last] - info["x"][:, 0], info["y"][:, last] - info["y"][:, 0])
    return {
        "color": (color == attributes[:, :1]).all(1),
        "shape": (shape == attributes[:, 1:2]).float().mean(1) > 0.9,
        "background": (background == attributes[:, 5:]).all(1),
        "size": ((ratio > 0.7) & (ratio < 1.5)).float().mean(1) > 0.9,
        "persists": ((ratio > 0.5) & (ratio < 2.0)).all(1),
        "smooth": step.amax(1) < MAX_STEP,
        "direction": moved == attributes[:, 4],
        "speed": (step.median(1).values - speeds).abs() < 0.35,
    }


def has_object(info):
    """bool [n]: somewhere in the clip there is an object in most frames of a run of 12."""
    return ((info["area"] > MIN_AREA).float().mean(1)) > 0.5


def turned(info, frame, attributes):
    """After a prompt change whose first frame is `frame`, does the object move as `attributes` [n, 6] say? -> two
    bool [n].

    Judged over the frames until it would reach the wall ahead, 8 at most. The second result says where there are at
    least 4 of them: nearer to the wall an object bounces at once, and either way would be right.
    """
    x, y = info["x"][:, frame - 1], info["y"][:, frame - 1]
    way = torch.tensor(list(DIRECTIONS.values()), dtype=torch.float32, device=x.device)[attributes[:, 4]]
    margin = 1.18 * torch.tensor(list(SIZES.values()), device=x.device)[attributes[:, 2]]
    ahead = torch.where(way > 0, RES - margin[:, None], margin[:, None]) - torch.stack([x, y], 1)
    room = (ahead * way).sum(1)
    speed = torch.tensor(list(SPEEDS.values()), device=x.device)[attributes[:, 3]]
    frames = (room / speed).floor().clamp(4, 8).long()
    end = (frame - 1 + frames)[:, None]
    dx, dy = (info[axis].gather(1, end)[:, 0] - start for axis, start in (("x", x), ("y", y)))
    return heading(dx, dy, still=1.0) == attributes[:, 4], room >= 4 * speed
