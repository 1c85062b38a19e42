"""What a stream is asked for and what it yields: StreamRequest, VideoChunk; and a chunk's seed."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .resources import RolloutGeometry


@dataclass
class VideoChunk:
    """One chunk of a video.

    Attributes:
        frames: the pixel frames by `output_type`: `"np"` float32 [F, H, W, 3] in [0, 1], `"pt"` [F, 3, H, W] in
            [0, 1], `"pil"` a list of images, `"latent"` the latents. `None` on ranks that share the video of another
            one, which decodes it.
        latents (`torch.Tensor`): [1, C, f, h, w], normalised, as the transformer made them.
        index (`int`): the chunk's number, from 0.
        timings (`dict[str, float]`): seconds of `"denoise"`, `"clean"`, `"decode"`, and `"total"` from the start of
            the chunk until all three were done. On CUDA they are the device's, and the decoding runs beside the rest.
    """

    frames: object
    latents: torch.Tensor
    index: int
    timings: dict[str, float] = field(default_factory=dict)


@dataclass
class StreamRequest:
    """What `BlockCausalVideoPipeline.stream` worked out of its arguments."""

    geometry: RolloutGeometry
    conditions: dict
    sigmas: dict[bool, list[float]]  # is it chunk 0? -> the noise levels after the shift
    seed: int
    latent_frames: int | None  # None: endless
    pixel_frames: int | None
    output_type: str
    has_frames: bool = True  # False: another rank of this video's group decodes it
    generator: torch.Generator | None = None
    latents: torch.Tensor | None = None
    first_latents: torch.Tensor | None = None
    backend: str = "auto"
    max_sequence_length: int = 512
    attention_kwargs: dict | None = None
    callback_on_step_end: Callable | None = None
    callback_on_step_end_tensor_inputs: tuple[str, ...] = ("latents",)
    guidance_scale: float = 1.0
    negative_conditions: dict | None = None  # of guidance; None: no second branch


def chunk_seed(seed: int, index: int) -> int:
    """The seed of a chunk's noise: depends on the stream's seed and the chunk's number alone."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
