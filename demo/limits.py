"""What one visitor may ask of the server, and the check of what they asked."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds of the demo.

    Args:
        max_frames: pixel frames of one video, endless ones too; `None`: no bound.
        max_pixels: height x width of a video; `None`: the model's own default size.
        max_streams: videos generated at the same time; further ones wait in line.
        max_waiting: how many may wait in line.
        idle_seconds: how long a stream that waits for its viewer (paused, or nothing shown) keeps its cache.
        picture_bytes, picture_pixels: of an uploaded picture.
        prompt_characters: of a prompt.
    """

    max_frames: int | None = 7200
    max_pixels: int | None = None
    max_streams: int = 2
    max_waiting: int = 32
    idle_seconds: float = 120.0
    picture_bytes: int = 10 * 2**20
    picture_pixels: int = 20_000_000
    prompt_characters: int = 2000

    def __post_init__(self):
        for name in ("max_frames", "max_pixels", "max_streams", "max_waiting", "idle_seconds", "picture_bytes",
                     "picture_pixels", "prompt_characters"):
            value = getattr(self, name)
            if value is None and name in ("max_frames", "max_pixels"):
                continue
            if not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")


@dataclass(frozen=True)
class StreamSettings:
    """A checked request for one video. `frames` is None for an endless one."""

    prompt: str
    seed: int
    frames: int | None
    height: int
    width: int


def check_prompt(prompt, limits: Limits) -> str:
    """The prompt without surrounding blanks. Raises a ValueError in words for the visitor."""
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError("The prompt is empty: say what the video shows.")
    prompt = prompt.strip()
    if len(prompt) > limits.prompt_characters:
        raise ValueError(f"The prompt has {len(prompt)} characters; this server takes {limits.prompt_characters}.")
    return prompt


def _number(value, name: str, least: float, most: float, whole: bool = True):
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most or (
            whole and value != int(value)):
        kind = "a whole number" if whole else "a number"
        raise ValueError(f"{name} must be {kind} from {least} to {most}, not {value!r:.40}.")
    return int(value) if whole else float(value)


def check_settings(wish: dict, rollout, limits: Limits) -> StreamSettings:
    """Checks what a client asks for.

    Args:
        wish: untrusted; `prompt`, and optionally `seed`, `seconds` (None: endless), `height`, `width`.
        rollout: the pipeline's `RolloutConfig`, for the model's own size and frames a second.

    Raises:
        ValueError: in words for the visitor.
    """
    prompt = check_prompt(wish.get("prompt"), limits)
    seed = _number(wish.get("seed") or 0, "The seed", 0, 2**53 - 1)
    frames = None
    if wish.get("seconds") is not None:
        frames = max(1, round(_number(wish["seconds"], "The length in seconds", 0.05, 1e6, whole=False)
                              * rollout.default_fps))
        if limits.max_frames is not None and frames > limits.max_frames:
            raise ValueError(f"{frames} frames are more than this server makes: the limit is {limits.max_frames} "
                             f"({limits.max_frames / rollout.default_fps:g} s).")
    height = _number(wish.get("height") or rollout.default_height, "The height", 1, 16384)
    width = _number(wish.get("width") or rollout.default_width, "The width", 1, 16384)
    most = limits.max_pixels or rollout.default_height * rollout.default_width
    if height * width > most:
        raise ValueError(f"{width} x {height} are {height * width} pixels; this server makes at most {most}.")
    return StreamSettings(prompt, seed, frames, height, width)
