"""A file of prompts: what each line asks for, and where its video goes."""

import json
from dataclasses import dataclass
from pathlib import Path


FIELDS = {"prompt": str, "seed": int, "num_frames": int, "height": int, "width": int}


@dataclass(frozen=True)
class VideoJob:
    """One video. `None` leaves a setting to the command line and the model.

    `index` is the prompt's number in its file, from 0, blank lines not counted.
    """

    index: int
    prompt: str
    seed: int | None = None
    num_frames: int | None = None
    height: int | None = None
    width: int | None = None

    def output(self, template: Path) -> Path:
        """`clips.mp4` -> `clips-0003.mp4`; the folder `clips` -> `clips/0003.mp4`."""
        number = f"{self.index:04d}"
        if template.suffix:
            return template.with_name(f"{template.stem}-{number}{template.suffix}")
        return template / f"{number}.mp4"


def read_jobs(path: Path) -> list[VideoJob]:
    """The jobs of a prompts file: one prompt a line, or a JSON object a line, `{"prompt": ..., "seed": 7,
    "num_frames": 81, "height": 480, "width": 832}`, of which only the prompt is required.

    Raises:
        OSError: if it cannot be read.
        ValueError: with the line's number, for a line that is neither, and for a file without prompts.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise ValueError(f"{path} holds no prompts")
    only_json = path.suffix == ".jsonl"
    jobs = []
    for index, (number, line) in enumerate(lines):
        is_json = only_json or line.startswith("{")
        values = _parse(line, f"{path}, line {number}") if is_json else {"prompt": line}
        jobs.append(VideoJob(index, **values))
    return jobs


def _parse(line: str, where: str) -> dict:
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(values, dict) or "prompt" not in values:
        raise ValueError(f'{where}: expected an object with a "prompt", got {line}')
    for name, value in values.items():
        if name not in FIELDS:
            raise ValueError(f"{where}: unknown field {name!r}; the fields are {', '.join(FIELDS)}")
        if not isinstance(value, FIELDS[name]) or isinstance(value, bool):
            raise ValueError(f"{where}: {name} must be a {FIELDS[name].__name__}, got {value!r}")
    if not values["prompt"].strip():
        raise ValueError(f"{where}: the prompt is empty")
    for name in ("num_frames", "height", "width"):
        if values.get(name, 1) < 1:
            raise ValueError(f"{where}: {name} must be at least 1, got {values[name]}")
    return values
