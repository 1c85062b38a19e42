"""Pictures in and out: an upload decoded with suspicion, frames encoded for the browser."""

import io

import numpy as np
from PIL import Image, ImageOps

from .limits import Limits


FORMATS = ("PNG", "JPEG", "WEBP")
_LOSSLESS_PIXELS = 256 * 256
_KEPT_SIDE = 2048  # every open page may hold a picture


def decode_picture(data: bytes, limits: Limits) -> Image.Image:
    """An uploaded picture as RGB, turned upright, no side longer than 2048 pixels.

    The size is read from the header and refused before any pixel is decoded; the file's name plays no part.

    Raises:
        ValueError: in words for the visitor.
    """
    if len(data) > limits.picture_bytes:
        raise ValueError(too_large(len(data), limits))
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height <= limits.picture_pixels:
                image.verify()
    except Exception:  # Pillow raises many kinds for broken files
        raise ValueError("This is not a picture that can be read: send a PNG, JPEG or WebP file.") from None
    if width * height > limits.picture_pixels:
        raise ValueError(f"The picture has {width} x {height} pixels; this server takes "
                         f"{limits.picture_pixels / 1e6:g} million.")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:  # verify() leaves an image unusable
            image = ImageOps.exif_transpose(image).convert("RGB")
            image.thumbnail((_KEPT_SIDE, _KEPT_SIDE), Image.Resampling.LANCZOS)
            return image
    except Exception:
        raise ValueError("The picture is damaged and cannot be read to its end.") from None


def too_large(num_bytes: int, limits: Limits) -> str:
    return (f"The picture has {num_bytes / 2**20:.1f} MB; this server takes {limits.picture_bytes / 2**20:g} MB.")


def fit_picture(image: Image.Image, height: int, width: int) -> Image.Image:
    """Cut to the video's proportions around the middle, then scaled: never stretched."""
    return ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS)


def to_bytes(frames: np.ndarray) -> np.ndarray:
    """float [..., 3] in [0, 1] to uint8."""
    return (frames * 255).round().astype("uint8")


def encode_frame(frame: np.ndarray) -> bytes:
    """uint8 [H, W, 3] as a picture file: PNG while it is small, so that every pixel is the model's, else JPEG."""
    out, image = io.BytesIO(), Image.fromarray(frame)
    if frame.shape[0] * frame.shape[1] <= _LOSSLESS_PIXELS:
        image.save(out, "PNG", compress_level=1)
    else:
        image.save(out, "JPEG", quality=90, subsampling=0)
    return out.getvalue()
