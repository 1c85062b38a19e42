import random

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from diffusers import AutoencoderKLWan

from bc_diffusers.pipelines.streaming_decoder import StreamingDecoder, WanStreamingDecoder


FRAMES, HEIGHT, WIDTH = 7, 4, 6
KINDS = {
    "wan2.1": {"dim_mult": [1, 1, 1, 1], "temperal_downsample": [False, True, True]},
    "wan2.2": {
        "dim_mult": [1, 1, 1, 1],
        "temperal_downsample": [False, True, True],
        "decoder_base_dim": 4,
        "is_residual": True,
        "patch_size": 2,
        "in_channels": 12,
        "out_channels": 12,
        "scale_factor_spatial": 16,
    },
    "patched, not residual": {
        "dim_mult": [1, 2, 2],
        "temperal_downsample": [True, True],
        "patch_size": 2,
        "in_channels": 12,
        "out_channels": 12,
    },
}


@pytest.fixture(scope="module", params=KINDS)
def vae(request):
    torch.manual_seed(0)
    return AutoencoderKLWan(base_dim=3, z_dim=16, num_res_blocks=1, **KINDS[request.param]).eval()


@pytest.fixture(scope="module")
def latents():
    return torch.randn(1, 16, FRAMES, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(1))


def full_decode(vae, latents):
    """The last lines of diffusers' WanPipeline."""
    latents = latents.to(vae.dtype)
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1).to(latents.dtype)
    inverse_std = 1.0 / torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1).to(latents.dtype)
    with torch.no_grad():
        return vae.decode(latents / inverse_std + mean).sample


def cuts(seed):
    """A random cut of FRAMES latent frames into chunks, by its chunk lengths."""
    draw, lengths = random.Random(seed), []
    while sum(lengths) < FRAMES:
        lengths.append(draw.randint(1, FRAMES - sum(lengths)))
    return lengths


def stream(decoder, latents, lengths):
    return [decoder(chunk) for chunk in latents.split(lengths, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[FRAMES], [1] * FRAMES, [3, 3, 1], *(cuts(seed) for seed in range(4))], ids=str)
def test_any_chunking_gives_the_bits_of_one_full_decode(vae, latents, lengths, dtype):
    vae = vae.to(dtype)
    try:
        chunks = stream(WanStreamingDecoder(vae), latents, lengths)
        expected = full_decode(vae, latents)
    finally:
        vae.to(torch.float32)
    assert expected.std() > 0.01  # not a constant picture
    assert chunks[0].dtype == dtype
    assert torch.equal(torch.cat(chunks, 2), expected)


def test_chunkings_agree_even_where_the_library_treats_few_pixels_differently(vae, latents):
    tiny = latents[:, :, :, :2, :2]
    whole, single = (torch.cat(stream(WanStreamingDecoder(vae), tiny, cut), 2) for cut in ([FRAMES], [1] * FRAMES))
    assert torch.equal(whole, single)
    torch.testing.assert_close(whole, full_decode(vae, tiny), atol=1e-4, rtol=0)


def test_frame_counts_and_sizes_are_what_the_attributes_say(vae, latents):
    decoder = WanStreamingDecoder(vae)
    assert isinstance(decoder, StreamingDecoder)
    chunks = stream(decoder, latents, [2, 1, 4])
    per_latent = decoder.scale_factor_temporal
    assert [chunk.shape[2] for chunk in chunks] == [1 + per_latent, per_latent, 4 * per_latent]
    scale = decoder.scale_factor_spatial
    for chunk in chunks:
        assert (*chunk.shape[:2], *chunk.shape[3:]) == (1, 3, HEIGHT * scale, WIDTH * scale)
        assert chunk.abs().max() <= 1


def test_the_vae_may_be_used_between_two_chunks(vae, latents):
    expected = full_decode(vae, latents)
    other = latents.flip(2)
    decoder, second, chunks, second_chunks = WanStreamingDecoder(vae), WanStreamingDecoder(vae), [], []
    for chunk, second_chunk in zip(latents.split(2, 2), other.split(2, 2)):
        chunks.append(decoder(chunk))
        full_decode(vae, other[:, :, :2])
        with torch.no_grad():
            vae.encode(torch.zeros(1, 3, 5, 32, 32))
        second_chunks.append(second(second_chunk))
    assert torch.equal(torch.cat(chunks, 2), expected)
    assert torch.equal(torch.cat(second_chunks, 2), full_decode(vae, other))


def test_reset_starts_another_video_of_another_size(vae, latents):
    decoder = WanStreamingDecoder(vae)
    stream(decoder, latents, [2, 5])
    decoder.reset()
    smaller = latents[:, :, :3, :4, :3]
    assert torch.equal(torch.cat(stream(decoder, smaller, [1, 2]), 2), full_decode(vae, smaller))


def test_a_chunk_that_fails_can_be_tried_again(vae, latents, monkeypatch):
    expected = full_decode(vae, latents)
    decoder = WanStreamingDecoder(vae)
    chunks = [decoder(latents[:, :, :3])]
    forward, calls = vae.decoder.forward, []

    def fail_at_the_second_frame(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory left")
        return forward(*args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(vae.decoder, "forward", fail_at_the_second_frame)
        decoder(latents[:, :, 3:])
    chunks.append(decoder(latents[:, :, 3:]))
    assert torch.equal(torch.cat(chunks, 2), expected)


def test_wrong_latents_are_refused_and_change_nothing(vae, latents):
    expected = full_decode(vae, latents)
    decoder = WanStreamingDecoder(vae)
    chunks = [decoder(latents[:, :, :2])]
    for wrong, message in [
        (latents[:, :8], r"\[1, 16, f, h, w\].*\[1, 8, 7, 4, 6\]"),
        (latents[0], r"not \[16, 7, 4, 6\]"),
        (latents[:, :, :0], r"f >= 1"),
        (latents[..., :4], r"\[1, 16, 7, 4, 4\] does not continue .*\[1, 16, 4, 6\].*reset"),
    ]:
        with pytest.raises(ValueError, match=message):
            decoder(wrong)
    chunks.append(decoder(latents[:, :, 2:]))
    assert torch.equal(torch.cat(chunks, 2), expected)


def test_the_constants_are_made_once_for_a_device_and_dtype(vae, latents, monkeypatch):
    decoder = WanStreamingDecoder(vae)
    decoder(latents[:, :, :1])

    def refuse(*args, **kwargs):
        raise AssertionError("a tensor was made from host numbers in a later chunk")

    monkeypatch.setattr(torch, "tensor", refuse)
    decoder(latents[:, :, 1:3])
    decoder.reset()
    decoder(latents[:, :, :1])


def test_the_offload_hook_of_the_vae_is_called(latents):
    class Recorder(ModelHook):
        calls = 0

        def pre_forward(self, module, *args, **kwargs):
            Recorder.calls += 1
            return args, kwargs

    torch.manual_seed(0)
    vae = AutoencoderKLWan(base_dim=3, z_dim=16, num_res_blocks=1, **KINDS["wan2.1"]).eval()
    add_hook_to_module(vae, Recorder())
    stream(WanStreamingDecoder(vae), latents, [1, 2, 4])
    assert Recorder.calls == 3


def test_nothing_is_kept_for_a_backward_pass(vae, latents):
    with torch.enable_grad():
        video = WanStreamingDecoder(vae)(latents[:, :, :2].requires_grad_())
    assert not video.requires_grad
    latents.requires_grad_(False)
