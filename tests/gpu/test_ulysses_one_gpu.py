"""The Ulysses path through NCCL inside CUDA graphs, as far as one GPU goes: one rank exchanges with itself."""

import pytest
import torch
import torch.distributed as dist
from small_models import small_wan_pipeline

from bc_diffusers import BlockCausalVideoPipeline
from bc_diffusers.attention.ulysses import UlyssesGroup


GIVEN = {"height": 64, "width": 96, "prompt": "a red circle", "seed": 3, "output_type": "latent", "num_chunks": 8}


@pytest.fixture(scope="module")
def group():
    if dist.is_initialized():
        pytest.skip("a process group is there already")
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    yield UlyssesGroup(dist.group.WORLD, 1, 0)
    dist.destroy_process_group()


def new_pipe():
    pipe = BlockCausalVideoPipeline.from_pipe(small_wan_pipeline(attention_head_dim=64), preset="self-forcing",
                                              window_frames=7, sink_frames=1, max_sequence_length=16)
    pipe.set_progress_bar_config(disable=True)
    return pipe.to("cuda", torch.bfloat16)


def latents(pipe):
    return torch.cat([chunk.latents for chunk in pipe.stream(**GIVEN)], 2)


def runner(pipe):
    (resources,) = pipe._stock._idle.values()
    return resources.graphs


def test_collectives_are_captured_and_replayed(group):
    pipe = new_pipe()
    alone = latents(pipe)
    pipe._adapter.holder.share_sequence(group)
    captured = latents(pipe)
    assert runner(pipe).captures == 4, "two passes, without and then with the exchange: nothing is captured twice"
    assert runner(pipe).replays == 2 * (8 * 4 + 7 - 2)
    assert torch.equal(latents(pipe), captured) and runner(pipe).captures == 4
    pipe.cuda_graphs = False
    assert torch.equal(latents(pipe), captured) and len(runner(pipe)) == 0
    torch.testing.assert_close(captured, alone, atol=0.1, rtol=0.1)  # norm and slot write are not one operator here
    pipe.free_caches()


def test_what_another_rank_could_not_capture_is_not_replayed(group, monkeypatch):
    pipe, asked = new_pipe(), []
    pipe._adapter.holder.share_sequence(group)
    pipe.cuda_graphs = False
    expected = latents(pipe)
    pipe.cuda_graphs = True
    monkeypatch.setattr(UlyssesGroup, "all_agree", lambda self, yes, device: asked.append(yes))  # the other says no
    assert torch.equal(latents(pipe), expected)
    assert asked == [True, True], "each pass was captured once, and dropped"
    assert (len(runner(pipe)), runner(pipe).captures, runner(pipe).replays) == (2, 0, 0)
    pipe.free_caches()


def test_it_compiles_with_the_collectives_inside(group):
    expected, pipe = latents(new_pipe()), new_pipe()
    pipe._adapter.holder.share_sequence(group)
    torch._dynamo.reset()
    pipe.transformer.compile_repeated_blocks(fullgraph=True)
    torch.testing.assert_close(latents(pipe), expected, atol=0.1, rtol=0.1)
    assert runner(pipe).captures == 2 and runner(pipe).replays > 30
    pipe.free_caches()
