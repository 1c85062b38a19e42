"""A converted checkpoint generates what the original code generates from the same noise."""

import pytest
import torch
from self_forcing_oracle import rollout

from bc_diffusers import BlockCausalVideoPipeline
from bc_diffusers.checkpoints import convert_checkpoint
from bc_diffusers.models import parity_adapter


FRAMES = 21  # 7 chunks of 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory, base, wan):
    where = tmp_path_factory.mktemp("match")
    torch.save({"generator": {f"model.{key}": tensor for key, tensor in wan.state_dict().items()}}, where / "a.pt")
    return convert_checkpoint(where / "a.pt", base, where / "out", preset="self-forcing")


@pytest.fixture
def original(wan):
    """The original model, put back into float32 afterwards."""
    weights = {key: tensor.clone() for key, tensor in wan.state_dict().items()}
    yield wan
    wan.float().load_state_dict(weights)


def load(folder, dtype, preset="self-forcing", **fields):
    pipe = BlockCausalVideoPipeline.from_pretrained(folder, preset=preset, dtype=dtype, **fields)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def inputs(dtype, frames=FRAMES, tokens=32):
    """Noise of all frames [1, F, C, h, w], drawn at once, and text tokens of which some are padding."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, frames, 8, 8, 8, generator=generator, dtype=dtype)
    text = torch.randn(1, tokens, 64, generator=generator)
    text[:, 20:] = 0
    return noise, text.to(dtype)


def generate(pipe, noise, text, generator=None, **kwargs):
    """[1, F, C, h, w]"""
    generator = generator or torch.Generator().manual_seed(1)
    frames = pipe(prompt_embeds=text, latents=noise.transpose(1, 2), num_frames=4 * noise.shape[1] - 3, height=64,
                  width=64, generator=generator, output_type="latent", **kwargs).frames
    return frames.transpose(1, 2)


def reference(model, noise, text, **kwargs):
    return rollout(model.to(noise.dtype), noise, text, generator=torch.Generator().manual_seed(1), **kwargs).float()


def distance(a, b):
    return (a.float() - b.float()).abs().max().item()


def test_self_forcing_in_float32(folder, original):
    noise, text = inputs(torch.float32, tokens=512)
    want = reference(original, noise, text)
    assert 0.5 < want.std() < 3  # the bounds below mean something
    pipe = load(folder, torch.float32)
    assert distance(generate(pipe, noise, text), want) <= 1e-4
    assert distance(generate(pipe, noise, text, parity=True), want) <= 1e-5


def test_self_forcing_in_bfloat16(folder, original):
    """diffusers' finer roundings move the video by a few bfloat16 steps. With the original's roundings nothing is
    left but where an attention kernel adds its keys in another order."""
    noise, text = inputs(torch.bfloat16, tokens=512)
    want = reference(original, noise, text)
    pipe = load(folder, torch.bfloat16)
    default = generate(pipe, noise, text)
    assert distance(default, want) <= 0.08
    assert (default - want).abs().mean() <= 0.012
    assert (default == want).float().mean() < 0.2
    parity = generate(pipe, noise, text, parity=True)
    assert distance(parity, want) <= 0.04
    assert (parity == want).float().mean() > 0.99
    assert distance(generate(pipe, noise, text), default) == 0  # parity left nothing behind


def test_the_default_is_the_finer_one(folder, original):
    noise, text = inputs(torch.bfloat16)
    exact = reference(original, noise.float(), text.float())  # the same noise: the fresh one is drawn in float32
    pipe = load(folder, torch.bfloat16)
    errors = {}
    for parity in (False, True):
        kwargs = {"num_frames": 9, "height": 64, "width": 64, "output_type": "latent", "parity": parity}
        got = pipe(prompt_embeds=text, latents=noise[:, :3].float().transpose(1, 2),
                   generator=torch.Generator().manual_seed(1), **kwargs).frames.transpose(1, 2)
        errors[parity] = (got - exact[:, :3]).square().mean().sqrt().item()
    assert errors[False] < errors[True]


@pytest.mark.parametrize("preset, rolled", [
    ("longlive", {"local_frames": 12, "sink_frames": 3}),
    ("causal-forcing-framewise", {"chunk": 1, "local_frames": 21}),
    ("causal-forcing-framewise-2step", {"chunk": 1, "local_frames": 21, "steps": (1000, 500),
                                        "first_steps": (1000, 750, 500, 250)}),
    ("causal-forcing-framewise-1step", {"chunk": 1, "local_frames": 21, "steps": (1000,),
                                        "first_steps": (1000, 750, 500, 250)}),
])
def test_other_families(preset, rolled, folder, original):
    """24 frames: the window of 12 or 21 has slid."""
    noise, text = inputs(torch.float32, frames=24)
    want = reference(original, noise, text, **rolled)
    assert distance(generate(load(folder, torch.float32, preset), noise, text), want) <= 1e-4


def test_causvid(folder, original):
    """It tells the model 757 and 522, but steps with the nearest levels of its scheduler, 0.75676 and 0.52174."""
    noise, text = inputs(torch.float32)
    want = reference(original, noise, text, steps=(1000, 757, 522), warp=False, shift=8.0)
    assert distance(generate(load(folder, torch.float32, "causvid"), noise, text), want) <= 0.01


@pytest.fixture(scope="module")
def eighteen_frames(wan):
    noise, text = inputs(torch.float32, frames=18)
    return noise, text, reference(wan, noise, text)


@pytest.mark.parametrize("field", [{"shift": 8.0}, {"window_frames": 12}, {"sink_frames": 3, "window_frames": 9},
                                   {"clean_block_frames": 1}, {"context_noise": 100.0}])
def test_a_wrong_rollout_is_far_away(field, folder, eighteen_frames):
    noise, text, want = eighteen_frames
    assert distance(generate(load(folder, torch.float32, **field), noise, text), want) > 0.01


def test_context_noise_and_cached_sink(folder, original):
    noise, text = inputs(torch.float32)
    want = reference(original, noise, text, context_noise=100.0, local_frames=9, sink_frames=1)
    pipe = load(folder, torch.float32, context_noise=100.0, sink_frames=1, window_frames=5)
    assert distance(generate(pipe, noise, text), want) <= 1e-4


def test_noise_from_the_global_state_and_from_a_seed(folder, original):
    """As the original's inference.py: everything from torch's global generator, the initial noise first."""
    text = inputs(torch.float32)[1]
    torch.manual_seed(7)
    noise = torch.randn(1, 9, 8, 8, 8)
    want = rollout(original, noise, text)
    pipe = load(folder, torch.float32)
    torch.manual_seed(7)
    noise = torch.randn(1, 9, 8, 8, 8).transpose(1, 2)
    kwargs = {"num_frames": 33, "height": 64, "width": 64, "output_type": "latent"}
    got = pipe(prompt_embeds=text, latents=noise, **kwargs).frames.transpose(1, 2)
    assert distance(got, want) <= 1e-4
    seeded = pipe(prompt_embeds=text, latents=noise, seed=1, **kwargs).frames.transpose(1, 2)
    assert distance(seeded, reference(original, noise.transpose(1, 2), text)) <= 1e-4


def test_guidance_is_two_histories(folder, original):
    noise, text = inputs(torch.float32, frames=18)
    negative = -text
    want = reference(original, noise, text, negative_text=negative, guidance=3.0, local_frames=12, sink_frames=3)
    pipe = load(folder, torch.float32, "longlive")
    got = generate(pipe, noise, text, guidance_scale=3.0, negative_prompt_embeds=negative)
    assert distance(got, want) <= 3e-4
    plain = reference(original, noise, text, local_frames=12, sink_frames=3)
    assert distance(got, plain) > 0.1
    assert distance(generate(pipe, noise, text), plain) <= 1e-4


def test_guidance_off_costs_nothing(folder):
    pipe = load(folder, torch.float32)
    kwargs = {"num_frames": 9, "height": 64, "width": 64, "output_type": "latent", "seed": 0}
    plain = pipe("a red circle", **kwargs).frames
    assert len(pipe._stock._idle) == 1
    assert distance(pipe("a red circle", guidance_scale=1.0, **kwargs).frames, plain) == 0
    assert len(pipe._stock._idle) == 1
    guided = pipe("a red circle", guidance_scale=4.0, negative_prompt="a blue square", **kwargs).frames
    assert distance(guided, plain) > 0.1
    same = pipe("a red circle", guidance_scale=4.0, negative_prompt="a red circle", **kwargs).frames
    assert distance(same, plain) <= 1e-4
    assert len(pipe._stock._idle) == 2  # the second cache stays for the next guided video
    pipe.free_caches()


@pytest.mark.parametrize("kwargs, match", [
    ({"negative_prompt": "x"}, "without guidance"), ({"guidance_scale": 0.5}, "at least 1"),
    ({"guidance_scale": float("nan")}, "at least 1"), ({"guidance_scale": "2"}, "at least 1"),
    ({"guidance_scale": 2.0, "negative_prompt": "x", "negative_prompt_embeds": torch.zeros(1, 4, 64)}, "not both"),
    ({"guidance_scale": 2.0, "negative_prompt_embeds": torch.zeros(1, 4, 65)}, r"must be \[1, tokens, 64\]")])
def test_guidance_that_is_refused(kwargs, match, folder):
    pipe = load(folder, torch.float32)
    with pytest.raises(ValueError, match=match):
        pipe.stream("a red circle", num_frames=9, height=64, width=64, **kwargs)


def test_parity_refuses_a_picture(folder):
    pipe = load(folder, torch.float32)
    with pipe.stream("a red circle", image=torch.zeros(3, 64, 64), num_frames=9, height=64, width=64,
                     parity=True) as chunks, pytest.raises(ValueError, match="cannot start from a picture"):
        next(chunks)


def test_parity_refuses_weights_that_are_elsewhere(folder):
    """Sequential offload keeps them on no device, group offload on the CPU, until a hook that parity does not run."""
    pipe = load(folder, torch.float32)
    adapter = parity_adapter(pipe._adapter)

    def velocity(device):
        adapter.velocity(torch.zeros(1, 8, 3, 8, 8, device=device), torch.tensor([300.0]), {}, rotary=None,
                         clean_frames=0, attention_kwargs=None)

    with pytest.raises(ValueError, match="cannot run under sequential or group offload"):
        velocity("meta")
    pipe.transformer.to("meta")
    with pytest.raises(ValueError, match="cannot run under sequential or group offload"):
        velocity("cpu")


def test_parity_is_for_wan_only(folder):
    class OtherTransformer(torch.nn.Module):
        pass

    adapter = load(folder, torch.float32)._adapter
    adapter.transformer = OtherTransformer()
    with pytest.raises(ValueError, match="not for OtherTransformer"):
        parity_adapter(adapter)
