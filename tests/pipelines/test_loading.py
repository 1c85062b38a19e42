"""Every door through which a model comes in, and what is turned away."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
from diffusers import DiffusionPipeline, UniPCMultistepScheduler, WanPipeline
from small_models import small_text_encoder, small_tokenizer, small_transformer, small_vae, small_wan_pipeline

from bc_diffusers import BlockCausalVideoPipeline


ROOT = Path(__file__).resolve().parents[2]
SIZE = {"height": 32, "width": 48}


def quiet(pipe):
    pipe.set_progress_bar_config(disable=True)
    return pipe


def small_wan22_pipeline():
    """As Wan 2.2 TI2V 5B: one transformer, timesteps by token, a patched residual VAE that is 16 times smaller."""
    tokenizer = small_tokenizer()
    vae = small_vae(z_dim=48, decoder_base_dim=4, is_residual=True, patch_size=2, in_channels=12, out_channels=12,
                    scale_factor_spatial=16, latents_mean=[0.1] * 48, latents_std=[1.5] * 48)
    return quiet(WanPipeline(
        tokenizer=tokenizer, text_encoder=small_text_encoder(len(tokenizer)), vae=vae,
        transformer=small_transformer(in_channels=48, out_channels=48), expand_timesteps=True,
        scheduler=UniPCMultistepScheduler(flow_shift=5.0, use_flow_sigmas=True,
                                          prediction_type="flow_prediction")))


@pytest.fixture(scope="module")
def stock_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stock")
    small_wan_pipeline().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pipe(stock_folder):
    return quiet(BlockCausalVideoPipeline.from_pretrained(stock_folder, preset="self-forcing", max_sequence_length=16))


# -------------------------------------------------------------------------------------------------- Wan 2.2
def test_wan22_with_one_transformer(tmp_path):
    small_wan22_pipeline().save_pretrained(tmp_path / "stock")
    pipe = quiet(BlockCausalVideoPipeline.from_pretrained(tmp_path / "stock", preset="self-forcing", window_frames=3,
                                                          max_sequence_length=16))
    given = {"num_frames": 33, "seed": 0, "height": 64, "width": 96}
    latents = pipe("dance", output_type="latent", **given).frames
    assert latents.shape == (1, 48, 9, 4, 6)
    mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (pipe.vae.config.latents_mean,
                                                                 pipe.vae.config.latents_std))
    full = pipe.vae.decode(latents / (1.0 / std) + mean, return_dict=False)[0]
    expected = pipe.video_processor.postprocess_video(full.detach(), output_type="pt")
    assert expected.shape == (1, 33, 3, 64, 96)
    torch.testing.assert_close(pipe("dance", output_type="pt", **given).frames, expected, atol=1e-6, rtol=0)

    picture = np.random.default_rng(0).random((64, 96, 3), dtype=np.float32)
    shown = pipe("dance", image=picture, output_type="latent", **given).frames
    with torch.no_grad():
        pixels = torch.from_numpy(picture).permute(2, 0, 1)[None, :, None] * 2 - 1
        expected = (pipe.vae.encode(pixels).latent_dist.mode() - mean) / std
    torch.testing.assert_close(shown[:, :, :1], expected, atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="multiple of 32, got 48: the nearest is 64"):
        pipe("dance", height=48, width=96)
    back = WanPipeline.from_pipe(pipe)
    assert back.config.expand_timesteps and back.transformer is pipe.transformer


def test_two_transformers_are_refused_before_anything_is_loaded(tmp_path):
    stock = small_wan_pipeline()
    stock.register_modules(transformer_2=small_transformer(num_layers=1))
    stock.register_to_config(boundary_ratio=0.9)
    with pytest.raises(ValueError, match="two transformers.*transformer_2"):
        BlockCausalVideoPipeline.from_pipe(stock, preset="self-forcing")
    stock.save_pretrained(tmp_path)
    for weights in tmp_path.rglob("*.safetensors"):
        weights.unlink()
    with pytest.raises(ValueError, match="two transformers.*transformer_2"):
        BlockCausalVideoPipeline.from_pretrained(tmp_path, preset="self-forcing")


def test_an_image_to_video_transformer_is_refused():
    stock = small_wan_pipeline(in_channels=36)
    with pytest.raises(ValueError, match="takes 36 channels and makes 16.*image-to-video"):
        BlockCausalVideoPipeline.from_pipe(stock, preset="self-forcing")


# -------------------------------------------------------------------------------------------------- other doors
def test_custom_pipeline_from_a_local_folder(pipe, stock_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("diffusers.utils.dynamic_modules_utils.HF_MODULES_CACHE", str(tmp_path))
    loaded = quiet(DiffusionPipeline.from_pretrained(
        stock_folder, custom_pipeline=str(ROOT / "examples" / "custom_pipeline"), trust_remote_code=True,
        preset="self-forcing", max_sequence_length=16))
    assert type(loaded) is BlockCausalVideoPipeline
    given = {"num_frames": 5, "seed": 0, **SIZE}
    np.testing.assert_array_equal(loaded("dance", **given).frames, pipe("dance", **given).frames)


def test_a_new_process_that_only_imports_the_package_loads_our_folder_by_diffusers_own_door(pipe, tmp_path):
    pipe.save_pretrained(tmp_path / "own")
    code = (f"import sys; sys.path.insert(0, {str(ROOT)!r})\nimport bc_diffusers\n"
            "from diffusers import DiffusionPipeline\np = DiffusionPipeline.from_pretrained('own')\n"
            "print(type(p).__name__, p.rollout.window_frames)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == "BlockCausalVideoPipeline 18", done.stderr


def test_from_pipe_leaves_every_dtype_as_it_is_unless_asked():
    stock = small_wan_pipeline()
    stock.transformer.to(torch.bfloat16)
    ours = quiet(BlockCausalVideoPipeline.from_pipe(stock, preset="longlive", max_sequence_length=16))
    assert stock.transformer.dtype == torch.bfloat16 and stock.vae.dtype == torch.float32
    assert np.isfinite(ours("dance", num_frames=5, seed=0, **SIZE).frames).all()
    again = BlockCausalVideoPipeline.from_pipe(ours, window_frames=2)
    assert (again.rollout.window_frames, again.rollout.sink_frames) == (2, 3) and again.vae is stock.vae
    other = BlockCausalVideoPipeline.from_pipe(ours, preset="self-forcing", dtype=torch.float32)
    assert other.rollout.sink_frames == 0 and stock.transformer.dtype == torch.float32


# -------------------------------------------------------------------------------------------------- pictures, text
def test_pictures_of_every_kind_are_the_same_first_frame(pipe):
    array = np.random.default_rng(1).integers(0, 256, (32, 48, 3), dtype=np.uint8)
    kinds = [PIL.Image.fromarray(array), PIL.Image.fromarray(array).convert("RGBA"), array,
             array.astype(np.float32) / 255, array[None].astype(np.float64) / 255,
             torch.from_numpy(array).permute(2, 0, 1), torch.from_numpy(array).permute(2, 0, 1)[None].float() / 255]
    given = {"num_frames": 5, "seed": 0, "output_type": "latent", **SIZE}
    first, *others = [pipe("dance", image=kind, **given).frames for kind in kinds]
    for other in others:
        torch.testing.assert_close(other, first, atol=1e-5, rtol=0)
    larger = pipe("dance", image=PIL.Image.fromarray(array).resize((96, 64), PIL.Image.Resampling.NEAREST),
                  **given).frames
    assert larger.shape == first.shape
    alone = pipe("dance", image=array, num_frames=1, seed=0, output_type="latent", **SIZE).frames
    torch.testing.assert_close(alone, first[:, :, :1])


def test_the_first_video_frame_is_the_picture_as_the_vae_keeps_it(pipe):
    picture = np.random.default_rng(2).random((32, 48, 3), dtype=np.float32)
    video = pipe("dance", image=picture, num_frames=13, seed=0, output_type="pt", **SIZE).frames[0]
    pixels = torch.from_numpy(picture).permute(2, 0, 1)[None, :, None] * 2 - 1
    with torch.no_grad():
        seen = pipe.vae.decode(pipe.vae.encode(pixels).latent_dist.mode()).sample[0, :, 0]
    torch.testing.assert_close(video[0], seen.clamp(-1, 1) / 2 + 0.5, atol=1e-5, rtol=0)
    plain = pipe("dance", num_frames=13, seed=0, output_type="pt", **SIZE).frames[0]
    assert not torch.allclose(video[-4:], plain[-4:], atol=1e-4)  # it is history for what follows


def test_a_chunk_of_one_frame_can_be_the_picture(stock_folder):
    pipe = quiet(BlockCausalVideoPipeline.from_pretrained(stock_folder, preset="self-forcing", chunk_frames=1,
                                                          max_sequence_length=16))
    picture = np.random.default_rng(3).random((32, 48, 3), dtype=np.float32)
    given = {"num_frames": 9, "seed": 0, "output_type": "latent", **SIZE}
    shown, plain = pipe("dance", image=picture, **given).frames, pipe("dance", **given).frames
    assert shown.shape == plain.shape == (1, 16, 3, 4, 6)
    assert not torch.allclose(shown[:, :, 1:], plain[:, :, 1:], atol=1e-4)


def test_text_is_padded_with_zeros_and_attended_without_a_mask(stock_folder, monkeypatch):
    pipe = quiet(BlockCausalVideoPipeline.from_pretrained(stock_folder, preset="self-forcing"))
    seen = {}
    forward = pipe.transformer.forward

    def spy(*args, **kwargs):
        seen.update(kwargs)
        return forward(*args, **kwargs)

    monkeypatch.setattr(pipe.transformer, "forward", spy)
    pipe("dance", num_frames=1, seed=0, **SIZE)
    embeds = seen["encoder_hidden_states"]
    assert embeds.shape == (1, 512, 32) and not embeds[0, :4].eq(0).all() and embeds[0, 16:].eq(0).all()
    assert not any("mask" in name for name in seen)
    embeds = pipe.encode_prompt("dance", max_sequence_length=16)
    given = {"num_frames": 1, "seed": 0, **SIZE}
    np.testing.assert_array_equal(pipe("dance", max_sequence_length=16, **given).frames,
                                  pipe(prompt_embeds=embeds, **given).frames)
