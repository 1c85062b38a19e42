"""Every family through BlockCausalVideoPipeline: stock folder in, video out, saved and loaded again."""

import copy

import pytest
import torch
from diffusers import Cosmos3OmniPipeline, DiffusionPipeline
from tiny_pipelines import STOCK

from bc_diffusers import BlockCausalVideoPipeline


SIZES = {"wan": (32, 48), "skyreels": (32, 48), "cosmos3": (32, 48), "ltx": (64, 96)}
OVERRIDES = {"chunk_frames": 2, "window_frames": 3, "clean_block_frames": 1, "denoising_sigmas": [1.0, 0.5],
             "default_fps": 24, "max_sequence_length": 64}


@pytest.fixture(scope="module")
def stock_folders(tmp_path_factory):
    folders = {}
    for name, make in STOCK.items():
        folders[name] = tmp_path_factory.mktemp(name)
        make().save_pretrained(folders[name])
    return folders


def load(folder, **kwargs):
    pipe = BlockCausalVideoPipeline.from_pretrained(folder, preset="self-forcing", **{**OVERRIDES, **kwargs})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(pipe, name, prompt="a red cat", num_frames=17, **kwargs):
    height, width = SIZES[name]
    kwargs.setdefault("output_type", "latent" if name == "ltx" else "pt")
    return pipe(prompt, num_frames=num_frames, height=height, width=width, seed=1, **kwargs).frames


@pytest.mark.parametrize("name", STOCK)
def test_stock_folder_to_video_and_back(name, stock_folders, tmp_path):
    pipe = load(stock_folders[name])
    frames = generate(pipe, name)
    if name == "ltx":
        assert list(frames.shape) == [1, 8, 3, 2, 3]
    else:
        assert list(frames.shape) == [1, 17, 3, 32, 48]
    assert torch.isfinite(frames).all() and frames.std() > 0.01
    assert not torch.equal(frames, generate(pipe, name, prompt="the sea"))

    pipe.save_pretrained(tmp_path)
    again = DiffusionPipeline.from_pretrained(tmp_path)
    assert isinstance(again, BlockCausalVideoPipeline)
    again.set_progress_bar_config(disable=True)
    assert again.config.adapter_options == pipe.config.adapter_options
    assert torch.equal(generate(again, name), frames)


@pytest.mark.parametrize("name", STOCK)
def test_a_pipe_shared_with_the_models_own_pipeline(name, stock_folders):
    stock = STOCK[name]()
    stock.set_progress_bar_config(disable=True)
    height, width = SIZES[name]

    def own():
        return stock("a red cat", num_frames=9, height=height, width=width, num_inference_steps=2,
                     output_type="latent", generator=torch.Generator().manual_seed(0))[0]

    before = own()
    pipe = BlockCausalVideoPipeline.from_pipe(stock, preset="self-forcing", **OVERRIDES)
    pipe.set_progress_bar_config(disable=True)
    assert pipe.transformer is stock.transformer
    # Not to the bit: weights mapped from a file lie at other alignments in memory.
    torch.testing.assert_close(generate(pipe, name), generate(load(stock_folders[name]), name), rtol=0, atol=1e-5)
    assert torch.equal(own(), before)


def test_cosmos3_reads_prompts_as_its_own_pipeline_does(stock_folders):
    stock = STOCK["cosmos3"]()
    pipe = load(stock_folders["cosmos3"], default_fps=24)
    for use_system_prompt in (True, False):
        adapter = pipe._adapter_class(pipe.transformer, pipe._adapter.format, {"use_system_prompt": use_system_prompt})
        for prompt in ("a red cat.", "the sea. waves", "a  cat ,"):
            ids = adapter.encode_prompt(prompt, pipe.tokenizer, None, max_tokens=64, height=480, width=832,
                                        num_frames=49, device="cpu", dtype=torch.float32)["prompt_ids"]
            against = adapter.encode_prompt("", pipe.tokenizer, None, max_tokens=64, height=480, width=832,
                                            num_frames=49, device="cpu", dtype=torch.float32, negative=True)
            expected = stock.tokenize_prompt(prompt, num_frames=49, height=480, width=832, fps=24.0,
                                             use_system_prompt=use_system_prompt)
            assert (ids.tolist(), against["prompt_ids"].tolist()) == expected
            endless = adapter.encode_prompt(prompt, pipe.tokenizer, None, max_tokens=64, height=480, width=832,
                                            num_frames=None, device="cpu", dtype=torch.float32)["prompt_ids"]
            expected, _ = stock.tokenize_prompt(prompt, num_frames=49, height=480, width=832,
                                                add_duration_template=False, use_system_prompt=use_system_prompt)
            assert endless.tolist() == expected


def test_cosmos3_takes_the_stock_folders_system_prompt(stock_folders, tmp_path):
    stock = STOCK["cosmos3"]()
    Cosmos3OmniPipeline(**stock.components, enable_safety_checker=False, default_use_system_prompt=False
                        ).save_pretrained(tmp_path)
    assert load(tmp_path).config.adapter_options == {"use_system_prompt": False}
    assert load(stock_folders["cosmos3"]).config.adapter_options == {"use_system_prompt": True}


def test_cosmos3_prompt_change_in_a_stream(stock_folders):
    """The fixed region takes the new prompt's length; chunks before the change are untouched by it."""
    pipe = load(stock_folders["cosmos3"])
    size = {"height": 32, "width": 48, "seed": 1, "output_type": "latent"}
    with pipe.stream("a red cat", num_chunks=4, **size) as stream:
        plain = [chunk.latents for chunk in stream]
    with pipe.stream("a red cat", num_chunks=4, **size) as stream:
        changed = [next(stream).latents, next(stream).latents]
        short = stream.cache.pin_tokens
        assert stream.set_prompt("the red cat and the sea and the waves of the sea") == 2
        changed.append(next(stream).latents)
        assert stream.cache.pin_tokens == short + 9
        assert stream.cache.committed == stream.cache.pin_tokens + 3 * 2 * 6
        changed.append(next(stream).latents)
    assert torch.equal(plain[0], changed[0]) and torch.equal(plain[1], changed[1])
    assert (plain[2] - changed[2]).abs().max() > 1e-3


def test_cosmos3_guidance_keeps_a_prompt_in_each_cache(stock_folders):
    pipe = load(stock_folders["cosmos3"])
    plain = generate(pipe, "cosmos3", output_type="latent")
    guided = generate(pipe, "cosmos3", output_type="latent", guidance_scale=3.0)
    other = generate(pipe, "cosmos3", output_type="latent", guidance_scale=3.0, negative_prompt="the sea")
    assert (guided - plain).abs().max() > 1e-3 and (guided - other).abs().max() > 1e-3


def test_cosmos3_starts_from_a_picture(stock_folders):
    pipe = load(stock_folders["cosmos3"])
    image = torch.linspace(0, 1, 3 * 32 * 48).reshape(3, 32, 48)
    frames = generate(pipe, "cosmos3", image=image)
    decoded = pipe.vae.decode(pipe.vae.encode(image[None, :, None] * 2 - 1).latent_dist.mode()).sample
    torch.testing.assert_close(frames[0, 0], (decoded[0, :, 0] / 2 + 0.5).clamp(0, 1), rtol=0, atol=1e-4)


def test_what_a_family_cannot_do_is_said(stock_folders):
    cosmos3, ltx, wan = (load(stock_folders[name]) for name in ("cosmos3", "ltx", "wan"))
    with pytest.raises(ValueError, match="Cosmos3 takes no `prompt_embeds`"):
        cosmos3.stream(prompt_embeds=torch.zeros(1, 4, 48), height=32, width=48)
    with pytest.raises(ValueError, match="Cosmos3 takes no `prompt_embeds`"):
        cosmos3.encode_prompt("a red cat")
    with pytest.raises(ValueError, match="the prompt takes .* tokens .* room for 16"):
        cosmos3.stream("a red cat", height=32, width=48, max_sequence_length=16)
    with pytest.raises(ValueError, match="knows .*'latents'.*, not .*'prompt_embeds'"):
        cosmos3.stream("a red cat", height=32, width=48, callback_on_step_end=lambda *_: {},
                       callback_on_step_end_tensor_inputs=["prompt_embeds"])
    with pytest.raises(ValueError, match="Cosmos3 takes no attention_kwargs"):
        next(cosmos3.stream("a red cat", height=32, width=48, num_chunks=1, attention_kwargs={"scale": 0.5}))
    with pytest.raises(TypeError, match="AutoencoderKLLTXVideo cannot decode a stream.*output_type='latent'"):
        ltx.stream("a red cat", height=64, width=96)
    with pytest.raises(TypeError, match="an image can only be encoded with an AutoencoderKLWan"):
        ltx.stream("a red cat", height=64, width=96, output_type="latent", image=torch.zeros(3, 64, 96))
    with pytest.raises(ValueError, match=r"must be \[1, tokens, 32\], without padding"):
        ltx.stream(prompt_embeds=torch.zeros(1, 4, 48), height=64, width=96, output_type="latent")
    with pytest.raises(ValueError, match=r"must be \[1, tokens, 32\]"):
        wan.stream(prompt_embeds=torch.zeros(1, 4, 48), height=32, width=48)


@pytest.mark.parametrize("name", ["wan", "skyreels", "ltx"])
def test_embeddings_in_the_prompts_place(name, stock_folders):
    pipe = load(stock_folders[name])
    embeds = pipe.encode_prompt("a red cat")
    if name == "ltx":
        assert embeds.shape[1] == len(pipe.tokenizer("a red cat").input_ids)  # no padding, for there is no mask
    torch.testing.assert_close(generate(pipe, name, prompt=None, prompt_embeds=embeds), generate(pipe, name), rtol=0,
                               atol=1e-5)


def test_a_pipeline_without_a_text_encoder_takes_embeddings(stock_folders):
    full = load(stock_folders["wan"])
    bare = load(stock_folders["wan"], tokenizer=None, text_encoder=None)
    assert bare.text_encoder is None
    frames = generate(bare, "wan", prompt=None, prompt_embeds=full.encode_prompt("a red cat"))
    assert torch.equal(frames, generate(full, "wan"))
    with pytest.raises(ValueError, match="loaded without a tokenizer and a text encoder: pass `prompt_embeds`"):
        generate(bare, "wan")


LORA_TARGETS = {
    "wan": ("blocks.1.attn1.to_q", 24, 24),
    "skyreels": ("blocks.1.attn1.to_q", 24, 24),
    "cosmos3": ("layers.1.self_attn.add_q_proj", 48, 64),
    "ltx": ("transformer_blocks.1.attn1.to_q", 40, 40),
}


@pytest.mark.parametrize("name, prefix", [*((name, "transformer.") for name in STOCK), ("ltx", "diffusion_model.")])
def test_loras_load_and_unload(name, prefix, stock_folders):
    """In diffusers' format, and in LTX's own."""
    pipe = load(stock_folders[name])
    before = generate(pipe, name, output_type="latent")
    target, wide, out = LORA_TARGETS[name]
    generator = torch.Generator().manual_seed(0)
    weights = {f"{prefix}{target}.lora_A.weight": torch.randn(4, wide, generator=generator),
               f"{prefix}{target}.lora_B.weight": torch.randn(out, 4, generator=generator)}
    pipe.load_lora_weights(weights)
    assert (generate(pipe, name, output_type="latent") - before).abs().max() > 1e-3
    pipe.unload_lora_weights()
    assert torch.equal(generate(pipe, name, output_type="latent"), before)


def test_adapters_of_one_transformer_share_its_processors(stock_folders):
    pipe = load(stock_folders["cosmos3"])
    first, second = pipe._adapter, pipe._adapter
    assert first is not second and first.holder is second.holder
    assert len(first.holder.processors) == pipe.transformer.config.num_hidden_layers
    assert copy.copy(first).holder.active is None
