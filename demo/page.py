"""The page, in Gradio: controls on the left, what they make on the right; and the API endpoint for scripts."""

import asyncio
import base64
import binascii
import secrets

import gradio as gr

from ..pipelines import PRESETS
from .engine import Busy, Job
from .limits import check_settings
from .pictures import decode_picture


HEAD = '<script src="bc/player.js" defer></script>'

EXAMPLES = (
    "a large red circle moves right slowly on a white background",
    "a large blue square moves up slowly on a black background",
    "a large green triangle moves left quickly on a white background",
)

TITLE = """
<header id="bc-title"><h1>bc_diffusers</h1>
<p>Video made chunk by chunk: watch it, and steer it while it runs.</p></header>
"""

PICTURE = """
<div id="bc-picture">
  <label for="bc-file">First frame (optional picture)</label>
  <input type="file" id="bc-file" accept="image/png,image/jpeg,image/webp" aria-describedby="bc-file-note">
  <div class="bc-line"><img id="bc-thumb" alt="The picture that becomes the first frame" hidden>
  <span id="bc-file-note" role="status">PNG, JPEG or WebP</span>
  <button type="button" id="bc-forget" hidden>Remove</button></div>
</div>
"""

STAGE = """
<section id="bc-stage" aria-label="Video">
  <div id="bc-screen"><canvas id="bc-canvas" width="64" height="64" role="img" aria-label="The video"></canvas>
    <div id="bc-overlay" role="status">Press Start</div></div>
  <p id="bc-message" role="alert" hidden></p>
  <div id="bc-words"><p id="bc-caption"></p><p id="bc-change-note" role="status"></p></div>
  <dl id="bc-figures">
    <div><dt>Time to first frame</dt><dd><b id="bc-first">–</b></dd></div>
    <div><dt>Pixel frames a second</dt><dd><b id="bc-rate">–</b> <small id="bc-rate-note"></small></dd></div>
    <div><dt>Chunk latency</dt><dd><b id="bc-latency">–</b></dd></div>
    <div><dt>Frames so far</dt><dd><b id="bc-frames">–</b> <small id="bc-frames-note"></small></dd></div>
  </dl>
</section>
<section id="bc-cache" aria-label="The cache">
  <h2>The cache<span id="bc-cache-text"></span></h2>
  <div id="bc-cells" role="img" aria-label="The cache is empty"></div>
  <div id="bc-foot">
    <ul id="bc-legend" aria-label="Legend">
      <li><i class="bc-fixed"></i>fixed region</li><li><i class="bc-window"></i>window</li>
      <li><i class="bc-staged"></i>staged tokens</li><li><i class="bc-free"></i>free</li>
    </ul>
    <a id="bc-download" download="bc_diffusers.mp4" aria-disabled="true">Download mp4</a>
  </div>
</section>
"""


def page_theme() -> gr.Theme:
    """System fonts only: nothing is fetched."""
    sans, mono = ("ui-sans-serif", "system-ui", "sans-serif"), ("ui-monospace", "monospace")
    return gr.themes.Base(primary_hue="teal", neutral_hue="slate", font=sans, font_mono=mono, radius_size="md",
                          spacing_size="sm", text_size="md")


def build_page(demo) -> gr.Blocks:
    """The Gradio page of a `Demo`. Its buttons speak through the page's own websocket (static/player.js)."""
    rollout, limits = demo.pipe.rollout, demo.limits
    shapes = rollout == PRESETS["embedded"]  # the model in the package knows coloured shapes
    most = (limits.max_frames or 7200) / rollout.default_fps
    with gr.Blocks(title="bc_diffusers", analytics_enabled=False, delete_cache=(600, 3600), fill_width=True) as page:
        with gr.Row(elem_id="bc-main", equal_height=False):
            with gr.Column(elem_id="bc-controls", scale=0, min_width=320):
                gr.HTML(TITLE)
                prompt = gr.Textbox(EXAMPLES[0] if shapes else "", label="Prompt",
                                    lines=2, max_lines=4, elem_id="bc-prompt", placeholder="What the video shows",
                                    max_length=limits.prompt_characters)
                if shapes:
                    with gr.Row(elem_id="bc-examples"):
                        for text in EXAMPLES:
                            example = gr.Button(" ".join(text.split()[2:4]), size="sm", variant="secondary",
                                                min_width=60)
                            example.click(None, None, prompt, js=f"() => {text!r}", api_visibility="private")
                with gr.Row(elem_id="bc-buttons"):
                    start = gr.Button("Start", variant="primary", elem_id="bc-start", min_width=70)
                    change = gr.Button("Change prompt", elem_id="bc-change", min_width=120)
                    pause = gr.Button("Pause", elem_id="bc-pause", min_width=70)
                    stop = gr.Button("Stop", variant="stop", elem_id="bc-stop", min_width=70)
                with gr.Column(elem_id="bc-options", min_width=300):
                    with gr.Row():
                        seconds = gr.Slider(1, max(1, min(60, int(most))), value=min(20, int(most)), step=1,
                                            label="Length (seconds)", elem_id="bc-seconds", min_width=150)
                        endless = gr.Checkbox(False, label="Endless", elem_id="bc-endless", min_width=90)
                    with gr.Row():
                        numbers = {}
                        for name, value, least in (("Seed", 0, 0), ("Width", rollout.default_width, 1),
                                                   ("Height", rollout.default_height, 1)):
                            numbers[name] = gr.Number(value, label=name, precision=0, minimum=least, min_width=80,
                                                      elem_id=f"bc-{name.lower()}")
                    gr.HTML(PICTURE)
            with gr.Column(elem_id="bc-view", scale=1, min_width=320):
                gr.HTML(STAGE)
        wish = [prompt, seconds, endless, *numbers.values()]
        for trigger, values, call in (
                (start.click, wish, "start"), (prompt.submit, wish, "enter"), (change.click, [prompt], "change"),
                (pause.click, None, "pause"), (stop.click, None, "stop")):
            trigger(None, values, None, js=f"(...values) => {{ bcDemo.{call}(...values); return [] }}",
                    api_visibility="private")
        _add_endpoint(demo)
    return page


def _add_endpoint(demo) -> None:
    async def generate(prompt: str, seed: float = 0, seconds: float = 3, width: float = 0, height: float = 0,
                       picture: str = ""):
        """Makes a video and says how far it is.

        Args:
            prompt: what the video shows.
            seed: same seed, same video.
            seconds: its length.
            width, height: pixels; 0: the model's own.
            picture: base64 of a PNG, JPEG or WebP file that becomes the first frame; empty: none.

        Yields:
            (status, video): a dictionary with `state` ("waiting", "running", "finished"), and the mp4 at the end.
        """
        wish = {"prompt": prompt, "seed": seed, "seconds": seconds, "width": width, "height": height}
        try:
            settings = check_settings(wish, demo.pipe.rollout, demo.limits)
            if seconds is None:
                raise ValueError("Say how many seconds the video shall have.")
            image = await asyncio.to_thread(_decode_base64, picture, demo.limits) if picture else None
        except ValueError as error:
            raise gr.Error(str(error), print_exception=False) from None
        events, loop = asyncio.Queue(), asyncio.get_running_loop()
        job = Job(settings, demo.folder / f"{secrets.token_urlsafe(16)}.mp4",
                  lambda event: loop.call_soon_threadsafe(events.put_nowait, event), image, wants_pictures=False)
        try:
            demo.engine.submit(job)
        except Busy as error:
            raise gr.Error(str(error), print_exception=False) from None
        try:
            while True:
                event = await events.get()
                if event["type"] == "waiting":
                    yield {"state": "waiting", "place": event["place"]}, None
                elif event["type"] == "chunk":
                    frames = event["first"] + event["count"]
                    job.shown(frames)
                    yield {"state": "running", "frames": frames, "of": settings.frames, "chunk": event["chunk"]}, None
                elif event["type"] == "end":
                    if event["reason"] not in ("finished", "limit"):
                        raise gr.Error(event["message"] or "The video was stopped.", print_exception=False)
                    yield {"state": "finished", "frames": event["frames"], "seed": settings.seed}, str(job.video)
                    return
        finally:
            job.stop("gone")
            if job.state == "done":
                job.video.unlink(missing_ok=True)  # Gradio has made its own copy

    # Components that are never shown: they only describe the endpoint to Gradio's clients.
    inputs = [gr.Textbox(visible=False, label="prompt"), gr.Number(0, visible=False, label="seed"),
              gr.Number(3, visible=False, label="seconds"), gr.Number(0, visible=False, label="width"),
              gr.Number(0, visible=False, label="height"), gr.Textbox("", visible=False, label="picture")]
    gr.Button(visible=False).click(generate, inputs, [gr.JSON(visible=False), gr.File(visible=False)],
                                   api_name="generate", concurrency_limit=None)


def _decode_base64(text: str, limits):
    if len(text) > limits.picture_bytes * 4 // 3 + 4:
        raise ValueError(f"The picture is larger than the {limits.picture_bytes / 2**20:g} MB this server takes.")
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error:
        raise ValueError("The picture is not base64.") from None
    return decode_picture(data, limits)
