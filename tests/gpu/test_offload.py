"""Moving and offloading on a real device: the same video, nothing left behind, no model moved more than needed.

In float32, where a hooked module and the operator that stands for it elsewhere agree to 1e-3 over a whole rollout: in
bfloat16 their roundings grow to tenths with these random weights.
"""

import gc

import pytest
import torch
from small_models import small_wan_pipeline

from bc_diffusers import BlockCausalVideoPipeline


DEVICE = torch.device("cuda", 0)
GIVEN = {"num_chunks": 4, "height": 32, "width": 48, "seed": 0, "output_type": "pt"}


def new_pipe(dtype=torch.float32):
    pipe = BlockCausalVideoPipeline.from_pipe(small_wan_pipeline(attention_head_dim=64), preset="self-forcing",
                                              window_frames=6, max_sequence_length=16, dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def video(pipe, **changes):
    return torch.cat([chunk.frames for chunk in pipe.stream("dance", **{**GIVEN, **changes})]).cpu()


def cuda_tensors():
    """Those that Python can reach, the largest first: what is left where nothing should be."""
    tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and t.is_cuda]
    sizes = sorted(((t.untyped_storage().nbytes(), tuple(t.shape), t.dtype) for t in tensors), key=str, reverse=True)
    return sorted(sizes, key=lambda entry: -entry[0])[:40]


@pytest.fixture(scope="module")
def expected():
    return video(new_pipe().to(DEVICE))


def test_model_offload_moves_the_transformer_once_a_video(expected, monkeypatch):
    pipe = new_pipe()
    pipe.enable_model_cpu_offload()
    moved, caches, to = [], [], torch.nn.Module.to

    def spy(module, *arguments, **others):
        moved.append(module)
        return to(module, *arguments, **others)

    monkeypatch.setattr(torch.nn.Module, "to", spy)
    for _ in range(2):
        with pipe.stream("dance", **GIVEN) as stream:
            got = [next(stream).frames.cpu()]
            assert pipe.vae.device == pipe.transformer.device == DEVICE and pipe.text_encoder.device.type == "cpu"
            moved.clear()
            got += [chunk.frames.cpu() for _, chunk in zip(range(2), stream)]
            assert pipe.transformer not in moved and pipe.vae not in moved
            got += [chunk.frames.cpu() for chunk in stream]
        torch.testing.assert_close(torch.cat(got), expected, atol=5e-3, rtol=0)
        assert pipe.transformer.device.type == pipe.text_encoder.device.type == "cpu"
        caches += [resources.cache for resources in pipe._stock._idle.values()]
    assert len(caches) == 2 and caches[0] is caches[1] and caches[0].device == DEVICE


def test_a_prompt_that_changes_under_model_offload(expected):
    pipe = new_pipe()
    pipe.enable_model_cpu_offload()
    with pipe.stream("dance", **GIVEN) as stream:
        next(stream)
        assert stream.set_prompt("monkey") == 1
        rest = [chunk.frames for chunk in stream]
    assert len(rest) == 3 and all(torch.isfinite(frames).all() for frames in rest)


@pytest.mark.parametrize("how", [{"offload_type": "leaf_level"}, {"offload_type": "leaf_level", "use_stream": True},
                                 {"offload_type": "block_level", "num_blocks_per_group": 1}],
                         ids=["leaf", "leaf with a stream", "block"])
def test_group_offload(expected, how):
    pipe = new_pipe()
    pipe.enable_group_offload(onload_device=torch.device("cuda"), offload_device=torch.device("cpu"), **how)
    for _ in range(2):
        torch.testing.assert_close(video(pipe), expected, atol=5e-3, rtol=0)
    assert [g.device for g in pipe._stock._idle] == [DEVICE]


def test_bfloat16_kernels_run_on_weights_that_come_and_go():
    """cuDNN or FlashAttention-4 and the fused operators: the same video but for roundings."""
    expected, pipe = video(new_pipe(torch.bfloat16).to(DEVICE)), new_pipe(torch.bfloat16)
    pipe.enable_group_offload(onload_device=torch.device("cuda"), offload_device=torch.device("cpu"),
                              offload_type="block_level", num_blocks_per_group=1)
    difference = (video(pipe) - expected).abs()
    assert difference.mean() < 0.02 and difference.max() < 0.5


def test_sequential_offload(expected):
    pipe = new_pipe()
    pipe.enable_sequential_cpu_offload()
    torch.testing.assert_close(video(pipe), expected, atol=5e-3, rtol=0)


def test_a_pipeline_that_moves_away_frees_the_device_and_comes_back(expected):
    pipe = new_pipe().to(DEVICE)
    torch.cuda.synchronize()
    torch.testing.assert_close(video(pipe), expected, atol=5e-3, rtol=0)
    gc.collect()
    held = torch.cuda.memory_allocated()
    pool = list(pipe._stock._idle.values())[0].cache._pool.nbytes
    weights = sum(p.nbytes for p in pipe.transformer.parameters())
    pipe.to("cpu")
    gc.collect()
    assert not pipe._stock._idle and torch.cuda.memory_allocated() <= held - pool - weights, cuda_tensors()
    pipe.to("cuda")
    torch.testing.assert_close(video(pipe), expected, atol=5e-3, rtol=0)


def test_a_stream_goes_on_once_its_pipeline_is_back(expected):
    pipe = new_pipe().to(DEVICE)
    with pipe.stream("dance", **GIVEN) as stream:
        got = [next(stream).frames.cpu()]
        pipe.to("cpu")
        with pytest.raises(RuntimeError, match="moved to cpu .*lives on cuda:0"):
            next(stream)
        pipe.to(DEVICE)
        got += [chunk.frames.cpu() for chunk in stream]
    torch.testing.assert_close(torch.cat(got), expected, atol=5e-3, rtol=0)


def test_tensors_and_generators_of_the_wrong_device(expected):
    pipe = new_pipe().to(DEVICE)
    noise = torch.zeros(1, 16, 3, 4, 6)
    with pytest.raises(ValueError, match="`latents` are on cpu, the pipeline runs on cuda:0"):
        pipe.stream("dance", latents=noise, height=32, width=48)
    assert video(pipe, latents=noise.to(DEVICE), num_chunks=1).shape[0] == 9
    one, other = (video(pipe, seed=None, generator=torch.Generator(kind).manual_seed(0)) for kind in ("cpu", "cuda"))
    assert one.shape == other.shape == expected.shape
    pipe.to("cpu", torch.float32)
    with pytest.raises(ValueError, match="`generator` is on cuda.*, the pipeline runs on cpu"):
        pipe.stream("dance", generator=torch.Generator("cuda"), height=32, width=48)


def test_memory_is_flat_over_fifty_streams():
    pipe = new_pipe().to(DEVICE)
    video(pipe, num_chunks=1)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        video(pipe, num_chunks=1)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before
