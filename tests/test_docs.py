"""The documentation is whole: links lead somewhere, pages are listed, public names are explained."""

import inspect
import re
from pathlib import Path

import pytest

import bc_diffusers


ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").glob("*.md") if p.name != "README.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    missing = [t for t in targets if not t.startswith(("http", "mailto")) and not (page.parent / t).exists()]
    assert missing == []


def test_every_page_is_listed():
    listed = set(re.findall(r"\]\(([\w_]+\.md)\)", (ROOT / "docs" / "README.md").read_text()))
    assert {p.name for p in PAGES[1:]} <= listed


@pytest.mark.parametrize("name", bc_diffusers.__all__)
def test_public_names_and_their_methods_have_docstrings(name):
    thing = getattr(bc_diffusers, name)
    assert inspect.getdoc(thing), name
    if inspect.isclass(thing):
        own = {n: m for n, m in vars(thing).items() if not n.startswith("_") and inspect.isfunction(m)}
        assert [n for n, method in own.items() if not method.__doc__] == [], name


def test_the_readme_runs(tmp_path, monkeypatch):
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S).group(1)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    assert (tmp_path / "circle.mp4").stat().st_size > 1000
