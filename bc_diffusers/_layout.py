"""Where the parts of the package lie: inside it when it was installed from a wheel, beside it in a checkout."""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path


PACKAGE = Path(__file__).resolve().parent
SUB_PACKAGES = ("pipelines", "demo")


def locate(name: str) -> Path:
    """The folder of the part `name` (one of `SUB_PACKAGES`, or "kernels")."""
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent / name


def kernels_folder() -> Path:
    """The folder that holds the CUDA sources (`*.cu` and their headers)."""
    return locate("kernels")


class CheckoutFinder:
    """Finds `bc_diffusers.pipelines` and `bc_diffusers.demo` in a checkout, where they lie beside the package.

    An editable install has such a finder of its own (setuptools makes it); this one serves a bare checkout on
    PYTHONPATH, and a checkout that is the current folder while a wheel is installed. Putting the checkout on the
    package's `__path__` would do too, but make every folder in it importable, `bc_diffusers.bc_diffusers` included.
    """

    @staticmethod
    def find_spec(fullname: str, path=None, target=None) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != __package__ or name not in SUB_PACKAGES:
            return None
        folder = PACKAGE.parent / name
        return spec_from_file_location(fullname, folder / "__init__.py", submodule_search_locations=[str(folder)])


def install() -> None:
    """Let the sub-packages be imported from a checkout; does nothing for an installed wheel."""
    if not (PACKAGE / SUB_PACKAGES[0]).is_dir() and CheckoutFinder not in sys.meta_path:
        sys.meta_path.append(CheckoutFinder)
