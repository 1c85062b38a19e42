"""The pictures of the documentation are what their scripts draw today."""

import importlib.util
import sys
from pathlib import Path

from PIL import Image


ROOT = Path(__file__).resolve().parents[2]


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_drawing_of_the_window_is_up_to_date(tmp_path):
    load("draw_window").main(tmp_path / "window.svg")
    assert (tmp_path / "window.svg").read_text() == (ROOT / "docs" / "window.svg").read_text()


def test_a_contact_sheet_has_a_row_a_prompt(tmp_path, monkeypatch):
    target = tmp_path / "new" / "sheet.png"
    monkeypatch.setattr(sys, "argv", ["contact_sheet.py", str(target), "--columns", "2", "--num-frames", "9", "--tile",
                                      "64", "a red circle", "a blue square"])
    load("contact_sheet").main()
    sheet = Image.open(target)
    assert sheet.size == (12 + 2 * 76, 12 + 2 * (22 + 64 + 12) + 20)
    assert len(sheet.getcolors(100000)) > 100
