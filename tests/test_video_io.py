import imageio.v3 as iio
import numpy as np
import pytest
import torch

from bc_diffusers.video_io import ENCODERS, VideoWriter


def moving_square(num_frames, height=32, width=48):
    """uint8 [F, H, W, 3]: a red square on blue that moves right by 2 pixels a frame."""
    frames = np.zeros((num_frames, height, width, 3), np.uint8)
    frames[..., 2] = 200
    for i in range(num_frames):
        frames[i, 8:24, 2 * i : 2 * i + 16] = (220, 30, 20)
    return frames


def read(path):
    frames = iio.imread(path, index=None, plugin="pillow" if path.suffix == ".gif" else "FFMPEG")
    return frames[..., :3]


@pytest.mark.parametrize("suffix", [".mp4", ".webm", ".gif", ".MP4"])
def test_frames_written_in_chunks_read_back_in_order(tmp_path, suffix):
    frames = moving_square(13)
    path = tmp_path / "new" / "folder" / f"video{suffix}"
    with VideoWriter(path, fps=12) as writer:
        for chunk in np.split(frames, [1, 1, 5]):  # one of them empty
            writer.write(chunk)
            assert not path.exists()
    assert writer.num_frames == 13
    back = read(path)
    assert back.shape == frames.shape
    distance = np.abs(back[:, None].astype(int) - frames).mean((2, 3, 4))
    assert distance.argmin(1).tolist() == list(range(13))  # each looks most like the frame that was written there
    assert distance.diagonal().max() < 6
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("suffix", [".mp4", ".webm", ".gif"])
@pytest.mark.parametrize("height, width", [(33, 47), (32, 47), (33, 48), (34, 50), (40, 56)])
def test_the_size_is_kept_whatever_the_codec_likes(tmp_path, suffix, height, width):
    frames = moving_square(5, height, width)
    path = tmp_path / f"video{suffix}"
    with VideoWriter(path, fps=8) as writer:
        writer.write(frames)
    back = read(path)
    assert back.shape == frames.shape
    assert np.abs(back.astype(int) - frames).mean() < 6


def test_common_sizes_use_the_pixel_format_that_all_players_show(tmp_path):
    path = tmp_path / "video.mp4"
    with VideoWriter(path, fps=12) as writer:
        writer.write(moving_square(5))
    facts = iio.immeta(path, plugin="FFMPEG")
    assert facts["codec"] == "h264"
    assert facts["pix_fmt"].startswith("yuv420p")
    assert facts["fps"] == 12


@pytest.mark.parametrize("name", ["frames", "v1.2/"])
def test_png_folder_is_lossless(tmp_path, name):
    frames = moving_square(4)
    folder = tmp_path / name
    folder.mkdir()  # empty, so it may be there
    with VideoWriter(f"{tmp_path}/{name}", fps=12) as writer:
        writer.write(torch.from_numpy(frames[:3]))
        writer.write(frames[3:])
    files = sorted(folder.iterdir())
    assert [file.name for file in files] == [f"frame_{i:06d}.png" for i in range(4)]
    assert np.array_equal(np.stack([iio.imread(file) for file in files]), frames)
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("name", ["video.mp4", "video.gif", "frames"])
def test_abort_leaves_nothing(tmp_path, name):
    writer = VideoWriter(tmp_path / name, fps=12)
    writer.write(moving_square(5))
    writer.abort()
    writer.abort()
    writer.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="closed"):
        writer.write(moving_square(1))


def test_an_error_in_the_block_keeps_the_older_file(tmp_path):
    path = tmp_path / "video.mp4"
    path.write_bytes(b"older")
    with pytest.raises(KeyboardInterrupt), VideoWriter(path, fps=12) as writer:
        writer.write(moving_square(5))
        raise KeyboardInterrupt
    assert path.read_bytes() == b"older"
    assert list(tmp_path.iterdir()) == [path]


def test_a_complete_video_replaces_the_older_file_and_close_is_idempotent(tmp_path):
    path = tmp_path / "video.mp4"
    path.write_bytes(b"older")
    writer = VideoWriter(path, fps=12)
    writer.write(moving_square(3))
    assert path.read_bytes() == b"older"
    writer.close()
    writer.close()
    writer.abort()
    assert len(read(path)) == 3


def test_refusals_name_what_is_wrong(tmp_path):
    with pytest.raises(ValueError, match=r"video\.avi.*\.mp4, \.webm, \.gif, or none for a folder"):
        VideoWriter(tmp_path / "video.avi", fps=12)
    with pytest.raises(ValueError, match="fps must be positive, not 0"):
        VideoWriter(tmp_path / "video.mp4", fps=0)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("keep")
    with pytest.raises(FileExistsError, match="full exists and is not an empty folder"):
        VideoWriter(tmp_path / "full", fps=12)
    (tmp_path / "folder.mp4").mkdir()
    with pytest.raises(IsADirectoryError, match=r"folder\.mp4 is a folder"):
        VideoWriter(tmp_path / "folder.mp4", fps=12)
    writer = VideoWriter(tmp_path / "video.mp4", fps=12)
    with pytest.raises(ValueError, match=r"uint8 \[F, H, W, 3\], not float32 \[2, 32, 48, 3\]"):
        writer.write(moving_square(2).astype(np.float32))
    with pytest.raises(ValueError, match=r"not uint8 \[32, 48, 3\]"):
        writer.write(moving_square(2)[0])
    writer.write(moving_square(2))
    with pytest.raises(ValueError, match="frames of 16x48 in a video of 32x48"):
        writer.write(moving_square(2)[:, :16])
    writer.close()
    assert len(read(tmp_path / "video.mp4")) == 2
    with pytest.raises(ValueError, match="no frames were written"):
        VideoWriter(tmp_path / "none.mp4", fps=12).close()


def test_an_encoder_that_fails_says_why_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setitem(ENCODERS, ".mp4", lambda width, height: ["-c:v", "no_codec"])
    with pytest.raises(RuntimeError, match="ffmpeg failed.*no_codec"), VideoWriter(tmp_path / "v.mp4", 12) as writer:
        for _ in range(100):
            writer.write(moving_square(20, 256, 256))
    assert list(tmp_path.iterdir()) == []
