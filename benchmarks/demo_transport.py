"""How evenly frames reach the eye: ways to bring a live video to a browser, measured in headless Chromium.

    python benchmarks/demo_transport.py websocket --chunk-seconds 0.5

A make-believe model makes chunks of 12 frames, 240x416, each with its number drawn into it. The browser looks at what
is on the page at every animation frame and notes when the number changes. `--chunk-seconds 0.5` is a model that keeps
up with 16 frames a second (0.75 s of video a chunk), `1.2` one that does not. fastrtc 0.0.34 needs gradio < 6: give it
an environment of its own.
"""

import argparse
import functools
import io
import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path

import numpy as np
from PIL import Image


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
HEIGHT, WIDTH, FPS, CHUNK, BITS = 240, 416, 16, 12, 12


@functools.cache
def drawn(index):
    """A moving pattern with the index in blocks of black and white along the top."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    frame = np.stack([(x + 4 * index) % 256, (y + 2 * index) % 256, (x + y) % 256], -1).astype(np.uint8)
    for bit in range(BITS):
        frame[:60, bit * 32:(bit + 1) * 32] = 255 * (index >> bit & 1)
    frame[:60, BITS * 32:] = 128
    return frame


def jpeg(frame):
    out = io.BytesIO()
    Image.fromarray(frame).save(out, "JPEG", quality=90, subsampling=0)
    return out.getvalue()


def chunks(seconds, count):
    """Lists of frames, as a model makes them; it leaves the CPU alone meanwhile, as a GPU does."""
    for chunk in range(count):
        time.sleep(seconds)
        yield [drawn(chunk * CHUNK + i) for i in range(CHUNK)]


def paced(args, ready):
    """Frames one by one at the video's rate, from a thread that makes chunks meanwhile, two ahead as the demo does:
    what a transport without a buffer in the browser needs."""
    frames, changed, shown = [], threading.Condition(), 0

    def make():
        for chunk in chunks(args.chunk_seconds, args.chunks):
            with changed:
                frames.extend(chunk)
                changed.notify_all()
                changed.wait_for(lambda: len(frames) - shown <= 2 * CHUNK)

    threading.Thread(target=make, daemon=True).start()
    due = 0.0
    for index in range(args.chunks * CHUNK):
        with changed:
            shown = index
            changed.notify_all()
            changed.wait_for(lambda: len(frames) > index)
        time.sleep(max(0.0, due - time.perf_counter()))
        due = max(due, time.perf_counter() - 1 / FPS) + 1 / FPS
        yield ready(frames[index])


class NoVideo:
    """The other ways write no mp4 either."""

    def __init__(self, path, fps):
        path.touch()

    def write(self, frames):
        pass

    close = abort = lambda self: None


# ------------------------------------------------------------------------------------------------ the ways
def websocket(args):
    """The demo itself, around a make-believe pipeline, without the mp4. As each of the ways, returns
    (url, preparations, what starts it, what to look at, close)."""
    from types import SimpleNamespace

    from bc_diffusers import demo
    from bc_diffusers.demo import engine
    from bc_diffusers.pipelines import RolloutConfig

    class Stream:
        closed, cache, next_index = False, None, 0

        def __init__(self):
            self._chunks = chunks(args.chunk_seconds, args.chunks)

        def __next__(self):
            frames = np.stack(next(self._chunks)).astype(np.float32) / 255
            self.next_index += 1
            return SimpleNamespace(frames=frames, index=self.next_index - 1)

        def close(self):
            self.closed = True

    pipe = SimpleNamespace(rollout=RolloutConfig(default_fps=FPS), vae_scale_factor_temporal=4,
                           set_progress_bar_config=lambda **_: None, stream=lambda *_, **__: Stream())
    engine.VideoWriter = NoVideo
    running = demo.serve(pipe)

    def prepare(page):
        page.wait_for_selector("body[data-demo=ready]")
        page.fill("#bc-prompt textarea", "x")
        page.check("#bc-endless input")

    return running.url, prepare, "#bc-start", "#bc-canvas", running.close


def gradio(args):
    """Gradio's own: an event that yields pictures into an Image."""
    import gradio as gr

    with gr.Blocks(analytics_enabled=False) as page:
        image, button = gr.Image(streaming=True, format="jpeg", elem_id="image"), gr.Button("go", elem_id="go")

        def go():
            yield from paced(args, lambda frame: frame)

        button.click(go, None, image)
    _, url, _ = page.launch(prevent_thread_lock=True, quiet=True, ssr_mode=False)
    return url, lambda page: None, "#go", "#image img", page.close


def mjpeg(args):
    """A route that never ends: multipart/x-mixed-replace."""
    import gradio as gr
    from starlette.responses import HTMLResponse, StreamingResponse
    from starlette.routing import Route

    def stream(request):
        parts = (b"--frame\r\nContent-Type: image/jpeg\r\n\r\n" + data + b"\r\n" for data in paced(args, jpeg))
        return StreamingResponse(parts, media_type="multipart/x-mixed-replace; boundary=frame")

    def show(request):
        return HTMLResponse("<button id=go onclick=\"picture.src = '/mjpeg'\">go</button><br><img id=picture>")

    with gr.Blocks(analytics_enabled=False) as page:
        gr.Markdown("see /show")
    routes = [Route("/mjpeg", stream), Route("/show", show)]
    _, url, _ = page.launch(prevent_thread_lock=True, quiet=True, ssr_mode=False, app_kwargs={"routes": routes})
    return url + "show", lambda page: None, "#go", "#picture", page.close


def fastrtc(args):
    """WebRTC: VP8, its own jitter buffer and rate control."""
    from fastrtc import Stream

    def go():
        yield from paced(args, lambda frame: frame[..., ::-1])

    stream = Stream(handler=go, modality="video", mode="receive", ui_args={"title": "x"})
    _, url, _ = stream.ui.launch(prevent_thread_lock=True, quiet=True)

    return url, lambda page: page.wait_for_timeout(3000), "button:visible >> nth=0", "video", stream.ui.close


# ------------------------------------------------------------------------------------------------ the measurement
LOOK = """([selector, bits]) => {
  window.seen = [];
  const canvas = document.createElement("canvas"), context = canvas.getContext("2d", {willReadFrequently: true});
  canvas.width = 832; canvas.height = 30;
  let last = -1;
  const look = (now) => {
    requestAnimationFrame(look);
    const e = document.querySelector(selector), width = e && (e.videoWidth || e.naturalWidth || e.width);
    if (!width || width < 200) return;
    context.drawImage(e, 0, width / 28, width, width / 14, 0, 0, 832, 30);
    const row = context.getImageData(0, 15, 832, 1).data;
    if (Math.abs(row[4 * 800] - 128) > 40) return;  // no frame of ours
    let index = 0;
    for (let bit = 0; bit < bits; bit++) index |= (row[4 * (bit * 64 + 32)] > 128) << bit;
    if (index !== last) seen.push([last = index, now]);
  };
  requestAnimationFrame(look);
}"""


def measure(args):
    from playwright.sync_api import sync_playwright

    for index in range(args.chunks * CHUNK):
        drawn(index)  # what that costs is no part of the measurement
    url, prepare, button, selector, close = globals()[args.transport](args)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"),
                                             args=[] if os.geteuid() else ["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(url)
        page.evaluate(LOOK, [selector, BITS])
        prepare(page)
        begin = time.perf_counter()
        page.click(button)
        page.wait_for_function("seen.length > 0", timeout=60_000)
        first = time.perf_counter() - begin
        page.wait_for_function(f"seen[seen.length - 1][0] === {args.chunks * CHUNK - 1} || "
                               "performance.now() - seen[seen.length - 1][1] > 5000", timeout=120_000)
        seen = page.evaluate("seen")
        browser.close()
    close()
    index, at = (np.array(column) for column in zip(*seen))
    gaps = np.diff(at)
    return {"transport": args.transport, "chunk_seconds": args.chunk_seconds, "frames": args.chunks * CHUNK,
            "seen": len(set(index.tolist())), "out_of_order": int((np.diff(index) < 0).sum()),
            "gap_ms": {name: round(float(value), 1) for name, value in (
                ("median", np.median(gaps)), ("sd", gaps.std()), ("p95", np.percentile(gaps, 95)),
                ("max", gaps.max()))},
            "within_20_ms": round(float((abs(gaps - 1000 / FPS) < 20).mean()), 3), "first_frame_s": round(first, 2)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("transport", choices=("websocket", "gradio", "mjpeg", "fastrtc"))
    parser.add_argument("--chunk-seconds", type=float, default=0.5, help="how long the model takes for a chunk")
    parser.add_argument("--chunks", type=int, default=16)
    print(json.dumps(measure(parser.parse_args())))
    sys.stdout.flush()
    os._exit(0)  # threads of servers and generators need not be waited for
