"""What pyproject.toml cannot say: the list of packages, found where they lie (see [tool.setuptools.package-dir])."""

import runpy
from pathlib import Path

from setuptools import find_packages, setup


def packages():
    found = find_packages(include=["bc_diffusers", "bc_diffusers.*"])
    for folder in ("pipelines", "demo"):  # top-level folders that are imported as bc_diffusers.<folder>
        found += [f"bc_diffusers.{folder}"] + [f"bc_diffusers.{folder}.{name}" for name in find_packages(folder)]
    return found + ["bc_diffusers.kernels"]  # data only: the CUDA sources


def extensions():
    """The CUDA ops, compiled at install time where torch and a CUDA toolkit are here; else at their first use."""
    here = Path(__file__).parent
    return runpy.run_path(str(here / "bc_diffusers" / "ops" / "library.py"))["ahead_of_time"](here / "kernels")


ext_modules, cmdclass = extensions()
setup(packages=packages(), ext_modules=ext_modules, cmdclass=cmdclass)
