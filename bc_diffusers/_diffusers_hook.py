"""Makes `diffusers.BlockCausalVideoPipeline` exist, but imports neither diffusers nor our pipeline before their time.

`DiffusionPipeline.from_pretrained(folder)` looks up the class that the folder names as an attribute of the diffusers
module, so a folder saved by our pipeline loads only if the attribute is there.
"""

import sys


PIPELINE = "BlockCausalVideoPipeline"


def expose(diffusers) -> None:
    """Give the imported module `diffusers` the attribute, read from our package at its first use."""

    def pipeline_class(module):
        from .pipelines import BlockCausalVideoPipeline

        return BlockCausalVideoPipeline

    # A property on the module's own class: works for diffusers' lazy module as for a plain one, and imports nothing.
    kind = type(diffusers)
    if not hasattr(kind, PIPELINE):
        diffusers.__class__ = type(kind.__name__, (kind,), {PIPELINE: property(pipeline_class)})


class ExposingLoader:
    """diffusers' own loader, then `expose`."""

    def __init__(self, loader):
        self.loader = loader

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self.loader  # leave no trace of ourselves
        self.loader.exec_module(module)
        expose(sys.modules["diffusers"])  # not `module`: diffusers puts its lazy module in that one's place

    def __getattr__(self, name):  # get_source, get_resource_reader, ...: asked of a spec that is not imported yet
        return getattr(self.loader, name)


class DiffusersFinder:
    """Finds diffusers as the other finders do, with our loader around theirs.

    It stays installed: `importlib.util.find_spec("diffusers")`, which many libraries call to see whether diffusers is
    there, must not use up the hook.
    """

    def find_spec(self, fullname, path=None, target=None):
        if fullname != "diffusers":
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:  # a folder without __init__.py has none
                    spec.loader = ExposingLoader(spec.loader)
                return spec
        return None


def install() -> None:
    """Expose our pipeline in diffusers now if it is imported, else as soon as it is."""
    if "diffusers" in sys.modules:
        expose(sys.modules["diffusers"])
    elif not any(isinstance(finder, DiffusersFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, DiffusersFinder())
