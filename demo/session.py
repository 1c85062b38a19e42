"""A session: one open page, its websocket, its picture, its one stream and the mp4 of its last one."""

import asyncio
import json
import secrets
import struct
from pathlib import Path

from starlette.websockets import WebSocket, WebSocketDisconnect

from .engine import Busy, Engine, Job
from .limits import check_prompt, check_settings


class Session:
    """Speaks for one page.

    The page sends JSON: `start` (see `check_settings`, and `picture`: use the uploaded one), `prompt`, `pause`,
    `resume`, `stop`, `shown`, `forget picture`. It is sent JSON with a `type`, and for each frame one binary message:
    job number and frame index, uint32 little endian, then the picture file.
    """

    def __init__(self, socket: WebSocket, engine: Engine, folder: Path):
        self.key = secrets.token_urlsafe(16)
        self.picture = None
        self.videos: dict[str, Path] = {}
        self.job: Job | None = None
        self.closed = False
        self._socket, self._engine, self._folder = socket, engine, folder
        self._outbox: asyncio.Queue = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        """Serves the page until it goes away; then its stream ends and its files are removed."""
        rollout, limits = self._engine.pipe.rollout, self._engine.limits
        sender = asyncio.create_task(self._send_all())
        self._put({"type": "hello", "session": self.key, "fps": rollout.default_fps, "height": rollout.default_height,
                   "width": rollout.default_width, "picture_bytes": limits.picture_bytes})
        try:
            while True:
                self._receive(await self._socket.receive_text())
        except (WebSocketDisconnect, RuntimeError):
            pass  # the page was closed, or the sender found it gone
        finally:
            sender.cancel()
            if self.job is not None:
                self.job.stop("gone")
            self._forget_videos()
            self.closed = True

    def _forget_videos(self) -> None:
        for path in self.videos.values():
            path.unlink(missing_ok=True)
        self.videos = {}

    def _receive(self, text: str) -> None:
        try:
            message = json.loads(text)
            kind = message.get("type") if isinstance(message, dict) else None
            if kind == "start":
                self._start(message)
            elif kind == "forget picture":
                self.picture = None
            elif kind not in ("prompt", "pause", "resume", "stop", "shown"):
                raise ValueError(f"Unknown message {str(kind)!r:.40}.")
            elif self.job is not None and message.get("job") == self.job.number:
                self._steer(kind, message)
        except (ValueError, TypeError, Busy) as error:
            self._put({"type": "error", "message": str(error)})

    def _start(self, message: dict) -> None:
        settings = check_settings(message, self._engine.pipe.rollout, self._engine.limits)
        picture = self.picture if message.get("picture") else None
        if self.job is not None:
            self.job.stop("restarted")
        key = secrets.token_urlsafe(16)
        job = Job(settings, self._folder / f"{key}.mp4", lambda event: self._from_job(job, key, event), picture)
        self._engine.submit(job)  # what it emits is delivered later, by the loop that runs this
        self.job = job
        self._put({"type": "accepted", "job": job.number})

    def _steer(self, kind: str, message: dict) -> None:
        if kind == "shown":
            self.job.shown(message.get("frames") or 0)
        elif kind == "prompt":
            self.job.set_prompt(check_prompt(message.get("prompt"), self._engine.limits))
        else:
            getattr(self.job, kind)()

    # ---------------------------------------------------------------------------------------------- to the page
    def _from_job(self, job: Job, key: str, event) -> None:
        """Called from the engine's threads."""
        if isinstance(event, tuple):
            index, picture = event
            message = struct.pack("<II", job.number, index) + picture
        else:
            message = {"job": job.number, **event}
            if event.get("video"):
                message["video"] = f"bc/video/{key}"
        try:
            self._loop.call_soon_threadsafe(self._deliver, key, job, message)
        except RuntimeError:
            pass  # the server's loop is over

    def _deliver(self, key: str, job: Job, message) -> None:
        if isinstance(message, dict) and message.get("video"):
            if self.closed or job is not self.job:
                job.video.unlink(missing_ok=True)  # the page is gone, or has started a newer one
                del message["video"]
            else:
                self._forget_videos()
                self.videos = {key: job.video}
        if job is self.job:
            self._put(message)

    def _put(self, message) -> None:
        self._outbox.put_nowait(message)

    async def _send_all(self) -> None:
        try:
            while True:
                message = await self._outbox.get()
                if isinstance(message, bytes):
                    await self._socket.send_bytes(message)
                else:
                    await self._socket.send_text(json.dumps(message))
        except (WebSocketDisconnect, RuntimeError):
            if self.job is not None:
                self.job.stop("gone")
