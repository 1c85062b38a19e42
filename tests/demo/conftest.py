"""One pipeline, one server and one headless Chromium for all tests of the demo."""

import os
import shutil
import time

import numpy as np
import pytest
import torch

from bc_diffusers import BlockCausalVideoPipeline, embedded_model


pytest.importorskip("gradio")

from bc_diffusers import demo as web  # noqa: E402


PATIENCE = 60  # seconds: the machine may be busy with other things
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
RED = "a large red circle moves right slowly on a white background"
BLUE = "a large blue square moves left slowly on a black background"


def wait_until(condition, what, seconds=PATIENCE):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s in vain until {what}"
        time.sleep(0.02)


@pytest.fixture(scope="session")
def pipe():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pipe = BlockCausalVideoPipeline.from_pretrained(embedded_model(), dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    yield pipe
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def limits():
    return web.Limits(max_frames=600, max_pixels=128 * 128)


@pytest.fixture(scope="session")
def running(pipe, limits):
    """The server; tests use `demo`, which finds it idle."""
    with web.serve(pipe, limits) as demo:
        yield demo


@pytest.fixture
def demo(running):
    yield running
    engine = running.engine
    for job in [*engine.running, *engine.waiting]:
        job.stop()
    wait_until(lambda: not engine.running and not engine.waiting, "all streams are over")


@pytest.fixture(scope="session")
def frames_of(pipe):
    """frames_of(prompt, seed, frames, changes={chunk: prompt}): what the library itself makes, uint8 [F, H, W, 3].
    Only while nothing else generates."""

    def make(prompt, seed, frames, changes=None):
        made = []
        with pipe.stream(prompt, seed=seed) as stream:
            while sum(map(len, made)) < frames:
                if changes and stream.next_index in changes:
                    stream.set_prompt(changes[stream.next_index])
                made.append(next(stream).frames)
        return (np.concatenate(made)[:frames] * 255).round().astype("uint8")

    return make


@pytest.fixture(scope="session")
def browser(request):
    reason = None
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        reason = "playwright is not installed"
    if CHROMIUM is None:
        reason = "there is no chromium (Debian: apt-get install chromium)"
    if reason:
        capture = request.config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            print(f"\nThe demo's browser tests are skipped: {reason}")
        pytest.skip(reason)
    with sync_playwright() as playwright:
        sandbox = [] if os.geteuid() else ["--no-sandbox"]  # Chromium's sandbox does not run as root
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=sandbox)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, demo):
    """open_page(dark=, hurry=): a page of the demo in a context of its own, ready to be used. It plays at four times
    the video's rate unless `hurry` is False."""
    contexts = []

    def make(dark=False, hurry=True):
        context = browser.new_context(viewport={"width": 1280, "height": 800},
                                      color_scheme="dark" if dark else "light", accept_downloads=True)
        contexts.append(context)
        context.set_default_timeout(PATIENCE * 1000)
        page = context.new_page()
        page.problems, page.addresses = [], []
        page.on("pageerror", lambda error: page.problems.append(str(error)))
        page.on("request", lambda request: page.addresses.append(request.url))
        page.goto(demo.url)
        page.wait_for_selector("body[data-demo=ready]")
        page.wait_for_function("bcDemo.page.hello !== null")
        page.evaluate(WATCH)
        if hurry:
            page.evaluate("bcDemo.page.hello.fps = 48")
        return page

    yield make
    for context in contexts:
        context.close()


# Reads every frame back from the canvas at the moment it is shown.
WATCH = """() => {
  window.seen = [];
  const show = bcDemo.player.onShow;
  bcDemo.player.onShow = (index, now) => {
    const canvas = document.getElementById("bc-canvas");
    const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    let hash = 0;
    for (let i = 0; i < data.length; i++) if (i % 4 < 3) hash = (hash * 31 + data[i]) >>> 0;
    seen.push([index, hash]);
    show(index, now);
  };
}"""


def hash_frames(frames):
    """WATCH's hash of uint8 frames [F, H, W, 3]."""
    weights = np.ones(frames[0].size, dtype=np.uint32)
    for i in range(len(weights) - 2, -1, -1):
        weights[i] = (int(weights[i + 1]) * 31) & 0xFFFFFFFF
    return [int((f.reshape(-1).astype(np.uint32) * weights).sum(dtype=np.uint32)) for f in frames]


@pytest.fixture(scope="session")
def helpers(pipe):
    class Helpers:
        size = pipe.rollout.default_height, pipe.rollout.default_width
        wait_until, hash_frames, red, blue = staticmethod(wait_until), staticmethod(hash_frames), RED, BLUE

        @staticmethod
        def start(page, prompt, seed, endless=True):
            page.fill("#bc-prompt textarea", prompt)
            page.fill("#bc-seed input", str(seed))
            page.set_checked("#bc-endless input", endless)
            page.click("#bc-start")

        @staticmethod
        def wait_for_frames(page, count):
            page.wait_for_function(f"seen.length >= {count}")

    return Helpers
