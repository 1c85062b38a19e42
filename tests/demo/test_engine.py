"""Streams in turn, the line, and how streams end; without a browser."""

import threading

import imageio.v3 as iio
import numpy as np
import pytest

from bc_diffusers.demo import Limits
from bc_diffusers.demo.engine import Busy, Engine, Job
from bc_diffusers.demo.limits import StreamSettings


class Viewer:
    """Takes a job's events; shows everything at once unless told to look away."""

    def __init__(self, engine, folder, prompt, seed=0, frames=None, height=None, watches=True, **more):
        self.events, self.pictures, self.watches = [], [], watches
        self.over = threading.Event()
        rollout = engine.pipe.rollout
        settings = StreamSettings(prompt, seed, frames, height or rollout.default_height, rollout.default_width)
        self.job = Job(settings, folder / f"{id(self)}.mp4", self.take, **more)
        engine.submit(self.job)

    def take(self, event):
        if isinstance(event, tuple):
            self.pictures.append(event[0])
            return
        self.events.append(event)
        if event["type"] == "chunk" and self.watches:
            self.job.shown(event["first"] + event["count"])
        if event["type"] == "end":
            self.over.set()

    def end(self):
        assert self.over.wait(60), self.events
        return self.events[-1]

    def of(self, kind):
        return [event for event in self.events if event["type"] == kind]


@pytest.fixture
def make_engine(pipe):
    engines = []

    def make(**limits):
        engines.append(Engine(pipe, Limits(**limits)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
        assert not engine._thread.is_alive()


def test_a_job_ends_with_its_mp4_and_every_picture_in_order(make_engine, tmp_path, frames_of, helpers):
    expected = frames_of(helpers.red, 3, 30)
    viewer = Viewer(make_engine(), tmp_path, helpers.red, 3, 30)
    end = viewer.end()
    assert (end["reason"], end["frames"], end["video"]) == ("finished", 30, True)
    assert viewer.pictures == list(range(30))
    assert [event["chunk"] for event in viewer.of("chunk")] == [0, 1, 2]
    video = iio.imread(viewer.job.video)
    assert video.shape == (30, *helpers.size, 3) and np.abs(video.astype(int) - expected).mean() < 4
    assert viewer.of("cache")[-1]["closed"] and viewer.of("started")


def test_streams_take_turns_the_others_wait_and_see_their_place(make_engine, tmp_path, helpers):
    engine = make_engine(max_streams=2, max_waiting=2)
    viewers = [Viewer(engine, tmp_path, helpers.red, i, watches=False) for i in range(4)]
    helpers.wait_until(lambda: all(v.job.generated for v in viewers[:2]), "two streams run")
    assert [v.job.state for v in viewers] == ["running", "running", "waiting", "waiting"]
    assert viewers[3].of("waiting")[-1]["place"] == 2
    with pytest.raises(Busy, match="All 2 places are taken and 2 others wait"):
        Viewer(engine, tmp_path, helpers.red)
    viewers[2].job.stop()  # leaves the line
    assert viewers[2].end()["video"] is False
    helpers.wait_until(lambda: viewers[3].of("waiting")[-1]["place"] == 1, "the last one moves up")
    viewers[0].job.stop()
    assert viewers[0].end()["reason"] == "stopped"
    helpers.wait_until(lambda: viewers[3].job.generated, "the last one's turn has come")


def test_the_engine_keeps_only_a_little_ahead_of_the_viewer(make_engine, tmp_path, helpers):
    engine = make_engine(idle_seconds=0.5)
    viewer = Viewer(engine, tmp_path, helpers.red, watches=False)
    end = viewer.end()  # nobody watches: it ends by itself
    assert end["reason"] == "idle" and "Nobody watched for 0.5 s" in end["message"]
    assert viewer.job.lead < end["frames"] <= viewer.job.lead + 12 and 12 <= viewer.job.lead <= 48
    paused = Viewer(engine, tmp_path, helpers.red)
    paused.job.pause()
    assert paused.end()["reason"] == "idle"


def test_a_new_prompt_and_the_frame_limit(make_engine, tmp_path, helpers):
    viewer = Viewer(make_engine(max_frames=40), tmp_path, helpers.red, watches=False)
    helpers.wait_until(lambda: viewer.job.generated, "it runs")
    viewer.job.pause()
    viewer.job.set_prompt(helpers.blue)
    helpers.wait_until(lambda: viewer.of("prompt"), "the change is told though no chunk is due")
    chunks = (viewer.job.generated + 3) // 12  # the first has 9 frames
    assert viewer.of("prompt")[0] == {"type": "prompt", "prompt": helpers.blue, "chunk": chunks}
    viewer.watches = True
    viewer.job.resume()
    viewer.job.shown(viewer.job.generated)
    end = viewer.end()
    assert (end["reason"], end["frames"], end["message"]) == (
        "limit", 40, "This server ends a video after 40 frames.")
    assert len(iio.imread(viewer.job.video)) == 40


def test_an_error_ends_one_stream_in_words_and_no_other(make_engine, tmp_path, helpers, caplog, monkeypatch):
    engine = make_engine(max_streams=2)
    good = Viewer(engine, tmp_path, helpers.red)
    assert f"the nearest is {helpers.size[0]}" in Viewer(engine, tmp_path, helpers.red,
                                                         height=helpers.size[0] + 1).end()["message"]
    bad = Viewer(engine, tmp_path, helpers.red, watches=False)
    helpers.wait_until(lambda: bad.job.generated, "it runs")
    monkeypatch.setattr(bad.job.stream, "_generate", lambda index, conditions: 1 / 0)  # a bug
    bad.watches = True
    bad.job.shown(bad.job.generated)
    message = bad.end()["message"]
    assert message == "The generation failed (ZeroDivisionError); the server's log says more. Other streams go on."
    assert "ZeroDivisionError" in caplog.text
    made = good.job.generated
    helpers.wait_until(lambda: good.job.generated > made, "the other goes on")
    good.job.stop()
    assert good.end()["reason"] == "stopped"


def test_stop_gives_a_chunk_up_after_its_pass_and_gone_leaves_no_file(make_engine, tmp_path, helpers, pipe):
    engine = make_engine()
    viewer = Viewer(engine, tmp_path, helpers.red)
    helpers.wait_until(lambda: viewer.job.generated, "it runs")
    viewer.job.stop("gone")
    assert viewer.end()["video"] is False and viewer.job.stream.closed
    assert list(tmp_path.iterdir()) == [] and len(pipe._stock._idle) == 1
    viewer.job.stop()  # idempotent
    viewer.job.set_prompt(helpers.blue)
