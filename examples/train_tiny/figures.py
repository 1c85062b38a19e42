"""Pictures: strips of clips, a contact sheet with captions, loss curves. Only Pillow is needed."""

from PIL import Image, ImageDraw


PALETTE = ("#c0392b", "#2166ac", "#1b7837", "#762a83", "#b35806")


def to_image(picture):
    """[3, H, W] in [0, 1] -> PIL image."""
    return Image.fromarray((picture.float().clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy())


def strip(video, step=8, scale=1):
    """video [T, 3, H, W] -> one row of every `step`-th frame."""
    frames = [to_image(frame) for frame in video[::step]]
    width, height = frames[0].size
    row = Image.new("RGB", ((width + 2) * len(frames), height + 2), "#404040")
    for i, frame in enumerate(frames):
        row.paste(frame, ((width + 2) * i + 1, 1))
    return row.resize((row.width * scale, row.height * scale), Image.NEAREST)


def contact_sheet(videos, captions, path, step=8, scale=1):
    """One captioned strip a clip, below each other, as a PNG."""
    rows = [strip(video, step, scale) for video in videos]
    sheet = Image.new("RGB", (rows[0].width, sum(row.height + 16 for row in rows)), "white")
    draw, top = ImageDraw.Draw(sheet), 0
    for row, text in zip(rows, captions):
        draw.text((4, top + 2), text, fill="black")
        sheet.paste(row, (0, top + 16))
        top += row.height + 16
    sheet.save(path, optimize=True)


def loss_curves(log, path, width=900, height=320):
    """One panel a stage: the recorded losses over steps, on a logarithmic axis."""
    import math

    stages = {}
    for entry in log:
        if "loss" in entry:
            stages.setdefault(entry["stage"], []).append(entry)
    image = Image.new("RGB", (width, height * max(1, len(stages))), "white")
    draw = ImageDraw.Draw(image)
    for panel, (stage, entries) in enumerate(stages.items()):
        left, top, right, bottom = 60, panel * height + 30, width - 20, (panel + 1) * height - 30
        curves = {key: [max(e[key], 1e-6) for e in entries] for key in ("loss", "chunk0", "later")}
        low = min(math.log10(v) for values in curves.values() for v in values)
        high = max(max(math.log10(v) for values in curves.values() for v in values), low + 1e-3)
        last = max(entries[-1]["step"], 1)
        draw.rectangle((left, top, right, bottom), outline="#808080")
        draw.text((left, top - 20), f"{stage}: {last} steps", fill="black")
        draw.text((4, top), f"{10**high:.3g}", fill="black")
        draw.text((4, bottom - 12), f"{10**low:.3g}", fill="black")
        for color, (key, values) in zip(PALETTE, curves.items()):
            across = [left + (right - left) * e["step"] / last for e in entries]
            up = [bottom - (bottom - top) * (math.log10(v) - low) / (high - low) for v in values]
            points = list(zip(across, up))
            draw.line(points if len(points) > 1 else points * 2, fill=color, width=2)
            draw.text((left + 200 + 90 * list(curves).index(key), top - 20), key, fill=color)
    image.save(path, optimize=True)
