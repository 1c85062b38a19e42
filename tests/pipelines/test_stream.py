"""The life of a stream: prompts, pauses, closing, and what comes back to the pipeline."""

import gc
import threading
import weakref

import pytest
import torch
from small_models import small_wan_pipeline

from bc_diffusers import BlockCausalVideoPipeline


SIZE = {"height": 32, "width": 48, "output_type": "latent", "seed": 0}


@pytest.fixture
def pipe():
    pipe = BlockCausalVideoPipeline.from_pipe(small_wan_pipeline(), preset="self-forcing", window_frames=6,
                                              sink_frames=1, max_sequence_length=16)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def idle(pipe):
    return list(pipe._stock._idle.values())


def test_an_endless_stream_slides_its_window_and_reuses_its_cache(pipe):
    stream = pipe.stream("dance", **SIZE)
    addresses = {name: tensor.data_ptr() for name, tensor in stream.cache.device_tensors()}
    table = len(stream.cache.page_table())
    for chunk, _ in zip(stream, range(12)):
        assert torch.isfinite(chunk.latents).all()
    frame = stream._request.geometry.tokens_per_frame
    assert stream.cache.committed == 13 * 3 * frame or stream.cache.committed == 12 * 3 * frame
    assert stream.cache.window_start == stream.cache.committed - 6 * frame
    assert {name: t.data_ptr() for name, t in stream.cache.device_tensors()} == addresses
    assert len(stream.cache.page_table()) == table
    cache = stream.cache
    stream.close()
    assert idle(pipe)[0].cache is cache
    again = pipe.stream("dance", **SIZE)
    assert again.cache is cache
    assert {name: t.data_ptr() for name, t in cache.device_tensors()} == addresses


def test_two_streams_alive_at_once_do_not_mix(pipe):
    alone = [c.latents for c in pipe.stream("dance", num_chunks=4, **SIZE)]
    other = [c.latents for c in pipe.stream("monkey", num_chunks=4, **SIZE)]
    a, b = pipe.stream("dance", num_chunks=4, **SIZE), pipe.stream("monkey", num_chunks=4, **SIZE)
    assert a.cache is not b.cache
    together = [(x.latents, y.latents) for x, y in zip(a, b)]
    for i, (x, y) in enumerate(together):
        assert torch.equal(x, alone[i]) and torch.equal(y, other[i])


def test_streams_in_several_threads_take_turns(pipe):
    alone = {p: [c.latents for c in pipe.stream(p, num_chunks=3, **SIZE)] for p in ("dance", "monkey")}
    got = {}

    def run(prompt):
        got[prompt] = [c.latents for c in pipe.stream(prompt, num_chunks=3, **SIZE)]

    threads = [threading.Thread(target=run, args=(prompt,)) for prompt in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for prompt, latents in alone.items():
        assert all(torch.equal(a, b) for a, b in zip(got[prompt], latents, strict=True))


def test_set_prompt_takes_effect_at_the_first_chunk_not_yet_started(pipe):
    plain = [c.latents for c in pipe.stream("dance", num_chunks=4, **SIZE)]
    with pipe.stream("dance", num_chunks=4, **SIZE) as stream:
        got = [next(stream).latents, next(stream).latents]
        assert stream.set_prompt("monkey", transition="cross") == 2
        got += [c.latents for c in stream]
    assert torch.equal(got[0], plain[0]) and torch.equal(got[1], plain[1])
    assert not torch.equal(got[2], plain[2])
    with pytest.raises(RuntimeError, match="closed"):
        stream.set_prompt("dance")
    with pipe.stream("dance", **SIZE) as stream:
        with pytest.raises(ValueError, match="'fade' is unknown"):
            stream.set_prompt("monkey", transition="fade")
        with pytest.raises(ValueError, match="empty"):
            stream.set_prompt(" ")


def test_pause_resume_and_close_from_another_thread(pipe):
    stream = pipe.stream("dance", **SIZE)
    next(stream)
    stream.pause()
    got, done = [], threading.Event()

    def consume():
        for chunk in stream:
            got.append(chunk.index)
            if len(got) == 2:
                stream.pause()
        done.set()

    thread = threading.Thread(target=consume)
    thread.start()
    assert not done.wait(0.2) and got == []
    stream.resume()
    for _ in range(200):
        if len(got) == 2:
            break
        done.wait(0.05)
    assert got == [1, 2]
    stream.close()
    thread.join(20)
    assert done.is_set() and stream.closed and len(idle(pipe)) == 1
    stream.close()  # idempotent
    assert list(stream) == []


def test_a_consumer_that_raises_or_walks_away_gives_the_cache_back(pipe):
    with pytest.raises(KeyError):
        with pipe.stream("dance", **SIZE) as stream:
            for _ in stream:
                raise KeyError
    assert stream.closed and len(idle(pipe)) == 1
    for _ in pipe.stream("dance", **SIZE):
        break
    gc.collect()
    assert len(idle(pipe)) == 1


def test_a_failing_pass_closes_the_stream_and_leaves_the_transformer_stock(pipe):
    def callback(p, step, timestep, given):
        raise ArithmeticError("from the callback")

    stream = pipe.stream("dance", callback_on_step_end=callback, **SIZE)
    with pytest.raises(ArithmeticError):
        next(stream)
    assert stream.closed and pipe._adapter.holder.active is None and len(idle(pipe)) == 1


def test_another_size_has_its_own_cache_and_free_caches_frees_them_all(pipe):
    list(pipe.stream("dance", num_chunks=1, **SIZE))
    list(pipe.stream("dance", num_chunks=1, **{**SIZE, "width": 64}))
    assert len(idle(pipe)) == 2
    pools = [weakref.ref(r.cache._pool) for r in idle(pipe)]
    pipe.free_caches()
    gc.collect()
    assert idle(pipe) == [] and all(pool() is None for pool in pools)


def test_fifty_streams_leak_nothing(pipe):
    def tensors():
        gc.collect()
        return sum(torch.is_tensor(o) for o in gc.get_objects())

    list(pipe.stream("dance", num_chunks=2, **SIZE))
    before = tensors()
    for _ in range(50):
        list(pipe.stream("dance", num_chunks=1, **SIZE))
    assert tensors() <= before
