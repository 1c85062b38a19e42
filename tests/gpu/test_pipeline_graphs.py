"""Streams on a GPU: captured forwards give what eager ones give, and are dropped when the model changes."""

import pytest
import torch
from small_models import small_wan_pipeline

from bc_diffusers import BlockCausalVideoPipeline


GEOMETRY = {"height": 64, "width": 96, "prompt": "a red circle", "seed": 3, "output_type": "latent"}


@pytest.fixture
def pipe():
    stock = small_wan_pipeline(attention_head_dim=64, num_layers=2)
    pipe = BlockCausalVideoPipeline.from_pipe(stock, preset="self-forcing", chunk_frames=3, window_frames=7,
                                              sink_frames=1, max_sequence_length=16)
    pipe.set_progress_bar_config(disable=True)
    return pipe.to("cuda", torch.bfloat16)


def runner(pipe):
    (resources,) = pipe._stock._idle.values()
    return resources.graphs


def latents(pipe, num_chunks=8, **options):
    return torch.cat([chunk.latents for chunk in pipe.stream(num_chunks=num_chunks, **GEOMETRY, **options)], 2)


def test_captured_and_eager_streams_are_equal_to_the_bit(pipe):
    captured = latents(pipe)
    passes = len(pipe.rollout.denoising_sigmas)
    assert runner(pipe).captures == 2
    assert runner(pipe).replays == 8 * passes + 7 - 2
    assert torch.equal(latents(pipe), captured)
    assert runner(pipe).captures == 2, "a second stream captures nothing"
    pipe.cuda_graphs = False
    assert torch.equal(latents(pipe), captured)
    assert len(runner(pipe)) == 0


def test_a_short_last_chunk_is_not_captured(pipe):
    frames = 4 * (3 * 3 + 2 - 1) + 1  # three chunks and two latent frames
    video = pipe(num_frames=frames, **GEOMETRY).frames
    assert video.shape[2] == 11 and runner(pipe).captures == 2


def test_graphs_go_when_the_model_changes(pipe):
    before = latents(pipe, 3)
    pipe.transformer.fuse_qkv_projections()
    after = latents(pipe, 3)
    assert runner(pipe).captures == 4
    torch.testing.assert_close(after, before, atol=0.1, rtol=0.1)
    with torch.no_grad():
        pipe.transformer.proj_out.weight.mul_(0.5)  # in place: the graphs read it
    halved = latents(pipe, 3)
    assert runner(pipe).captures == 4 and not torch.equal(halved, after)
    pipe.cuda_graphs = False
    assert torch.equal(latents(pipe, 3), halved)


def test_no_graphs_with_cpu_offload(pipe):
    expected = latents(pipe, 3)
    pipe.to("cpu")
    pipe.free_caches()
    pipe.enable_model_cpu_offload()
    assert torch.equal(latents(pipe, 3), expected)
    assert runner(pipe).captures == 0


@pytest.mark.parametrize("output_type", ["np", "pt"])
def test_frames_are_those_of_a_stream_without_graphs(pipe, output_type):
    options = GEOMETRY | {"output_type": output_type, "num_frames": 41}
    captured = pipe(**options).frames
    pipe.cuda_graphs = False
    eager = pipe(**options).frames
    assert (captured == eager).all()
