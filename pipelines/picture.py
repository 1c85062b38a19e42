"""A caller's picture as pixels, whatever kind it is."""

import numpy as np
import PIL.Image
import torch
from diffusers.video_processor import VideoProcessor


def picture_to_pixels(image, height: int, width: int, processor: VideoProcessor) -> torch.Tensor:
    """float32 [1, 3, height, width] in [-1, 1] on the CPU or the picture's device; resized where the size differs.

    Args:
        image: a PIL image of any mode, an array [H, W, 3] or a tensor [3, H, W] (a leading 1 does no harm): uint8, or
            floating point in [0, 1].

    Raises:
        TypeError, ValueError: for anything else, saying what was got.
    """
    if isinstance(image, PIL.Image.Image):
        return processor.preprocess(image.convert("RGB"), height, width)
    if not isinstance(image, (np.ndarray, torch.Tensor)):
        raise TypeError("`image` must be one picture: a PIL image, an array [H, W, 3] or a tensor [3, H, W], got "
                        f"{type(image).__name__}")
    pixels, axis = (torch.from_numpy(image), -1) if isinstance(image, np.ndarray) else (image, -3)
    if pixels.ndim == 4 and pixels.shape[0] == 1:
        pixels = pixels[0]
    if pixels.ndim != 3 or pixels.shape[axis] != 3:
        shape = "an array must be [H, W, 3]" if axis == -1 else "a tensor must be [3, H, W]"
        raise ValueError(f"`image`: {shape}, got {list(image.shape)}")
    if pixels.dtype == torch.uint8:
        pixels = pixels.float() / 255
    if not pixels.is_floating_point():
        raise ValueError(f"`image` must be uint8, or floating point in [0, 1], got {pixels.dtype}")
    if not torch.isfinite(pixels).all():
        raise ValueError("`image` holds NaN or infinite values")
    least, most = pixels.min().item(), pixels.max().item()
    if least < -1e-3 or most > 1 + 1e-3:
        raise ValueError(f"`image` must lie in [0, 1], its values go from {least:g} to {most:g}")
    pixels = pixels.float().clamp(0, 1)
    return processor.preprocess(pixels if axis == -3 else pixels.permute(2, 0, 1), height, width)
