"""Many videos by many processes: what `bc-diffusers generate` does with `--prompts` or under a launcher."""

import dataclasses
import glob
import os
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ..video_io import VideoWriter, check_output
from .bulletin import Bulletin
from .grid import ProcessGrid, join_launch, launched
from .prompts import VideoJob, read_jobs


@dataclass(frozen=True)
class BatchOptions:
    """What holds for every video whose job does not say otherwise.

    Args:
        output (`Path`): the file of a single prompt (`numbered` False), else see `VideoJob.output`.
        num_frames, height, width, fps: `None`: the model's (81 frames).
        ulysses (`int`): processes that share a video.
        resume (`bool`): leave out videos whose file is there and whole.
        image (`PIL.Image.Image`): the first frame of every video; `None`: there is none.
    """

    output: Path
    numbered: bool = True
    num_frames: int | None = None
    seconds: float | None = None
    height: int | None = None
    width: int | None = None
    fps: int | None = None
    seed: int = 0
    ulysses: int = 1
    resume: bool = False
    image: object = None

    def path(self, job: VideoJob) -> Path:
        return job.output(self.output) if self.numbered else self.output

    def fill(self, job: VideoJob, rollout) -> VideoJob:
        """The job with every setting filled in."""
        frames = self.num_frames
        if self.seconds is not None:
            frames = max(1, round(self.seconds * (self.fps or rollout.default_fps)))
        return dataclasses.replace(
            job, seed=self.seed if job.seed is None else job.seed, num_frames=job.num_frames or frames or 81,
            height=job.height or self.height or rollout.default_height,
            width=job.width or self.width or rollout.default_width)


__all__ = ["BatchOptions", "VideoJob", "generate_batch", "launched", "read_jobs"]


def generate_batch(get_jobs: Callable[[], list[VideoJob]], load: Callable[[str | None], object],
                   options: BatchOptions, device: str | None, echo: Callable[[str], None]) -> None:
    """Generates the videos of a launch; every process of it calls this.

    Args:
        get_jobs: gives the jobs. load: `load(device)` gives the pipeline. Both inside, so that what they raise is
            told once.
        device (`str`, *optional*): `"cpu"` or `"cuda"`; under a launcher each process has its own of that kind.
        echo: prints a line; called in the main process only.
    """
    join_launch(cpu=device == "cpu" or not torch.cuda.is_available())
    running = dist.is_available() and dist.is_initialized()
    bulletin = Bulletin(dist.get_rank() if running else 0)
    with bulletin.failing_together():
        jobs = get_jobs()
        for path in map(options.path, jobs):
            if not (options.resume and path.exists()):
                check_output(path)  # better said before the model is loaded
        own = _own_device(device)
        if options.ulysses > 1 and not launched():
            raise ValueError(f"--ulysses {options.ulysses} needs several processes: accelerate launch "
                             f"--num_processes {options.ulysses} -m bc_diffusers.cli generate ...")
        pipe = load(own)
        grid = pipe.enable_context_parallel(options.ulysses)
        jobs = [options.fill(job, pipe.rollout) for job in jobs]
        if options.resume and grid.is_main:
            remove_partial(options.path(job) for job in jobs)
        todo = _as_main_says(bulletin, lambda: [job for job in jobs
                                                if not (options.resume and is_whole(options.path(job), job))])
        if grid.is_main and len(todo) < len(jobs):
            echo(f"{len(jobs) - len(todo)} of {len(jobs)} videos are there already")
        if grid.is_main and 0 < len(todo) < grid.groups:
            echo(f"there are {grid.groups} groups and videos for {len(todo)} of them: a larger --ulysses makes each "
                 "video sooner")
        _generate(grid.share(todo), len(todo), pipe, grid, bulletin, options, echo)
    if running:
        pipe.free_caches()  # graphs that hold a communicator go before it
        dist.destroy_process_group()


def _own_device(device: str | None) -> str | None:
    if not launched():
        return device
    if device is not None and ":" in device:
        raise ValueError(f"--device {device} names one device: under a launcher each process takes its own, so give "
                         "cpu or cuda, or nothing")
    if device == "cpu" or not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"


def _as_main_says(bulletin: Bulletin, decide: Callable[[], list[VideoJob]]) -> list[VideoJob]:
    """What the main process decides, on all: files that appear while the others look would make theirs differ."""
    if not (dist.is_available() and dist.is_initialized()):
        return decide()
    values = [decide() if bulletin.rank == 0 else None]
    if bulletin.rank == 0:
        bulletin.add("decided")
    bulletin.wait_for("decided", 1)  # looking through many videos may take longer than a collective waits
    dist.broadcast_object_list(values, src=0)
    return values[0]


def _generate(mine: list[VideoJob], total: int, pipe, grid: ProcessGrid, bulletin: Bulletin, options: BatchOptions,
              echo: Callable[[str], None]) -> None:
    fps = options.fps or pipe.rollout.default_fps
    start = time.perf_counter()
    for job in mine:
        path, begun = options.path(job), time.perf_counter()
        try:
            frames = _write(pipe, job, path if grid.has_frames else None, fps, options.image)
        except (ValueError, OSError) as error:
            raise RuntimeError(f"prompt {job.index} ({path}): {error}") from error
        if not grid.has_frames:
            continue
        seconds, done = time.perf_counter() - begun, bulletin.add("videos")
        bulletin.add("frames", frames)
        if grid.is_main:
            echo(f"{path}: {frames} frames at {frames / seconds:.1f} frames/s, seed {job.seed}; {done} of {total} "
                 "done")
    if grid.is_main and total:  # groups may end hours apart: no collective could wait so long
        bulletin.wait_for("videos", total)
        frames, seconds = bulletin.add("frames", 0), time.perf_counter() - start
        who = "1 process" if grid.processes == 1 else f"{grid.processes} processes, {grid.groups} at a time"
        echo(f"{total} video{'s' * (total > 1)}, {frames} frames at {frames / seconds:.1f} frames/s by {who}")


def _write(pipe, job: VideoJob, path: Path | None, fps: float, image) -> int:
    """Generates a video, into the file `path` if this rank has the frames; returns how many."""
    written = 0
    with ExitStack() as stack:
        writer = None if path is None else stack.enter_context(VideoWriter(path, fps=fps))
        chunks = stack.enter_context(pipe.stream(job.prompt, num_frames=job.num_frames, height=job.height,
                                                 width=job.width, seed=job.seed, image=image))
        for chunk in chunks:
            if writer is not None:
                writer.write((chunk.frames * 255).round().astype("uint8"))
                written += len(chunk.frames)
    return written


def remove_partial(paths: Iterable[Path]) -> None:
    """Removes what processes that were killed left of these videos under hidden names (see `VideoWriter`)."""
    for path in paths:
        for partial in path.parent.glob(f".{glob.escape(path.stem)}.????????.partial{path.suffix}"):
            if partial.is_dir():
                shutil.rmtree(partial)
            else:
                partial.unlink(missing_ok=True)


def is_whole(path: Path, job: VideoJob) -> bool:
    """Whether `path` is a video of the job's frame count and size that decodes to its end."""
    if path.is_dir():
        return len(list(path.glob("frame_*.png"))) == job.num_frames
    if not path.is_file():
        return False
    import imageio_ffmpeg

    try:
        frames, _ = imageio_ffmpeg.count_frames_and_secs(str(path))
        width, height = next(reader := imageio_ffmpeg.read_frames(str(path)))["size"]
        reader.close()
    except (OSError, RuntimeError):
        return False
    return (frames, height, width) == (job.num_frames, job.height, job.width)
