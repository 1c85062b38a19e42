"""Decoding beside the rollout, and the times of a chunk."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator

import torch

from ..graphs import why_not


@functools.lru_cache(maxsize=None)
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """First in line: the frames are waited for, the next chunk is not yet. One a device, for all videos: cuBLAS keeps
    a workspace, 32 MiB on Hopper, for every stream that it has run on."""
    return torch.cuda.Stream(device, priority=-1)


class SideDecoder:
    """A streaming decoder on a CUDA stream of its own: chunk i is decoded and copied to the host while the transformer
    goes on with the clean pass and with chunk i + 1. Elsewhere, and with offloaded weights, decoding takes its turn.

    Args:
        decoder: see `StreamingDecoder`.
        vae: what holds its weights.
    """

    def __init__(self, decoder: Callable[[torch.Tensor], torch.Tensor], vae, device: torch.device):
        self._decoder, self._device, self._stream = decoder, device, None
        if device.type == "cuda" and (not isinstance(vae, torch.nn.Module) or why_not(vae) is None):
            self._stream = _side_stream(device)

    @property
    def runs_beside(self) -> bool:
        return self._stream is not None

    @contextlib.contextmanager
    def after(self, latents: torch.Tensor) -> Iterator[None]:
        """Work on the decoder's stream that begins when `latents`, from the current stream, are there."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        latents.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """[1, 3, F, H, W] in [-1, 1]; call it inside `after`."""
        return self._decoder(latents)

    def finish(self, convert: Callable[[torch.Tensor], object], video: torch.Tensor):
        """`convert(video)` behind the decoding; what stays on the device is for the current stream to use."""
        if self._stream is None:
            return convert(video)
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            frames = convert(video)
        if isinstance(frames, torch.Tensor) and frames.is_cuda:
            current.wait_stream(self._stream)
            frames.record_stream(current)
        return frames


class Stopwatch:
    """Seconds of named spans, which may lie on several streams: host clock on a CPU, events on CUDA (read at the
    end)."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._start, self._spans = self._now(), {}

    def _now(self):
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        begin = self._now()
        yield
        self._spans[name] = begin, self._now()

    def seconds(self) -> dict[str, float]:
        """Of every span, and `"total"` until the last of them ended."""
        if self._cuda:
            for _, end in self._spans.values():
                end.synchronize()

        def between(a, b):
            return a.elapsed_time(b) / 1000 if self._cuda else b - a

        times = {name: between(*span) for name, span in self._spans.items()}
        return {**times, "total": max(between(self._start, end) for _, end in self._spans.values())}
