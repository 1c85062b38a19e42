"""The page as a visitor meets it, in a real headless Chromium."""

import io
import re

import imageio.v3 as iio
import numpy as np
from PIL import Image


def test_the_frames_of_the_model_appear_in_order_and_at_their_pace(open_page, frames_of, helpers):
    expected = helpers.hash_frames(frames_of(helpers.red, 3, 33))
    assert len(set(expected)) == 33
    page = open_page(hurry=False)
    helpers.start(page, helpers.red, 3)
    helpers.wait_for_frames(page, 33)
    seen = page.evaluate("seen.slice(0, 33)")
    assert [index for index, _ in seen] == list(range(33))  # none skipped, none twice
    assert [value for _, value in seen] == expected  # to the bit
    at = page.evaluate("bcDemo.page.log.map(shown => shown.at)")
    steps = np.diff(at[:33])
    assert np.median(steps) > 75 and steps.min() > 10  # 12 frames a second are 83 ms each, and no burst after a wait
    assert re.fullmatch(r"\d+\.\d\d s", page.inner_text("#bc-first"))
    assert re.fullmatch(r"\d+ ms|\d+\.\d\d s", page.inner_text("#bc-latency"))
    assert float(page.inner_text("#bc-rate")) > 0 and int(page.inner_text("#bc-frames")) >= 33
    assert not page.problems
    assert all(url.startswith((page.url, page.url.replace("http", "ws", 1), "data:", "blob:"))
               for url in page.addresses), page.addresses


def test_a_new_prompt_takes_effect_where_the_page_says(open_page, demo, frames_of, helpers):
    page = open_page()
    helpers.start(page, helpers.red, 4)
    helpers.wait_for_frames(page, 1)
    page.fill("#bc-prompt textarea", helpers.blue)
    page.click("#bc-change")
    page.wait_for_function("document.getElementById('bc-canvas').dataset.changeAt")
    chunk = int(page.get_attribute("#bc-canvas", "data-change-at"))
    assert helpers.blue in page.inner_text("#bc-change-note")
    assert f"chunk {chunk}" in page.inner_text("#bc-change-note")
    helpers.wait_for_frames(page, 12 * (chunk + 1))
    assert page.inner_text("#bc-caption").endswith(helpers.blue)
    seen = page.evaluate("seen")
    page.click("#bc-stop")
    helpers.wait_until(lambda: not demo.engine.running, "the stream is over")
    expected = helpers.hash_frames(frames_of(helpers.red, 4, len(seen), {chunk: helpers.blue}))
    assert [value for _, value in seen] == expected
    assert expected != helpers.hash_frames(frames_of(helpers.red, 4, len(seen)))


def test_stop_gives_the_cache_back_and_the_mp4_holds_what_was_made(open_page, demo, pipe, helpers):
    page = open_page()
    helpers.start(page, helpers.red, 1)
    helpers.wait_for_frames(page, 3)
    stream = demo.engine.running[0].stream
    cells = page.eval_on_selector_all("#bc-cells i", "cells => cells.map(c => c.dataset.paint)")
    assert any("--bc-window" in paint for paint in cells) and any("--bc-free" in paint for paint in cells)
    page.click("#bc-stop")
    page.wait_for_selector("#bc-download[href]")
    assert stream.closed and stream.cache is None and not demo.engine.running
    assert len(pipe._stock._idle) == 1
    assert page.inner_text("#bc-cache-text") == "given back"
    with page.expect_download() as download:
        page.click("#bc-download")
    made = int(re.search(r"(\d+) frames", page.inner_text("#bc-download")).group(1))
    assert iio.imread(download.value.path(), extension=".mp4").shape == (made, *helpers.size, 3)
    shown = len(page.evaluate("seen"))
    page.wait_for_timeout(300)
    assert len(page.evaluate("seen")) == shown


def test_the_strip_shows_the_window_sliding(open_page, demo, helpers):
    page = open_page()
    page.evaluate("""() => { window.strips = []; new MutationObserver(() => strips.push(
        [...document.querySelectorAll('#bc-cells i')].map(c => c.dataset.paint))).observe(
        document.getElementById('bc-cells'), {subtree: true, attributes: true, childList: true}); }""")
    helpers.start(page, helpers.red, 1)
    helpers.wait_for_frames(page, 1)
    window = demo.engine.running[0].stream.cache.spec.window_tokens
    page.wait_for_function(f"document.getElementById('bc-cells').dataset.committed > {window}")
    strips = page.evaluate("strips")
    assert len({tuple(strip) for strip in strips}) >= 10  # seven chunks: staged, committed, staged, ...
    first = [strip[0].split("--bc-")[1].split(")")[0] for strip in strips if strip]
    steps = [role for i, role in enumerate(first) if i == 0 or role != first[i - 1]]
    assert steps[:4] == ["free", "staged", "window", "free"]  # the window slid past the first cell
    assert f"{window} of {window} window tokens" in page.inner_text("#bc-cache-text")


def test_pause_waits_and_resume_goes_on_with_the_next_frame(open_page, demo, helpers):
    page = open_page()
    helpers.start(page, helpers.red, 2)
    helpers.wait_for_frames(page, 4)
    page.click("#bc-pause")
    assert page.inner_text("#bc-pause") == "Resume"
    page.wait_for_timeout(1000)  # a chunk that was on its way is finished
    shown, made = len(page.evaluate("seen")), demo.engine.running[0].generated
    page.wait_for_timeout(500)
    assert len(page.evaluate("seen")) == shown and demo.engine.running[0].generated == made
    page.click("#bc-pause")
    helpers.wait_for_frames(page, made + 1)
    assert [index for index, _ in page.evaluate("seen")][:made + 1] == list(range(made + 1))
    page.click("#bc-start")  # restart: from frame 0, in a new stream
    page.wait_for_function("seen.length > 3 && seen.some((s, i) => i && s[0] === 0)")
    assert len(demo.engine.running) == 1


def test_two_sessions_do_not_mix_and_a_third_sees_its_place(open_page, demo, frames_of, helpers):
    wishes = [(helpers.red, 5), (helpers.blue, 6)]
    expected = [helpers.hash_frames(frames_of(prompt, seed, 24)) for prompt, seed in wishes]
    pages = [open_page(), open_page()]
    for page, (prompt, seed) in zip(pages, wishes):
        helpers.start(page, prompt, seed)
    for page, values in zip(pages, expected):
        helpers.wait_for_frames(page, 24)
        assert page.evaluate("seen.slice(0, 24)") == [list(pair) for pair in enumerate(values)]
    third = open_page()
    helpers.start(third, helpers.red, 7)
    third.wait_for_function("document.getElementById('bc-overlay').textContent === 'You are next in line'")
    pages[0].close()  # a closed tab ends its stream; the next in line gets its place
    helpers.wait_for_frames(third, 1)
    pages[1].close()
    third.close()
    helpers.wait_until(lambda: not demo.engine.running, "closed tabs have ended their streams")
    helpers.wait_until(lambda: not list(demo.folder.iterdir()), "their files are gone")


def test_a_picture_becomes_the_first_frame(open_page, frames_of, helpers):
    picture = frames_of(helpers.blue, 8, 30)[-1]
    data = io.BytesIO()
    Image.fromarray(picture).save(data, "PNG")
    page = open_page()
    page.set_input_files("#bc-file", {"name": "../../a.png", "mimeType": "image/png", "buffer": data.getvalue()})
    page.wait_for_selector("#bc-thumb:not([hidden])")
    helpers.start(page, helpers.blue, 9)
    helpers.wait_for_frames(page, 1)
    page.click("#bc-pause")
    shown = page.evaluate("""() => { const c = document.getElementById("bc-canvas");
        return [...c.getContext("2d").getImageData(0, 0, c.width, c.height).data]; }""")
    shown = np.array(shown).reshape(*helpers.size, 4)[..., :3]
    assert np.abs(shown - picture.astype(int)).mean() < 12  # it went through the VAE, and moved a frame or two
    page.click("#bc-forget")
    assert page.inner_text("#bc-file-note") == "PNG, JPEG or WebP"


def test_a_large_upload_is_refused_in_words_by_page_and_server(open_page, helpers, tmp_path):
    page = open_page()
    big = tmp_path / "big.png"
    with open(big, "wb") as file:
        file.truncate(50 * 2**20)
    page.set_input_files("#bc-file", big)
    page.wait_for_selector("#bc-picture.bc-bad")
    assert page.inner_text("#bc-file-note") == "The picture has 50.0 MB; this server takes 10 MB."
    answer = page.evaluate("""async () => { const answer = await fetch("bc/picture/" + bcDemo.page.hello.session,
        {method: "POST", body: new Blob([new Uint8Array(50 * 2 ** 20)])});
        return [answer.status, (await answer.json()).error]; }""")
    assert answer == [413, "The picture has 50.0 MB; this server takes 10 MB."]
    helpers.start(page, helpers.red, 1)  # and all is well
    helpers.wait_for_frames(page, 1)


def test_an_error_is_told_in_words_and_the_next_start_works(open_page, demo, helpers):
    page = open_page()
    page.fill("#bc-width input", str(helpers.size[1] + 1))
    helpers.start(page, helpers.red, 1)
    page.wait_for_selector("#bc-message:not([hidden])")
    assert f"the nearest is {helpers.size[1]}" in page.inner_text("#bc-message")
    page.fill("#bc-width input", "5000")
    page.click("#bc-start")
    page.wait_for_function("document.getElementById('bc-message').textContent.includes('this server makes at most')")
    page.fill("#bc-width input", str(helpers.size[1]))
    page.click("#bc-start")
    helpers.wait_for_frames(page, 1)
    assert page.is_hidden("#bc-message") and not page.problems


def test_a_prompt_is_text_and_never_html(open_page, helpers):
    page = open_page()
    prompt = '<img src=x onerror="window.hacked = 1"><b>red</b> circle'
    helpers.start(page, prompt, 1)
    helpers.wait_for_frames(page, 1)
    page.click("#bc-change")
    page.wait_for_function("document.getElementById('bc-canvas').dataset.changeAt")
    assert prompt in page.inner_text("#bc-caption")
    assert page.evaluate("[window.hacked === undefined, document.querySelectorAll('#bc-words *:not(p)').length]") == [
        True, 0]


def test_it_fits_one_screen_and_a_phone_has_labels_and_follows_the_keyboard(open_page, helpers):
    page = open_page()
    helpers.start(page, helpers.red, 1)
    helpers.wait_for_frames(page, 3)
    assert page.evaluate("document.documentElement.scrollHeight") <= 800
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate("document.getElementById('bc-screen').getBoundingClientRect().bottom") < 844
    nameless = page.evaluate("""[...document.querySelectorAll('input, textarea, button, a[href]')].filter(e =>
        e.offsetParent && !(e.labels && e.labels.length) && !e.textContent.trim() && !e.ariaLabel && !e.title).map(
        e => e.outerHTML)""")
    assert nameless == []
    page.click("#bc-stop")
    page.wait_for_function("document.getElementById('bc-stop').disabled")
    page.focus("#bc-prompt textarea")
    reached = []
    for _ in range(14):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("(document.activeElement.closest('[id]') || {}).id"))
    order = [reached.index(name) for name in ("bc-start", "bc-seconds", "bc-seed", "bc-file") if name in reached]
    assert len(order) >= 2 and order == sorted(order), reached
    assert page.evaluate("bcDemo.page.phase") == "ended"
    page.focus("#bc-prompt textarea")
    page.keyboard.press("Enter")
    page.wait_for_function("bcDemo.page.phase === 'running'")


def test_dark_mode_has_its_own_colours(open_page):
    colours = [page.evaluate("['free', 'window', 'text'].map(n => getComputedStyle(document.body).getPropertyValue("
                             "'--bc-' + n))") for page in (open_page(), open_page(dark=True))]
    assert all(light != dark for light, dark in zip(*colours))
