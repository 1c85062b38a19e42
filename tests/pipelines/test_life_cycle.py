"""What a pipeline holds on to: bars, caches, memory, devices, under failures and from several threads."""

import io
import random
import threading
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_models import small_wan_pipeline
from tqdm import tqdm

from bc_diffusers import BlockCausalVideoPipeline
from bc_diffusers.pipelines import resources
from bc_diffusers.pipelines.decoding import SideDecoder


SIZE = {"height": 32, "width": 48, "output_type": "latent", "seed": 0}


@pytest.fixture
def pipe():
    pipe = BlockCausalVideoPipeline.from_pipe(small_wan_pipeline(), preset="self-forcing", window_frames=6,
                                              max_sequence_length=16)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def idle(pipe):
    return list(pipe._stock._idle.values())


def open_bars():
    return [bar for bar in getattr(tqdm, "_instances", ()) if not bar.disable]


# -------------------------------------------------------------------------------------------------- the progress bar
def test_the_bar_counts_passes_and_names_the_chunk(pipe):
    written = io.StringIO()
    pipe.set_progress_bar_config(file=written, mininterval=0)
    list(pipe.stream("dance", num_chunks=3, **SIZE))
    text = written.getvalue()
    assert "chunk 1/3" in text and "chunk 3/3" in text and "chunk 4/3" not in text
    assert "14/14" in text  # 3 x 4 denoising passes, 2 clean ones
    with pipe.stream("dance", **SIZE) as stream:
        next(stream)
    assert "chunk 1/∞" in written.getvalue()
    assert open_bars() == []


def test_the_bar_can_be_switched_off(pipe, capfd):
    list(pipe.stream("dance", num_chunks=1, **SIZE))
    assert capfd.readouterr() == ("", "")


# -------------------------------------------------------------------------------------------------- failures
BAD = [
    ({"prompt": " "}, ValueError),
    ({"prompt": ["a", "b"]}, ValueError),
    ({"prompt": 3}, TypeError),
    ({"num_frames": 0}, ValueError),
    ({"num_chunks": 1.5}, ValueError),
    ({"height": 0}, ValueError),
    ({"max_sequence_length": 0}, ValueError),
    ({"latents": torch.zeros(1, 16, 3, 4, 6, device="meta")}, ValueError),
    ({"latents": torch.zeros(1, 16, 3, 4, 6, dtype=torch.int64)}, ValueError),
    ({"prompt": None, "prompt_embeds": torch.zeros(1, 16, 31)}, ValueError),
    ({"prompt": None, "prompt_embeds": torch.zeros(2, 16, 32)}, ValueError),
    ({"image": np.full((32, 48, 3), np.nan, np.float32)}, ValueError),
    ({"image": np.full((32, 48, 3), 7.0, np.float32)}, ValueError),
    ({"image": np.zeros((32, 48), np.float32)}, ValueError),
    ({"image": "picture.png"}, TypeError),
]


@pytest.mark.parametrize("arguments,error", BAD, ids=lambda value: str(list(value)) if isinstance(value, dict) else "")
def test_a_request_that_is_refused_changes_nothing(pipe, arguments, error):
    list(pipe.stream("dance", num_chunks=1, **SIZE))
    pipe.set_progress_bar_config(file=io.StringIO())
    before, generator = idle(pipe), torch.Generator().manual_seed(1)
    state = generator.get_state()
    given = {"prompt": "dance", **SIZE, "seed": None, "generator": generator, **arguments}
    with pytest.raises(error) as caught:
        pipe.stream(**given)
    assert str(caught.value)
    assert idle(pipe) == before and not pipe._stock.lent and open_bars() == []
    assert torch.equal(generator.get_state(), state)


@pytest.mark.parametrize("arguments,message", [
    ({"prompt": []}, "empty list"),
    ({"prompt": ["a", " "]}, "empty"),
    ({"prompt": ["a", "b"], "generator": [torch.Generator()]}, "1 generators for 2 prompts"),
    ({"prompt": None}, "either `prompt` or `prompt_embeds`"),
    ({"prompt": "dance", "num_frames": 0}, "at least 1, got 0"),
])
def test_a_call_that_is_refused_has_made_nothing(pipe, monkeypatch, arguments, message):
    monkeypatch.setattr(pipe._stock, "acquire", None)
    with pytest.raises(ValueError, match=message):
        pipe(**{"num_frames": 5, **SIZE, "seed": None, **arguments})


def test_the_length_of_a_call(pipe, monkeypatch):
    noise = torch.randn(1, 16, 4, 4, 6)
    assert pipe("dance", latents=noise, **SIZE).frames.shape[2] == 4
    assert pipe("dance", num_chunks=2, **SIZE).frames.shape[2] == 6
    seen, stream = {}, pipe.stream
    monkeypatch.setattr(pipe, "stream", lambda *a, **k: (seen.update(k), stream(*a, **{**k, "num_frames": 1}))[1])
    pipe("dance", **SIZE)
    assert seen["num_frames"] == 81


class CudaGenerator(torch.Generator):
    device = torch.device("cuda", 0)


def test_a_generator_on_another_device_is_refused_with_both_named(pipe):
    with pytest.raises(ValueError, match="`generator` is on cuda:0, the pipeline runs on cpu"):
        pipe.stream("dance", **{**SIZE, "seed": None}, generator=CudaGenerator())


@pytest.mark.parametrize("part", ["decoder", "cache", "bar"])
def test_a_stream_that_cannot_start_hands_back_what_it_took(pipe, monkeypatch, part):
    def fail(*_, **__):
        raise ArithmeticError(part)

    if part == "decoder":
        monkeypatch.setattr(pipe, "_make_decoder", fail)
    elif part == "cache":
        monkeypatch.setattr(resources.BlockCausalKVCache, "open", fail)
    else:
        monkeypatch.setattr(pipe, "progress_bar", fail)
    with pytest.raises(ArithmeticError, match=part):
        pipe.stream("dance", **{**SIZE, "output_type": "pt"})
    monkeypatch.undo()
    assert not pipe._stock.lent and len(idle(pipe)) == 1 and open_bars() == []
    assert len(list(pipe.stream("dance", num_chunks=2, **SIZE))) == 2


def test_a_geometry_that_does_not_fit_frees_idle_caches_first(pipe, monkeypatch):
    list(pipe.stream("dance", num_chunks=1, **SIZE))
    real, full = resources.BlockCausalKVCache, []

    def limited(**kwargs):
        if idle(pipe):
            full.append(kwargs["pool_tokens"])
            raise torch.OutOfMemoryError("simulated")
        return real(**kwargs)

    limited.pool_tokens_for, limited.pool_bytes_for = real.pool_tokens_for, real.pool_bytes_for
    monkeypatch.setattr(resources, "BlockCausalKVCache", limited)
    assert len(list(pipe.stream("dance", num_chunks=1, **{**SIZE, "width": 64}))) == 1
    assert len(full) == 1 and [r.geometry.width for r in idle(pipe)] == [8]

    def never(**kwargs):
        raise torch.OutOfMemoryError("simulated")

    never.pool_tokens_for, never.pool_bytes_for = real.pool_tokens_for, real.pool_bytes_for
    monkeypatch.setattr(resources, "BlockCausalKVCache", never)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        pipe.stream("dance", **SIZE)
    assert "GiB of keys and values" in caught.value.__notes__[0]
    assert idle(pipe) == [] and not pipe._stock.lent


def test_out_of_memory_in_a_pass_frees_all_idle_caches_and_says_what_is_large(pipe):
    list(pipe.stream("dance", num_chunks=1, **{**SIZE, "width": 64}))

    def callback(p, step, timestep, given):
        raise torch.OutOfMemoryError("simulated")

    stream = pipe.stream("dance", callback_on_step_end=callback, **SIZE)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        next(stream)
    assert "6 window frames of 6 tokens" in caught.value.__notes__[0]
    assert stream.closed and idle(pipe) == [] and not pipe._stock.lent
    assert len(list(pipe.stream("dance", num_chunks=1, **SIZE))) == 1


# -------------------------------------------------------------------------------------------------- devices
def test_caches_left_on_another_device_are_freed_and_others_stay(pipe):
    list(pipe.stream("dance", num_chunks=1, **SIZE))
    mine, freed = idle(pipe)[0], []
    elsewhere = replace(mine.geometry, device=torch.device("meta"))
    pipe._stock._idle[elsewhere] = types.SimpleNamespace(free=lambda: freed.append(1))
    assert pipe.to("cpu") is pipe
    assert freed == [1] and idle(pipe) == [mine]


def test_a_stream_waits_for_its_pipeline_to_come_back(pipe):
    expected = [c.latents for c in pipe.stream("dance", num_chunks=3, **SIZE)]
    with pipe.stream("dance", num_chunks=3, **SIZE) as stream:
        got = [next(stream).latents]
        weights = pipe.transformer.state_dict()
        weights = {name: value.clone() for name, value in weights.items()}
        pipe.to(torch.bfloat16)
        with pytest.raises(RuntimeError, match="moved to cpu .torch.bfloat16.*lives on cpu .torch.float32"):
            next(stream)
        assert not stream.closed and stream.next_index == 1
        pipe.to(torch.float32)
        pipe.transformer.load_state_dict(weights)  # the way there and back has rounded them
        with torch.no_grad():
            stream._conditions = {"prompt_embeds": stream._request.conditions["prompt_embeds"]}
        got += [c.latents for c in stream]
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_a_pipeline_that_was_moved_makes_no_chunk_ahead(pipe, monkeypatch):
    """The chunk made ahead is handed out; the next one waits until the pipeline is back."""
    monkeypatch.setattr(SideDecoder, "runs_beside", True)  # on a CPU nothing is made ahead
    with pipe.stream("dance", num_chunks=5, **{**SIZE, "output_type": "np"}) as stream:
        next(stream), next(stream)
        assert stream.next_index == 3
        pipe.to(torch.bfloat16)
        assert next(stream).index == 2 and stream.next_index == 3
        with pytest.raises(RuntimeError, match="moved to cpu .torch.bfloat16.*lives on cpu .torch.float32"):
            next(stream)
        assert not stream.closed
        pipe.to(torch.float32)
        assert [chunk.index for chunk in stream] == [3, 4]


@pytest.mark.parametrize("how", [{"offload_type": "leaf_level"},
                                 {"offload_type": "block_level", "num_blocks_per_group": 1}])
def test_group_offload_gives_the_same_video(pipe, how):
    given = {**SIZE, "output_type": "pt", "num_chunks": 2}
    expected = [c.frames for c in pipe.stream("dance", **given)]
    cache = idle(pipe)[0].cache
    pipe.enable_group_offload(onload_device=torch.device("cpu"), offload_device=torch.device("cpu"), **how)
    assert idle(pipe)[0].cache is cache
    for _ in range(2):
        assert all(torch.equal(c.frames, e) for c, e in zip(pipe.stream("dance", **given), expected))
    assert idle(pipe)[0].cache is cache


def test_model_offload_keeps_the_cache_and_leaves_the_vae_where_it_is(pipe):
    given = {**SIZE, "output_type": "pt", "num_chunks": 2}
    expected = [c.frames for c in pipe.stream("dance", **given)]
    cache = idle(pipe)[0].cache
    pipe.enable_model_cpu_offload(device="cpu")  # the hooks of a GPU, with the CPU as the device they offload from
    assert hasattr(pipe.transformer, "_hf_hook") and not hasattr(pipe.vae, "_hf_hook")
    for _ in range(2):
        assert all(torch.equal(c.frames, e) for c, e in zip(pipe.stream("dance", **given), expected))
    assert idle(pipe)[0].cache is cache and hasattr(pipe.transformer, "_hf_hook")


def test_models_are_offloaded_when_the_last_stream_ends(pipe, monkeypatch):
    calls = []
    monkeypatch.setattr(pipe, "maybe_free_model_hooks", lambda: calls.append(1))
    a, b = pipe.stream("dance", **SIZE), pipe.stream("monkey", **SIZE)
    next(a), next(b)
    a.close()
    assert calls == []
    next(b)
    b.close()
    assert calls == [1]


# -------------------------------------------------------------------------------------------------- threads
def test_a_close_that_comes_after_the_last_look_still_closes(pipe, monkeypatch):
    stream = pipe.stream("dance", **SIZE)
    looks = []

    def close_meanwhile():
        looks.append(1)
        if len(looks) == 3:  # the last look of this turn: after it nobody asks again
            thread = threading.Thread(target=stream.close)
            thread.start()
            thread.join()
        return False

    monkeypatch.setattr(stream, "_done", close_meanwhile)
    assert next(stream).index == 0
    assert len(looks) == 3 and stream.closed and len(idle(pipe)) == 1


def test_set_prompt_inside_a_callback_is_for_the_next_chunk(pipe):
    answers = []

    def callback(p, step, timestep, given):
        if step == 5:
            answers.append(stream.set_prompt("monkey"))

    stream = pipe.stream("dance", num_chunks=3, callback_on_step_end=callback, **SIZE)
    got = [c.latents for c in stream]
    with pipe.stream("dance", num_chunks=3, **SIZE) as other:
        expected = [next(other).latents, next(other).latents]
        other.set_prompt("monkey")
        expected.append(next(other).latents)
    assert answers == [2] and all(torch.equal(a, b) for a, b in zip(got, expected))


def test_a_prompt_whose_stream_closes_while_it_is_encoded_is_refused(pipe, monkeypatch):
    stream = pipe.stream("dance", **SIZE)
    encode = pipe._encode_conditions

    def slow(*arguments):
        conditions = encode(*arguments)
        stream.close()
        return conditions

    monkeypatch.setattr(pipe, "_encode_conditions", slow)
    with pytest.raises(RuntimeError, match="closed"):
        stream.set_prompt("monkey")


@pytest.mark.parametrize("seed", range(4))
def test_streams_under_a_storm_of_calls_from_other_threads(pipe, seed):
    streams = [pipe.stream(prompt, **SIZE) for prompt in ("dance", "monkey")]
    errors, got = [], [[], []]

    def consume(number):
        try:
            got[number] += [chunk.index for chunk in streams[number]]
        except BaseException as error:
            errors.append(error)

    def meddle(number):
        dice, stream = random.Random(seed * 10 + number), streams[number % 2]
        try:
            for _ in range(25):
                dice.choice([stream.pause, stream.resume, stream.resume, lambda: stream.set_prompt("a b")])()
            stream.resume()
        except RuntimeError as error:
            if "closed" not in str(error):
                errors.append(error)
        except BaseException as error:
            errors.append(error)
        stream.close()

    threads = [threading.Thread(target=consume, args=(n,)) for n in range(2)]
    threads += [threading.Thread(target=meddle, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads) and errors == []
    assert all(s.closed for s in streams) and not pipe._stock.lent and open_bars() == []
    assert all(indices == list(range(len(indices))) for indices in got)
    assert pipe._adapter.holder.active is None
