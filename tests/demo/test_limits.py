"""What visitors may ask for, and pictures that mean no good."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from bc_diffusers.demo import Limits
from bc_diffusers.demo.limits import check_settings
from bc_diffusers.demo.pictures import decode_picture, encode_frame, fit_picture
from bc_diffusers.pipelines import PRESETS


ROLLOUT, LIMITS = PRESETS["embedded"], Limits(max_frames=120)


def encoded(image, kind="PNG", **more):
    out = io.BytesIO()
    image.save(out, kind, **more)
    return out.getvalue()


def test_a_plain_wish_takes_the_models_own_size():
    settings = check_settings({"prompt": "  a red circle "}, ROLLOUT, LIMITS)
    assert (settings.prompt, settings.seed, settings.frames) == ("a red circle", 0, None)
    assert (settings.height, settings.width) == (ROLLOUT.default_height, ROLLOUT.default_width)
    assert check_settings({"prompt": "x", "seconds": 2.5, "seed": 7.0}, ROLLOUT, LIMITS).frames == 30


@pytest.mark.parametrize("wish,words", [
    ({}, "empty"), ({"prompt": "   "}, "empty"), ({"prompt": ["x"]}, "empty"),
    ({"prompt": "x" * 2001}, "2001 characters"),
    ({"prompt": "x", "seed": -1}, "seed must be a whole number from 0"),
    ({"prompt": "x", "seed": 1.5}, "seed must be a whole number"),
    ({"prompt": "x", "seed": "1; rm"}, "seed must be a whole number"),
    ({"prompt": "x", "seconds": 0}, "length in seconds"), ({"prompt": "x", "seconds": float("nan")}, "length"),
    ({"prompt": "x", "seconds": 11}, "132 frames are more than this server makes: the limit is 120"),
    ({"prompt": "x", "width": 512}, "at most"), ({"prompt": "x", "height": True}, "height must be"),
    ({"prompt": "x", "height": {"a": 1}}, "height must be"), ({"prompt": "x", "width": 1e9}, "width must be"),
])
def test_what_is_refused_is_refused_in_words(wish, words):
    with pytest.raises(ValueError, match=words):
        check_settings(wish, ROLLOUT, LIMITS)


@pytest.mark.parametrize("name", ["max_frames", "max_pixels", "max_streams", "idle_seconds"])
def test_limits_are_positive(name):
    with pytest.raises(ValueError, match=f"{name} must be positive, got 0"):
        Limits(**{name: 0})


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_pictures_are_decoded_to_rgb(kind):
    image = decode_picture(encoded(Image.new("RGB", (30, 20), (200, 30, 30)), kind), LIMITS)
    assert image.mode == "RGB" and image.size == (30, 20)
    assert np.abs(np.array(image).mean((0, 1)) - (200, 30, 30)).max() < 6


def test_a_picture_is_turned_upright_and_cut_not_stretched():
    image = Image.new("RGB", (40, 20), "white")
    image.paste("black", (0, 0, 20, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright
    upright = decode_picture(encoded(image, "JPEG", exif=exif, quality=95), LIMITS)
    assert upright.size == (20, 40)
    fitted = np.array(fit_picture(image, 16, 16))
    assert fitted.shape == (16, 16, 3) and fitted[:, :7].max() == 0 and fitted[:, 9:].min() == 255


def png_of(width, height):
    """A PNG whose header promises any size."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = b"".join(struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
                      for kind, body in ((b"IHDR", head), (b"IDAT", zlib.compress(b"\0" * 100)), (b"IEND", b"")))
    return b"\x89PNG\r\n\x1a\n" + chunks


@pytest.mark.parametrize("data,words", [
    (b"", "PNG, JPEG or WebP"), (b"not a picture", "PNG, JPEG or WebP"),
    (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "PNG, JPEG or WebP"),
    (encoded(Image.new("RGB", (4, 4)), "GIF"), "PNG, JPEG or WebP"),
    (encoded(Image.new("RGB", (4, 4)), "EPS"), "PNG, JPEG or WebP"),
    (png_of(60_000, 60_000), "PNG, JPEG or WebP|60000 x 60000 pixels; this server takes 20 million"),
    (png_of(5_000, 5_000), "5000 x 5000 pixels"),
    (encoded(Image.effect_noise((64, 64), 90))[:2000], "damaged|PNG, JPEG or WebP"),
    (bytes(11 * 2**20), "11.0 MB; this server takes 10 MB"),
], ids=["empty", "text", "svg", "gif", "eps", "bomb", "large", "cut off", "bytes"])
def test_bad_pictures_are_refused_in_words(data, words):
    with pytest.raises(ValueError, match=words):
        decode_picture(data, LIMITS)


def test_small_frames_keep_every_bit_and_large_ones_are_small():
    rng = np.random.default_rng(0)
    small = rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)
    assert (np.array(Image.open(io.BytesIO(encode_frame(small)))) == small).all()
    large = np.full((480, 832, 3), 90, np.uint8)
    data = encode_frame(large)
    assert data[:2] == b"\xff\xd8" and len(data) < 60_000
