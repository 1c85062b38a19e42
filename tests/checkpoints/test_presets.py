"""docs/presets.md says what the presets are, and what their caches take."""

import re
from pathlib import Path

import pytest
import torch

from bc_diffusers import BlockCausalKVCache
from bc_diffusers.pipelines import PRESETS
from bc_diffusers.pipelines.resources import PAGE_SIZE, rollout_spec


TEXT = (Path(__file__).parents[2] / "docs" / "presets.md").read_text()
ROWS = {row[0]: row[1:] for row in re.findall(r"^\| `([\w-]+)` " + r"\| ([^|]+) " * 9 + r"\|$", TEXT, re.MULTILINE)}
TOKENS = 1560  # of a latent frame at 480 x 832


def levels(text):
    return tuple(float(value) for value in text.split(","))


def test_every_preset_is_in_the_table():
    others = {"embedded", "cosmos3"}
    assert set(ROWS) == set(PRESETS) - others
    assert all(f"`{name}`" in TEXT for name in others)


@pytest.mark.parametrize("name", ROWS)
def test_rows(name):
    chunk, sink, window, sight, sigmas, first, shift, small, large = ROWS[name]
    preset = PRESETS[name]
    assert (preset.chunk_frames, preset.sink_frames, preset.window_frames) == (int(chunk), int(sink), int(window))
    assert int(sight) == int(chunk) + int(sink) + int(window)
    assert preset.denoising_sigmas == levels(sigmas)
    assert preset.first_chunk_sigmas == (None if first == "same" else levels(first))
    assert preset.shift == float(shift)
    assert (preset.default_height, preset.default_width, preset.max_sequence_length) == (480, 832, 512)
    assert preset.context_noise == 0 and preset.clean_block_frames is None and preset.default_fps == 16
    spec = rollout_spec(preset, TOKENS)
    for text, layers, heads in ((small, 30, 12), (large, 40, 40)):
        bytes_ = BlockCausalKVCache.pool_bytes_for(spec, page_size=PAGE_SIZE, num_layers=layers, num_kv_heads=heads,
                                                   head_dim=128, dtype=torch.bfloat16)
        assert float(text.removesuffix(" GB")) == pytest.approx(bytes_ / 1e9, rel=0.01)


def test_noise_levels_of_the_four_steps():
    """As the original's table of 1000 training levels has them, shifted by 5."""
    preset = PRESETS["self-forcing"]
    shifted = [preset.shift * s / (1 + (preset.shift - 1) * s) for s in preset.denoising_sigmas]
    assert shifted == pytest.approx([1.0, 0.9375, 0.8333333134651184, 0.625], abs=1e-7)
