"""The pipeline as a diffusers user meets it: loading, saving, calling, streaming."""

import json

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, FlowMatchLCMScheduler, WanPipeline
from small_models import small_wan_pipeline

from bc_diffusers import BlockCausalVideoPipeline
from bc_diffusers.pipelines.chunk import chunk_seed


SIZE = {"height": 32, "width": 48}


@pytest.fixture(scope="module")
def stock_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stock")
    small_wan_pipeline().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pipe(stock_folder):
    pipe = BlockCausalVideoPipeline.from_pretrained(stock_folder, preset="self-forcing", max_sequence_length=16)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_a_stock_folder_needs_a_preset_and_the_error_lists_them(stock_folder):
    with pytest.raises(ValueError, match="self-forcing, causvid, longlive, causal-forcing.*, embedded"):
        BlockCausalVideoPipeline.from_pretrained(stock_folder)
    with pytest.raises(ValueError, match="unknown preset 'self_forcing'.*self-forcing"):
        BlockCausalVideoPipeline.from_pretrained(stock_folder, preset="self_forcing")


def test_a_folder_without_a_transformer_is_refused_before_loading(stock_folder, tmp_path):
    index = json.loads((stock_folder / "model_index.json").read_text())
    index["transformer"] = [None, None]
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="no transformer"):
        BlockCausalVideoPipeline.from_pretrained(tmp_path, preset="self-forcing")
    index["transformer"] = ["diffusers", "FluxTransformer2DModel"]
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="FluxTransformer2DModel.*WanTransformer3DModel"):
        BlockCausalVideoPipeline.from_pretrained(tmp_path, preset="self-forcing")


def test_own_folder_remembers_the_rollout_and_loads_by_every_door(pipe, stock_folder, tmp_path):
    changed = BlockCausalVideoPipeline.from_pretrained(stock_folder, preset="longlive", window_frames=4,
                                                       max_sequence_length=16)
    assert (changed.rollout.window_frames, changed.rollout.sink_frames) == (4, 3)
    changed.save_pretrained(tmp_path)
    again = BlockCausalVideoPipeline.from_pretrained(tmp_path)
    assert again.rollout == changed.rollout and again.config.preset == "longlive"
    assert type(DiffusionPipeline.from_pretrained(tmp_path)) is BlockCausalVideoPipeline
    assert BlockCausalVideoPipeline.from_pretrained(tmp_path, sink_frames=1).rollout.sink_frames == 1
    other = BlockCausalVideoPipeline.from_pretrained(tmp_path, preset="self-forcing")
    assert (other.rollout.window_frames, other.rollout.sink_frames) == (18, 0)
    assert type(WanPipeline.from_pretrained(tmp_path)) is WanPipeline
    a, b = (p("dance", num_frames=9, seed=3, **SIZE).frames for p in (changed, again))
    np.testing.assert_array_equal(a, b)


def test_the_scheduler_becomes_lcm_with_the_rollouts_shift(pipe):
    assert type(pipe.scheduler) is FlowMatchLCMScheduler and pipe.scheduler.config.shift == 5.0
    np.testing.assert_allclose(pipe._shifted_sigmas((1.0, 0.75, 0.5, 0.25)), [1, 0.9375, 0.8333333, 0.625], rtol=1e-6)


@pytest.mark.parametrize("frames", [1, 4, 8, 9, 21, 24])
def test_any_number_of_frames(pipe, frames):
    video = pipe("dance monkey", num_frames=frames, seed=0, **SIZE).frames
    assert video.shape == (1, frames, 32, 48, 3) and video.dtype == np.float32
    assert 0 <= video.min() and video.max() <= 1


@pytest.mark.parametrize("latent_frames", [20, 31])
def test_latent_counts_that_no_chunk_divides_go_past_21_frames(pipe, latent_frames):
    noise = torch.randn(1, 16, latent_frames, 4, 6)
    out = pipe("dance", num_frames=4 * latent_frames - 3, latents=noise, output_type="latent", **SIZE).frames
    assert out.shape == noise.shape and torch.isfinite(out).all()


def test_call_joins_the_stream_and_output_types_agree(pipe):
    given = {"num_frames": 21, "seed": 7, **SIZE}
    video = pipe("a b", **given).frames
    chunks = list(pipe.stream("a b", **given))
    assert [c.index for c in chunks] == [0, 1] and [len(c.frames) for c in chunks] == [9, 12]
    np.testing.assert_array_equal(video[0], np.concatenate([c.frames for c in chunks]))
    tensor = pipe("a b", output_type="pt", **given).frames
    np.testing.assert_array_equal(tensor.permute(0, 1, 3, 4, 2).numpy(), video)
    images = pipe("a b", output_type="pil", **given).frames
    np.testing.assert_array_equal(np.stack(images[0]), (video[0] * 255).round().astype("uint8"))
    latents = pipe("a b", output_type="latent", return_dict=False, **given)[0]
    assert torch.equal(latents, torch.cat([c.latents for c in chunks], 2))


def test_streamed_decode_is_the_full_decode_bit_for_bit(pipe):
    given = {"num_frames": 33, "seed": 1, **SIZE}
    latents = pipe("dance", output_type="latent", **given).frames
    mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (pipe.vae.config.latents_mean,
                                                                 pipe.vae.config.latents_std))
    full = pipe.vae.decode(latents / (1.0 / std) + mean).sample
    expected = pipe.video_processor.postprocess_video(full, output_type="pt")
    assert torch.equal(pipe("dance", output_type="pt", **given).frames, expected)


def test_a_chunks_noise_depends_on_seed_and_number_alone(pipe):
    def first_chunks(**given):
        with pipe.stream("dance", output_type="latent", **SIZE, **given) as stream:
            return [next(stream).latents for _ in range(2)]

    once, twice = first_chunks(seed=5), first_chunks(seed=5, num_chunks=3)
    assert all(torch.equal(a, b) for a, b in zip(once, twice))
    assert not torch.equal(once[0], first_chunks(seed=6)[0])
    assert not torch.equal(once[0], once[1])
    one, other = (first_chunks(generator=torch.Generator().manual_seed(9)) for _ in range(2))
    assert torch.equal(one[1], other[1])
    generator = torch.Generator().manual_seed(9)
    assert not torch.equal(first_chunks(generator=generator)[0], first_chunks(generator=generator)[0])


def test_the_update_is_the_schedulers_own(pipe):
    """Our passes against FlowMatchLCMScheduler.step, noise drawn in the same order."""
    ours = pipe("dance", num_frames=9, seed=4, output_type="latent", **SIZE).frames
    scheduler = FlowMatchLCMScheduler(shift=5.0)
    scheduler.set_timesteps(sigmas=[1.0, 0.75, 0.5, 0.25])
    scheduler.set_begin_index(0)
    generator, stock = torch.Generator().manual_seed(chunk_seed(4, 0)), small_wan_pipeline()
    latents = torch.randn(1, 16, 3, 4, 6, generator=generator)
    embeds = pipe.encode_prompt("dance")
    with torch.no_grad():
        for t in scheduler.timesteps:
            velocity = stock.transformer(latents, t.expand(1), embeds, return_dict=False)[0]
            latents = scheduler.step(velocity, t, latents, generator=generator, return_dict=False)[0]
    torch.testing.assert_close(ours, latents, atol=2e-5, rtol=0)


def test_encode_prompt_is_the_stock_one(pipe):
    with torch.no_grad():
        expected, _ = small_wan_pipeline().encode_prompt("dance  monkey &amp; co", do_classifier_free_guidance=False,
                                                         max_sequence_length=16)
    assert torch.equal(pipe.encode_prompt("dance  monkey &amp; co"), expected)


def test_a_stock_pipeline_on_the_same_transformer_is_untouched(stock_folder):
    given = {"prompt": "dance", "num_frames": 9, "num_inference_steps": 2, "max_sequence_length": 16,
             "output_type": "pt", "guidance_scale": 1.0, **SIZE}

    def run(stock):
        stock.set_progress_bar_config(disable=True)
        return stock(generator=torch.Generator().manual_seed(0), **given).frames

    stock = WanPipeline.from_pretrained(stock_folder)
    expected = run(stock)
    ours = BlockCausalVideoPipeline.from_pipe(stock, preset="self-forcing", max_sequence_length=16)
    ours.set_progress_bar_config(disable=True)
    assert ours.transformer is stock.transformer
    assert torch.equal(run(stock), expected)
    stream = ours.stream("dance", seed=0, **SIZE)
    next(stream)
    assert torch.equal(run(stock), expected)  # between two chunks of a stream that goes on
    next(stream)
    stream.close()
    assert torch.equal(run(stock), expected)
    back = WanPipeline.from_pipe(ours)
    back.scheduler = stock.scheduler
    assert torch.equal(run(back), expected)


def test_image_is_the_first_frame_and_conditions_the_chunk(pipe):
    picture = np.random.default_rng(0).random((32, 48, 3), dtype=np.float32)
    given = {"num_frames": 9, "seed": 0, **SIZE}
    latents = pipe("dance", image=picture, output_type="latent", **given).frames
    pixels = torch.from_numpy(picture).permute(2, 0, 1)[None, :, None] * 2 - 1
    mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (pipe.vae.config.latents_mean,
                                                                 pipe.vae.config.latents_std))
    with torch.no_grad():
        expected = (pipe.vae.encode(pixels).latent_dist.mode() - mean) / std
    torch.testing.assert_close(latents[:, :, :1], expected, atol=1e-6, rtol=0)
    plain = pipe("dance", output_type="latent", **given).frames
    assert not torch.allclose(latents[:, :, 1:], plain[:, :, 1:], atol=1e-3)
    with pytest.raises(ValueError, match="NaN"):
        pipe("dance", image=np.full((32, 48, 3), np.nan, dtype=np.float32), **given)


def test_callbacks_see_every_pass_and_may_replace_tensors(pipe):
    seen = []

    def callback(p, step, timestep, given):
        seen.append((step, float(timestep), sorted(given)))
        return {"latents": torch.zeros_like(given["latents"])} if step == 3 else {}

    out = pipe("dance", num_frames=21, seed=0, output_type="latent", callback_on_step_end=callback,
               callback_on_step_end_tensor_inputs=["latents", "prompt_embeds"], **SIZE).frames
    assert [s for s, *_ in seen] == list(range(8))
    assert seen[1] == (1, 937.5, ["latents", "prompt_embeds"])
    assert (out[:, :, :3] == 0).all() and not (out[:, :, 3:] == 0).all()


def test_interrupt_ends_the_rollout_with_the_chunk_as_far_as_it_came(pipe):
    passes = []

    def callback(p, step, timestep, given):
        passes.append(step)
        p._interrupt = step == 5
        return {}

    with pipe.stream("dance", seed=0, callback_on_step_end=callback, **SIZE) as stream:
        chunks = list(stream)
    assert passes == [0, 1, 2, 3, 4, 5] and len(chunks) == 2 and stream.closed
    assert len(list(pipe.stream("dance", seed=0, num_chunks=2, **SIZE))) == 2  # the next stream is not interrupted


@pytest.mark.parametrize("arguments,message", [
    ({"prompt": ""}, "empty"),
    ({"prompt": None}, "either `prompt` or `prompt_embeds`"),
    ({"prompt": ["a", "b"]}, "one prompt, got a list of 2"),
    ({"num_frames": 0}, "`num_frames` must be a whole number of at least 1, got 0"),
    ({"num_frames": 9, "num_chunks": 1}, "not both"),
    ({"height": 40}, "multiple of 16, got 40: the nearest is 32"),
    ({"width": 3}, "multiple of 16, got 3: the nearest is 16"),
    ({"output_type": "mp4"}, "np, pt, pil, latent"),
    ({"latents": torch.zeros(1, 16, 3, 4, 5)}, r"must be \[1, 16, 3, 4, 6\], got \[1, 16, 3, 4, 5\]"),
    ({"latents": torch.zeros(1, 16, 3, 4, 6, dtype=torch.int32)}, "floating point"),
    ({"attention_backend": "magic"}, "unknown attention backend 'magic'"),
    ({"seed": 1, "generator": torch.Generator()}, "not both"),
    ({"callback_on_step_end_tensor_inputs": ["magic"]}, "magic"),
])
def test_bad_input_is_refused_at_once(pipe, arguments, message):
    given = {"prompt": "dance", **SIZE, **arguments}
    with pytest.raises(ValueError, match=message):
        pipe.stream(**given)
