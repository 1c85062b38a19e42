"""What pyproject.toml cannot say: the list of packages, found where they lie (see [tool.setuptools.package-dir])."""

from setuptools import find_packages, setup


def packages():
    found = find_packages(include=["bc_diffusers", "bc_diffusers.*"])
    for folder in ("pipelines", "demo"):  # top-level folders that are imported as bc_diffusers.<folder>
        found += [f"bc_diffusers.{folder}"] + [f"bc_diffusers.{folder}.{name}" for name in find_packages(folder)]
    return found + ["bc_diffusers.kernels"]  # data only: the CUDA sources


def extensions():
    """Libraries compiled at install time. None: the CUDA ops are compiled at their first use."""
    return []


setup(packages=packages(), ext_modules=extensions())
