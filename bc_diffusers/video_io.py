"""Writing a video while it is generated."""

import os
import shutil
import subprocess
import tempfile
import uuid
from pathlib import Path

import numpy as np


def _rgb_to_yuv(width: int, height: int, odd_sizes_fit: bool) -> list[str]:
    # Most players show only 4:2:0, whose colour planes have half the size. H.264 takes no odd size there, and rather
    # than change the size of the picture we keep all colour samples. Colours are tagged, so no player has to guess.
    even = width % 2 == 0 and height % 2 == 0
    pixels = "yuv420p" if even or odd_sizes_fit else "yuv444p"
    tags = ["-colorspace", "bt709", "-color_primaries", "bt709", "-color_trc", "bt709"]
    return ["-vf", "scale=out_color_matrix=bt709:out_range=tv", "-pix_fmt", pixels, *tags]


def _mp4(width, height):
    return ["-c:v", "libx264", "-crf", "16", *_rgb_to_yuv(width, height, False), "-movflags", "+faststart"]


def _webm(width, height):
    speed = ["-deadline", "realtime", "-cpu-used", "6", "-row-mt", "1"]
    return ["-c:v", "libvpx-vp9", "-crf", "20", "-b:v", "0", *speed, *_rgb_to_yuv(width, height, True)]


def _gif(width, height):
    # A palette for each frame: one for all would need every frame before the first can be written.
    palette = "split[a][b];[a]palettegen=stats_mode=single[p];[b][p]paletteuse=new=1"
    return ["-filter_complex", palette, "-loop", "0"]


ENCODERS = {".mp4": _mp4, ".webm": _webm, ".gif": _gif}


class _FFmpeg:
    """Pipes frames to an ffmpeg that writes the file `path`."""

    def __init__(self, path: Path, fps: float, width: int, height: int):
        from imageio_ffmpeg import get_ffmpeg_exe

        source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", str(fps), "-i", "-"]
        output = [*ENCODERS[path.suffix.lower()](width, height), str(path)]
        self._messages = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [get_ffmpeg_exe(), "-y", "-v", "error", *source, *output],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._messages,
            start_new_session=True,  # Ctrl-C is ours to handle: a video that was stopped can still be closed well
        )

    def write(self, frames: np.ndarray) -> None:
        try:
            self._process.stdin.write(np.ascontiguousarray(frames).data)
        except BrokenPipeError:
            self.close()  # says why it went away
            raise

    def close(self) -> None:
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # the exit status tells
        if self._process.wait() != 0:
            self._messages.seek(0)
            messages = self._messages.read().decode(errors="replace").strip()
            raise RuntimeError(f"ffmpeg failed (exit status {self._process.returncode}): {messages}")

    def kill(self) -> None:
        self._process.kill()
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        self._process.wait()


class _PngFolder:
    """Writes frame_000000.png, frame_000001.png, ... into the new folder `path`."""

    def __init__(self, path: Path):
        path.mkdir()
        self._path, self._count = path, 0

    def write(self, frames: np.ndarray) -> None:
        from PIL import Image

        for frame in frames:
            Image.fromarray(frame).save(self._path / f"frame_{self._count:06d}.png")
            self._count += 1

    def close(self) -> None:
        pass

    kill = close


def check_output(path: str | os.PathLike) -> bool:
    """Is `path` to be a folder of PNG files (else it is a video file)? Raises as `VideoWriter` does."""
    place = Path(path)
    suffix = place.suffix.lower()
    to_folder = suffix == "" or str(path).endswith(("/", os.sep))
    if not to_folder and suffix not in ENCODERS:
        raise ValueError(
            f"cannot write {str(path)!r}: the suffix must be one of {', '.join(ENCODERS)}, or none for a folder of "
            "PNG files"
        )
    if to_folder and place.exists() and not (place.is_dir() and not any(place.iterdir())):
        raise FileExistsError(f"{place} exists and is not an empty folder; PNG files go into a new one")
    if not to_folder and place.is_dir():
        raise IsADirectoryError(f"{place} is a folder, not a {suffix} file")
    return to_folder


class VideoWriter:
    """Writes frames as they come; the file has its name only once it is complete.

    Until `close` the video lies beside its place under a hidden name, and `abort` removes that. As a context manager
    it closes at the end of the block, and aborts if the block raised.

    Args:
        path (`str` or `Path`): what to write, by its name: `*.mp4` (H.264), `*.webm` (VP9), `*.gif`, or a folder of
            PNG files (a name without a suffix, or that ends in a slash). Missing parent folders are made. A file of
            this name is replaced at the end; a folder must be new or empty.
        fps (`float`): frames a second, for files.

    Raises:
        ValueError: the suffix is none of the above, or `fps` is not positive.
        FileExistsError: the folder holds something already.
        IsADirectoryError: `path` is to be a file but is a folder.
    """

    def __init__(self, path: str | os.PathLike, fps: float):
        self._to_folder = check_output(path)
        if not fps > 0:
            raise ValueError(f"fps must be positive, not {fps}")
        self.path, self.fps = Path(path), fps
        self.num_frames, self.size = 0, None
        partial = f".{self.path.stem}.{uuid.uuid4().hex[:8]}.partial{self.path.suffix.lower()}"
        self._partial = self.path.with_name(partial)
        self._sink = None
        self._closed = False

    def write(self, frames) -> None:
        """Append frames: uint8 `[F, H, W, 3]` (RGB), a numpy array or a CPU tensor; F may be 0."""
        frames = np.asarray(frames)
        if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3:
            raise ValueError(f"frames must be uint8 [F, H, W, 3], not {frames.dtype} {list(frames.shape)}")
        if self._closed:
            raise ValueError(f"{self.path} is closed: it takes no more frames")
        height, width = frames.shape[1:3]
        if self.size not in (None, (height, width)):
            raise ValueError(f"frames of {height}x{width} in a video of {self.size[0]}x{self.size[1]}")
        if len(frames) == 0:
            return
        if self._sink is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.size = height, width
            self._sink = (
                _PngFolder(self._partial) if self._to_folder else _FFmpeg(self._partial, self.fps, width, height)
            )
        self._sink.write(frames)
        self.num_frames += len(frames)

    def close(self) -> None:
        """Complete the video and give it its name. Raises ValueError if no frame was written. Idempotent."""
        if self._closed:
            return
        if self._sink is None:
            self._closed = True
            raise ValueError(f"no frames were written, so there is no {self.path}")
        try:
            self._sink.close()
            os.replace(self._partial, self.path)
        except BaseException:
            self.abort()
            raise
        self._closed = True

    def abort(self) -> None:
        """Throw away what was written; what was there before under this name stays. Nothing after `close`."""
        if self._closed:
            return
        self._closed = True
        if self._sink is not None:
            self._sink.kill()
            if self._to_folder:
                shutil.rmtree(self._partial, ignore_errors=True)
            else:
                self._partial.unlink(missing_ok=True)

    def __enter__(self):
        return self

    def __exit__(self, error_type, error, traceback):
        if error_type is None:
            self.close()
        else:
            self.abort()
