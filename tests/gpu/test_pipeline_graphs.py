"""Streams on a GPU: captured forwards give what eager ones give, and are dropped when the model changes."""

import pytest
import torch
from small_models import small_wan_pipeline

from bc_diffusers import BlockCausalVideoPipeline
from bc_diffusers.pipelines.stream import VideoStream


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


def test_the_next_chunk_is_begun_before_this_one_is_handed_out(pipe):
    """Behind chunk 0, and for frames on the host; the frames are those of a stream that does not look ahead."""
    options = GEOMETRY | {"num_chunks": 5}
    expected = [chunk.frames for chunk in pipe.stream(**options | {"output_type": "pt"})]
    with pipe.stream(**options | {"output_type": "np"}) as stream:
        begun, frames = [], []
        for chunk in stream:
            begun.append(stream.next_index)
            frames.append(chunk.frames)
            assert set(chunk.timings) == {"denoise", "decode", "total"} | ({"clean"} if chunk.index < 4 else set())
            assert 0 < chunk.timings["decode"] <= chunk.timings["total"]
    assert begun == [1, 3, 4, 5, 5]
    for mine, theirs in zip(frames, expected, strict=True):
        assert (mine == theirs.permute(0, 2, 3, 1).float().cpu().numpy()).all()


def test_closing_with_a_chunk_on_its_way_gives_everything_back(pipe):
    options = GEOMETRY | {"num_chunks": None, "output_type": "np"}
    stream = pipe.stream(**options)
    first = [next(stream).frames for _ in range(3)]
    assert stream.set_prompt("a blue square") == 4
    stream.close()
    with pytest.raises(StopIteration):
        next(stream)
    assert len(pipe._stock._idle) == 1 and not pipe._stock.lent
    with pipe.stream(**options) as again:
        for frames in first:
            assert (next(again).frames == frames).all()


def test_an_error_of_the_next_chunk_comes_behind_this_one(pipe, monkeypatch):
    generate = VideoStream._generate

    def failing(stream, index, conditions):
        if index == 3:
            raise ValueError("chunk 3 fails")
        return generate(stream, index, conditions)

    monkeypatch.setattr(VideoStream, "_generate", failing)
    stream, seen = pipe.stream(**GEOMETRY | {"num_chunks": 6, "output_type": "np"}), []
    with pytest.raises(ValueError, match="chunk 3 fails"):
        for chunk in stream:
            seen.append(chunk.index)
    assert seen == [0, 1, 2] and stream.closed and not pipe._stock.lent
