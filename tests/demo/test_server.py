"""The server's routes, its manners towards strangers, the API endpoint and the command line."""

import base64
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import imageio.v3 as iio
import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError
from PIL import Image
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from bc_diffusers import cli
from bc_diffusers import demo as web
from bc_diffusers.demo import server


ROOT = Path(__file__).resolve().parents[2]


def ask(url, data=None, method=None):
    try:
        with urlopen(Request(url, data, method=method)) as answer:
            return answer.status, answer.headers, answer.read()
    except HTTPError as error:
        return error.code, error.headers, error.read()


def test_it_listens_on_this_machine_only_and_loads_nothing_from_elsewhere(demo):
    assert demo.url.startswith("http://127.0.0.1:") and demo.share_url is None
    status, headers, page = ask(demo.url)
    assert status == 200
    assert headers["content-security-policy"].startswith("default-src 'self'")
    links = re.findall(rb"""(?:src|href)=["'](https?://[^"']+)""", page)
    assert links == []
    config = json.loads(ask(demo.url + "/config")[2])
    assert config["analytics_enabled"] is False
    assert "fonts.googleapis" not in ask(demo.url + "/theme.css")[2].decode()


@pytest.mark.parametrize("path", ["bc/video/nothing", "bc/video/..%2f..%2fetc%2fpasswd", "bc/nothing",
                                  "bc/../../pyproject.toml", "gradio_api/file=/etc/passwd"])
def test_no_path_of_a_client_is_opened(demo, path):
    status, _, body = ask(f"{demo.url}/{path}")
    assert status in (403, 404) and b"root:" not in body


def test_uploads_go_through_our_own_bounded_route_only(demo):
    assert ask(demo.url + "/gradio_api/upload", b"x" * 1000)[0] == 403
    with connect(demo.url.replace("http", "ws") + "/bc/stream") as socket:
        session = json.loads(socket.recv(timeout=30))["session"]
        place = f"{demo.url}/bc/picture/{session}"
        status, _, body = ask(place, bytes(50 * 2**20))
        assert status == 413 and b"50.0 MB" in body
        status, _, body = ask(place, b"no picture")
        assert status == 422 and b"PNG, JPEG or WebP" in body
        assert ask(demo.url + "/bc/picture/other", b"x")[0] == 404


def test_a_foreign_page_may_not_open_our_websocket(demo):
    with pytest.raises(InvalidStatus, match="403"):
        connect(demo.url.replace("http", "ws") + "/bc/stream", origin="https://example.org")


def test_nonsense_on_the_websocket_is_answered_in_words(demo, helpers):
    with connect(demo.url.replace("http", "ws") + "/bc/stream") as socket:
        assert json.loads(socket.recv(timeout=30))["type"] == "hello"
        for text in ("no json", "[1]", '{"type": "__init__"}', '{"type": "start"}',
                     '{"type": "start", "prompt": "x", "seed": "y"}'):
            socket.send(text)
            answer = json.loads(socket.recv(timeout=30))
            assert answer["type"] == "error" and answer["message"]
        socket.send(json.dumps({"type": "start", "prompt": helpers.red}))
        assert json.loads(socket.recv(timeout=30))["type"] == "accepted"
    helpers.wait_until(lambda: not demo.engine.running and not demo.engine.waiting, "the socket's end ends it")


def example_of_the_docs():
    text = (ROOT / "docs" / "demo.md").read_text()
    return re.search(r"```python\n(.*?gradio_client.*?)```", text, re.S).group(1)


def test_the_documented_script_makes_a_video(demo, tmp_path, frames_of, helpers):
    code = example_of_the_docs().replace("http://127.0.0.1:7860", demo.url)
    assert demo.url in code
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "'state': 'finished'" in done.stdout
    assert iio.imread(tmp_path / "circle.mp4").shape == (36, *helpers.size, 3)
    assert list(demo.folder.iterdir()) == []  # the server keeps nothing


def test_the_endpoint_refuses_in_words_takes_a_picture_and_ends_when_cancelled(demo, helpers, tmp_path):
    client = Client(demo.url, verbose=False, download_files=str(tmp_path))
    with pytest.raises(AppError, match="The prompt is empty"):
        client.predict("", api_name="/generate")
    with pytest.raises(AppError, match="not a picture"):
        client.predict("x", picture=base64.b64encode(b"no").decode(), api_name="/generate")
    picture = io.BytesIO()
    Image.new("RGB", (64, 64), (250, 250, 250)).save(picture, "PNG")
    status, video = client.predict(helpers.red, seconds=0.4, picture=base64.b64encode(picture.getvalue()).decode(),
                                   api_name="/generate")
    assert status == {"state": "finished", "frames": 5, "seed": 0}
    assert iio.imread(video)[0].mean() > 235
    job = client.submit(helpers.red, seconds=45, api_name="/generate")
    helpers.wait_until(lambda: demo.engine.running, "it runs")
    job.cancel()
    client.close()
    helpers.wait_until(lambda: not demo.engine.running, "it has ended")


def test_the_command_serves_until_it_is_told_to_stop(demo, monkeypatch, capsys, helpers):
    pages = []
    monkeypatch.setattr(server.Demo, "wait", lambda self: pages.append((self, ask(self.url)[0])))
    monkeypatch.setattr(sys, "argv", ["bc-diffusers", "serve", "--max-frames", "0", "--max-streams", "3"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    (ours, status), = pages
    assert status == 200 and ours.url != demo.url
    assert (ours.limits.max_frames, ours.limits.max_streams) == (None, 3)
    assert f"The demo is at {ours.url}" in capsys.readouterr().out
    assert not ours.engine._thread.is_alive() and not ours.folder.exists()
    with pytest.raises(OSError):
        urlopen(ours.url)


def test_without_gradio_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(web, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["bc-diffusers", "serve"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1
    assert 'the demo needs gradio: pip install "bc_diffusers[demo]"' in capsys.readouterr().err


def test_help_names_the_options():
    done = subprocess.run([sys.executable, "-m", "bc_diffusers.cli", "serve", "--help"], capture_output=True,
                          text=True, cwd=ROOT, env={"PATH": "", "COLUMNS": "200", "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    for option in ("--model", "--preset", "--host", "--port", "--share", "--max-frames", "--max-pixels",
                   "--max-streams", "--device", "--dtype"):
        assert option in done.stdout
