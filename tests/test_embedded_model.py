"""The model that ships in the package, end to end: it works through the cache, and only through the cache."""

import numpy as np
import pytest
import torch

from bc_diffusers import BlockCausalVideoPipeline, embedded_model


COLORS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (45, 85, 225), "yellow": (245, 210, 40)}
PROMPTS = [
    ("a large red circle moves right quickly on a white background", "red"),
    ("a large blue square moves left slowly on a white background", "blue"),
    ("a large green triangle moves down quickly on a white background", "green"),
    ("a large yellow circle moves up slowly on a black background", "yellow"),
    ("a large blue circle moves right slowly on a black background", "blue"),
    ("a large red square moves down quickly on a black background", "red"),
]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small only lose by more
    yield
    torch.set_num_threads(before)


def load(**changes):
    pipe = BlockCausalVideoPipeline.from_pretrained(embedded_model(), dtype=torch.float32, **changes)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def look(video):
    """video [F, H, W, 3] in [0, 1] -> per frame: area in pixels, centre [F, 2] and mean colour [F, 3] of what differs
    from the background."""
    border = np.concatenate([video[:, 0], video[:, -1], video[:, :, 0], video[:, :, -1]], 1)
    background = np.median(border, 1)[:, None, None]
    mask = np.linalg.norm(video - background, axis=-1) > 0.25
    area = mask.sum((1, 2))
    y, x = np.mgrid[:video.shape[1], :video.shape[2]]
    total = np.maximum(area, 1)
    center = np.stack([(mask * x).sum((1, 2)) / total, (mask * y).sum((1, 2)) / total], 1)
    color = (video * mask[..., None]).sum((1, 2)) / total[:, None]
    return area, center, color


def judge(video, color):
    """(an object of the right colour is there in every frame, it never jumps)."""
    area, center, seen = look(video)
    distance = {name: np.linalg.norm(np.median(seen, 0) * 255 - rgb) for name, rgb in COLORS.items()}
    right = bool((area > 40).all()) and min(distance, key=distance.get) == color
    return right, bool(np.linalg.norm(np.diff(center, axis=0), axis=1).max() < 3.5)


def rollouts(pipe, frames):
    return [judge(pipe(prompt, num_frames=frames, seed=seed).frames[0], color)
            for seed, (prompt, color) in enumerate(PROMPTS)]


def test_rollouts_are_right_with_the_cache_and_fall_apart_without_history():
    good = rollouts(load(), 45)
    assert sum(right for right, _ in good) >= 5 and sum(smooth for _, smooth in good) >= 5, good
    alone = rollouts(load(window_frames=0), 45)  # each chunk sees itself only
    assert sum(right and smooth for right, smooth in alone) == 0, alone


def test_a_rollout_far_past_the_window_stays_right_and_obeys_a_new_prompt():
    pipe = load()
    with pipe.stream("a large red circle moves right slowly on a white background", seed=3) as stream:
        videos = [chunk.frames for chunk, _ in zip(stream, range(10))]  # 30 latent frames: the window is 18
        assert stream.cache.window_start > 0
        assert stream.set_prompt("a large blue circle moves left slowly on a white background") == 11
        next(stream)  # chunk 10 was on its way
        after = np.concatenate([next(stream).frames for _ in range(2)])
    assert judge(np.concatenate(videos), "red") == (True, True)
    assert judge(after[-12:], "blue")[0]


def test_loading_reports_the_rollout_it_was_trained_for():
    rollout = load().rollout
    assert (rollout.chunk_frames, rollout.window_frames) == (3, 18)
    assert (rollout.default_height, rollout.default_fps) == (96, 12)
