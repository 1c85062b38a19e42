"""The package as a package: what importing it costs, where it finds its parts, how diffusers learns of it."""

import shutil
import subprocess
import sys
import types
from pathlib import Path

import diffusers
import pytest

import bc_diffusers
from bc_diffusers import _diffusers_hook, _layout


ROOT = Path(__file__).resolve().parent.parent


def run(code, folder, cwd):
    """Run Python `code` in a fresh interpreter that finds bc_diffusers in `folder`; returns what it prints."""
    code = f"import sys; sys.path.insert(0, {str(folder)!r})\n{code}"
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def installed(tmp_path):
    """A folder laid out as a wheel installs it."""
    site = tmp_path / "site"
    ignore = shutil.ignore_patterns("__pycache__", "embedded_model")
    shutil.copytree(ROOT / "bc_diffusers", site / "bc_diffusers", ignore=ignore)
    for name in ("pipelines", "demo", "kernels"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, site / "bc_diffusers" / name, ignore=ignore)
    return site


def test_every_exported_name_is_there():
    for name in bc_diffusers.__all__:
        assert getattr(bc_diffusers, name).__name__ == name
        assert name in dir(bc_diffusers)
    with pytest.raises(AttributeError, match="module 'bc_diffusers' has no attribute 'no_such_name'"):
        bc_diffusers.no_such_name


def test_the_embedded_model_is_a_pipeline_folder():
    assert (bc_diffusers.embedded_model() / "model_index.json").is_file()


def test_importing_the_package_loads_neither_torch_nor_diffusers(tmp_path):
    code = "import bc_diffusers; print([name for name in ('torch', 'diffusers') if name in sys.modules])"
    assert run(code, ROOT, tmp_path) == "[]"


LOCATE = """
from importlib.util import find_spec
from bc_diffusers import _layout
print(*(find_spec(f"bc_diffusers.{name}").origin for name in ("pipelines", "demo")), _layout.kernels_folder())
"""


def test_a_bare_checkout_finds_its_parts_beside_the_package(tmp_path):
    expected = [ROOT / "pipelines" / "__init__.py", ROOT / "demo" / "__init__.py", ROOT / "kernels"]
    assert run(LOCATE, ROOT, tmp_path) == " ".join(map(str, expected))


def test_an_installed_package_finds_its_parts_inside_itself(installed, tmp_path):
    package = installed / "bc_diffusers"
    (package / "kernels").mkdir(exist_ok=True)
    expected = [package / "pipelines" / "__init__.py", package / "demo" / "__init__.py", package / "kernels"]
    assert run(LOCATE, installed, tmp_path) == " ".join(map(str, expected))


def test_the_current_folder_wins_over_an_installed_package_as_a_whole(installed):
    code = f"sys.path.insert(0, '')\n{LOCATE}"  # what `python -c` and `python -m` do
    assert run(code, installed, ROOT).startswith(str(ROOT / "pipelines"))


def test_only_our_sub_packages_are_found_in_a_checkout():
    assert _layout.CheckoutFinder.find_spec("bc_diffusers.pipelines") is not None
    for other in ("pipelines", "demo", "bc_diffusers.tests", "bc_diffusers.kernels", "bc_diffusers.pipelines.demo"):
        assert _layout.CheckoutFinder.find_spec(other) is None


def test_diffusers_knows_our_pipeline():
    assert diffusers.BlockCausalVideoPipeline is bc_diffusers.BlockCausalVideoPipeline
    assert diffusers.WanPipeline.__name__ == "WanPipeline"  # and still its own


def test_diffusers_learns_of_our_pipeline_when_it_is_imported_later(tmp_path):
    code = """
import bc_diffusers
from importlib.util import find_spec
assert find_spec("diffusers").loader.get_filename("diffusers")  # a mere look must not use up the hook
import diffusers
print("BlockCausalVideoPipeline" in vars(type(diffusers)), type(diffusers.__spec__.loader).__name__)
print("bc_diffusers.pipelines" in sys.modules, "transformers" in sys.modules)
"""
    assert run(code, ROOT, tmp_path).splitlines() == ["True SourceFileLoader", "False False"]


def test_exposing_twice_is_once_and_hides_nothing():
    module = types.ModuleType("like_diffusers")
    module.version = "1"
    _diffusers_hook.expose(module)
    kind = type(module)
    _diffusers_hook.expose(module)
    assert type(module) is kind
    assert module.BlockCausalVideoPipeline is bc_diffusers.BlockCausalVideoPipeline
    assert module.version == "1"
    with pytest.raises(AttributeError):
        module.other
