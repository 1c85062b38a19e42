"""The engine: one thread that generates the chunks of all streams in turn, and the line of those who wait."""

import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from ..video_io import VideoWriter
from .cells import cache_cells
from .limits import Limits, StreamSettings
from .pictures import encode_frame, fit_picture, to_bytes


log = logging.getLogger(__name__)
_numbers = itertools.count(1)


class Busy(Exception):
    """The line is full."""


class Job:
    """One video for one viewer, from the line to its mp4.

    What happens is told through `emit(event)`, called from other threads: dictionaries with a `type`, and
    `(frame index, bytes)` for the pictures. `settings`, `picture` (PIL) and `video` (the path of the mp4) as named;
    without `wants_pictures` only the mp4 is made.

    The viewer answers with `shown(n)`: the engine keeps only a little ahead of what was shown, so that a change of
    the prompt is soon seen, memory is bounded, and a viewer who is gone is noticed.
    """

    def __init__(self, settings: StreamSettings, video: Path, emit: Callable, picture=None, wants_pictures=True):
        self.number = next(_numbers)
        self.settings, self.video, self.emit, self.picture = settings, video, emit, picture
        self.wants_pictures = wants_pictures
        self.state = "new"  # -> waiting -> running -> done
        self.stream = None
        self.generated = self.seen = 0
        self.engine: Engine | None = None
        self.lead = 0  # frames the viewer may still have in hand when the next chunk is begun
        self._wanted_at, self._waits = None, deque(maxlen=8)
        self._paused, self._new_prompt, self._stop_reason = False, None, None
        self._last_sign = time.monotonic()
        self._writer, self._seconds, self._chunk_told = None, 0.0, None
        # Pictures are encoded and the mp4 is written beside the generation of the next chunk.
        self._publisher = ThreadPoolExecutor(1, thread_name_prefix=f"publish-{self.number}")
        self._failed_publishing: BaseException | None = None

    # ---------------------------------------------------------------------------------------- for the viewer's thread
    def shown(self, frames: int) -> None:
        """The viewer has seen this many frames."""
        with self.engine.changed:
            self.seen = max(self.seen, min(int(frames), self.generated))
            self._last_sign = time.monotonic()
            self._note_wish()
            self.engine.changed.notify_all()

    def set_prompt(self, prompt: str) -> None:
        self._change(_new_prompt=prompt)

    def pause(self) -> None:
        self._change(_paused=True)

    def resume(self) -> None:
        self._change(_paused=False)

    def stop(self, reason: str = "stopped") -> None:
        """Ends the video: at once if it waits in line, else after the current denoising pass."""
        self._change(_stop_reason=reason)

    def _change(self, **values) -> None:
        with self.engine.changed:
            if self.state == "done":
                return
            self.__dict__.update(values)
            self._last_sign = time.monotonic()
            self.engine.changed.notify_all()

    # ---------------------------------------------------------------------------------------- for the engine's thread
    def wants_chunk(self) -> bool:
        return not self._paused and self.generated - self.seen <= self.lead

    def _note_wish(self) -> None:
        if self._wanted_at is None and self.wants_chunk():
            self._wanted_at = time.monotonic()

    def _adapt_lead(self) -> None:
        """So far ahead that a chunk which takes half as long again as the slowest of the last few is still in time."""
        wanted, self._wanted_at = self._wanted_at, None
        if wanted is not None:
            self._waits.append(time.monotonic() - wanted)
            needed = math.ceil(self.engine.fps * (1.5 * max(self._waits) + 0.25))
            self.lead = min(max(needed, self.engine.chunk), 4 * self.engine.chunk)

    def idle_for(self) -> float:
        return time.monotonic() - self._last_sign

    def start(self, pipe) -> None:
        s = self.settings
        picture = None if self.picture is None else fit_picture(self.picture, s.height, s.width)
        length = {"num_frames": s.frames} if s.frames is not None else {"num_chunks": None}
        self.stream = pipe.stream(s.prompt, height=s.height, width=s.width, seed=s.seed, image=picture,
                                  callback_on_step_end=self._after_pass, **length)
        self.emit({"type": "started", "seed": s.seed, "height": s.height, "width": s.width, "frames": s.frames})
        self._emit_cells()

    def _after_pass(self, pipe, step, timestep, tensors) -> None:
        if self._stop_reason is not None:
            self.stream.close()  # from inside the chunk: it is given up after this pass
        chunk = self.stream.next_index - 1
        if chunk == self._chunk_told:
            return
        self._chunk_told = chunk
        whole = pipe.rollout.chunk_frames
        self._emit_cells(self.stream.cache.spec.max_staged_tokens // whole * tensors["latents"].shape[2], chunk)

    def _emit_cells(self, staged: int = 0, chunk: int | None = None) -> None:
        cache = self.stream.cache
        if cache is not None:
            self.emit({"type": "cache", "chunk": chunk, **cache_cells(cache, staged)})

    def step(self, limits: Limits) -> str | None:
        """One piece of work; returns why the video is over, if it is."""
        if self._stop_reason is not None:
            return self._stop_reason
        with self.engine.changed:
            prompt, self._new_prompt = self._new_prompt, None
        if prompt is not None:
            self.emit({"type": "prompt", "prompt": prompt, "chunk": self.stream.set_prompt(prompt)})
        if not self.wants_chunk():
            return None
        self._note_wish()
        begin = time.perf_counter()
        chunk = next(self.stream, None)
        seconds = time.perf_counter() - begin
        if chunk is None:
            return self._stop_reason or "finished"
        frames = chunk.frames
        over = None
        if limits.max_frames is not None and self.generated + len(frames) >= limits.max_frames:
            frames, over = frames[:limits.max_frames - self.generated], "limit"
        elif self.stream.closed:
            over = self._stop_reason or "finished"
        first = self.generated
        with self.engine.changed:
            self.generated += len(frames)
            self._last_sign = time.monotonic()
        self._seconds += seconds
        told = {"type": "chunk", "chunk": chunk.index, "first": first, "count": len(frames), "seconds": seconds,
                "total_seconds": self._seconds}
        self._publisher.submit(self._publish, told, frames)
        self._emit_cells()
        if self._failed_publishing is not None:
            raise self._failed_publishing
        return over

    def finish(self, reason: str, message: str) -> None:
        self.stop(reason)
        self.state = "done"
        if self.stream is not None:
            self.stream.close()
            self.emit({"type": "cache", "closed": True})
        self._publisher.submit(self._publish_end, reason, message)
        self._publisher.shutdown(wait=False)

    # ---------------------------------------------------------------------------------------- the publisher's thread
    def _publish(self, told: dict, frames) -> None:
        try:
            self.emit(told)
            pixels = []
            for index, frame in enumerate(frames, told["first"]):
                pixels.append(to_bytes(frame))
                if self.wants_pictures:
                    self.emit((index, encode_frame(pixels[-1])))
            self._adapt_lead()
            if self._writer is None:
                self._writer = VideoWriter(self.video, fps=self.engine.fps)
            self._writer.write(np.stack(pixels))
        except Exception as error:
            self._failed_publishing = error

    def _publish_end(self, reason: str, message: str) -> None:
        has_video = False
        if self._writer is not None:
            try:
                self._writer.close()
                has_video = reason != "gone"
            except Exception:
                log.exception("video %d could not be completed", self.number)
                message += " The mp4 could not be written."
        if not has_video:
            self.video.unlink(missing_ok=True)
        self.emit({"type": "end", "reason": reason, "message": message, "frames": self.generated, "video": has_video})


class Engine:
    """Runs up to `limits.max_streams` jobs, chunk by chunk in turn; the others wait in line.

    Streams share one transformer, and a device does one chunk at a time anyway, so one thread generates for all.
    """

    def __init__(self, pipe, limits: Limits):
        self.pipe, self.limits = pipe, limits
        self.fps = pipe.rollout.default_fps
        self.chunk = pipe.rollout.chunk_frames * pipe.vae_scale_factor_temporal  # pixel frames
        self.changed = threading.Condition(threading.RLock())
        self.running: list[Job] = []
        self.waiting: deque[Job] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Puts the job at the end of the line. Raises `Busy`, in words, if the line is full."""
        with self.changed:
            if self._closing:
                raise Busy("The server is shutting down.")
            places = self.limits.max_streams
            if len(self.running) + len(self.waiting) >= places + self.limits.max_waiting:
                raise Busy(f"All {places} places are taken and {self.limits.max_waiting} others wait: "
                           "try again later.")
            job.engine, job.state, job.lead = self, "waiting", 2 * self.chunk
            self.waiting.append(job)
            self._tell_places()
            self.changed.notify_all()

    def close(self) -> None:
        """Ends every job and the thread."""
        with self.changed:
            self._closing = True
            jobs = [*self.running, *self.waiting]
            self.changed.notify_all()
        for job in jobs:
            job.stop("shutdown")
        self._thread.join(timeout=60)

    def _tell_places(self) -> None:
        for place, job in enumerate(self.waiting, 1):
            if len(self.running) + place > self.limits.max_streams:
                job.emit({"type": "waiting", "place": place, "of": len(self.waiting)})

    # ---------------------------------------------------------------------------------------------- the thread
    def _run(self) -> None:
        turn = 0
        while True:
            with self.changed:
                self.changed.wait_for(self._has_work, timeout=1.0)
                if self._closing and not self.running and not self.waiting:
                    return
            self._admit()
            for job in list(self.running):
                if job.idle_for() > self.limits.idle_seconds and not job.wants_chunk():
                    job.stop("idle")
            ready = [job for job in self.running if self._is_ready(job)]
            if ready:
                turn += 1
                self._advance(ready[turn % len(ready)])

    def _is_ready(self, job: Job) -> bool:
        return job._stop_reason is not None or job._new_prompt is not None or job.wants_chunk()

    def _has_work(self) -> bool:
        free = len(self.running) < self.limits.max_streams and self.waiting
        stopped = any(job._stop_reason is not None for job in self.waiting)
        return self._closing or free or stopped or any(map(self._is_ready, self.running))

    def _admit(self) -> None:
        with self.changed:
            left = [job for job in self.waiting if job._stop_reason is not None]
            for job in left:
                self.waiting.remove(job)
            new = []
            while self.waiting and len(self.running) < self.limits.max_streams:
                job = self.waiting.popleft()
                job.state, job._last_sign = "running", time.monotonic()
                self.running.append(job)
                new.append(job)
            if left or new:
                self._tell_places()
        for job in left:
            job.finish(job._stop_reason, "")
        for job in new:
            try:
                job.start(self.pipe)
            except Exception as error:
                self._end(job, "error", self._in_words(error))

    def _advance(self, job: Job) -> None:
        try:
            reason, message = job.step(self.limits), ""
        except Exception as error:
            reason, message = "error", self._in_words(error)
        if reason == "limit":
            message = f"This server ends a video after {self.limits.max_frames} frames."
        elif reason == "idle":
            message = f"Nobody watched for {self.limits.idle_seconds:g} s, so the stream was ended."
        if reason is not None:
            self._end(job, reason, message)

    def _end(self, job: Job, reason: str, message: str) -> None:
        with self.changed:
            self.running.remove(job)
        job.finish(reason, message)

    def _in_words(self, error: Exception) -> str:
        """What a visitor is told; what only helps the server's owner goes to the log."""
        if isinstance(error, torch.OutOfMemoryError):
            self.pipe.free_caches()
            return "The server has no memory left for this video: try a smaller picture, or later."
        if isinstance(error, ValueError):
            return str(error)
        log.error("a stream failed", exc_info=error)
        return f"The generation failed ({type(error).__name__}); the server's log says more. Other streams go on."
