"""Finds the compiled CUDA operators: a library built at install time, else one that is built at first use and kept.

A library's name holds a digest of its sources, so one that was built from other sources is never loaded. What is built
at first use also depends on torch, the compiler and the GPU architectures. `setup.py` runs this file on its own: only
the standard library is imported at the top.
"""

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path


# Ampere, Ada, Hopper, Blackwell (data centre, then desktop): what a library built at install time is for.
ARCHITECTURES = ("80", "86", "89", "90", "100", "120")
_CXX_FLAGS = ["-O2", "-std=c++17"]
_CUDA_FLAGS = ["-O3", "-std=c++17"]
_STEM = "_cuda_ops"

_lock = threading.RLock()
_loaded = False
_failure: str | None = None


def load() -> None:
    """Makes the operators work on CUDA tensors; does nothing from the second call on.

    Call it before a graph capture: it may compile for some seconds, which it says in one line on stderr.

    Raises:
        RuntimeError: one message that names what is missing, if there is no library and none can be built.
    """
    global _loaded, _failure
    with _lock:
        if _failure is not None:  # a second attempt would take as long and say less
            raise RuntimeError(_failure)
        if not _loaded:
            try:
                _load_installed() or _load_cached()
            except RuntimeError as error:
                _failure = str(error)
                raise
            _loaded = True


def source_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(p for p in Path(folder).iterdir() if p.suffix in (".cu", ".cuh", ".h")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _sources_folder() -> Path:
    from .._layout import kernels_folder

    return kernels_folder()


def _devices() -> list[tuple[int, int]]:
    import torch

    return sorted({torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())})


# ---------------------------------------------------------------------------------------------- built at install time
def _load_installed() -> bool:
    import torch

    from .._layout import PACKAGE

    for path in sorted(PACKAGE.glob(f"{_STEM}_{source_digest(_sources_folder())}_*.so")):
        if all(_runs_on(path.name.split(".")[0].split("_")[4:], device) for device in _devices()):
            try:
                torch.ops.load_library(path)
                return True
            except OSError as error:  # built for another CUDA major version, say: build one that fits
                print(f"bc_diffusers: {path.name} does not load here ({error})", file=sys.stderr)
    return False


def _runs_on(architectures: list[str], device: tuple[int, int]) -> bool:
    """Whether machine code for one of these runs there: same major version and not newer; PTX: any not newer."""
    for name in architectures:
        number = int(name.removesuffix("ptx"))
        built = divmod(number, 10)
        if built <= device and (built[0] == device[0] or name.endswith("ptx")):
            return True
    return False


def ahead_of_time(folder: Path):
    """What `setup.py` builds: `(ext_modules, cmdclass)`, empty without a CUDA build of torch and a toolkit.

    `BC_DIFFUSERS_BUILD_OPS=0` leaves it out. A build that fails does not fail the installation: the operators are then
    compiled at first use, which names the reason.
    """
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError:  # build isolation: the torch that will run is not here
        return [], {}
    if os.environ.get("BC_DIFFUSERS_BUILD_OPS") == "0" or torch.version.cuda is None or _missing_tools():
        return [], {}
    names = re.sub(r"[.\s]", "", os.environ.get("TORCH_CUDA_ARCH_LIST", "")).replace("+PTX", "ptx").split(";")
    if not all(re.fullmatch(r"\d+(ptx)?", name) for name in names):
        nvcc = str(Path(cpp_extension.CUDA_HOME, "bin", "nvcc"))
        known = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True).stdout.split()
        names = [name for name in ARCHITECTURES if f"compute_{name}" in known]
        names[-1] += "ptx"  # newer GPUs compile it when they load it
    flags = ["--threads=4"]
    for name in names:
        number = name.removesuffix("ptx")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if name.endswith("ptx"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")

    class Build(cpp_extension.BuildExtension):
        def run(self):
            try:
                super().run()
            except Exception as error:
                print(f"bc_diffusers: the CUDA operators were not built ({error}); they will be at first use")
                self.extensions, self.ext_map = [], {}

    extension = cpp_extension.CUDAExtension(
        "_".join([f"bc_diffusers.{_STEM}", source_digest(folder), *names]),
        [str(path) for path in sorted(Path(folder).glob("*.cu"))], include_dirs=[str(Path(folder).resolve())],
        extra_compile_args={"cxx": _CXX_FLAGS, "nvcc": _CUDA_FLAGS + flags}, py_limited_api=True)
    return [extension], {"build_ext": Build}


# ------------------------------------------------------------------------------------------------- built at first use
def _load_cached() -> None:
    import torch

    folder = _sources_folder()
    flags = _architecture_flags()
    target = _cache_root() / _build_key(folder, flags) / f"{_STEM}.so"
    if not target.is_file():
        missing = _missing_tools()
        if missing:
            raise RuntimeError("bc_diffusers compiles its CUDA operators at first use, and this machine lacks for it: "
                               + "; ".join(missing))
        target.parent.mkdir(parents=True, exist_ok=True)
        with _exclusively(target.parent / "lock"):
            if not target.is_file():  # else another process built it while this one waited
                _compile(folder, target, flags)
    torch.ops.load_library(target)


def _cache_root() -> Path:
    from torch.utils.cpp_extension import get_default_build_root

    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()) / "bc_diffusers"


def _architecture_flags() -> list[str]:
    """This machine's GPUs; none where TORCH_CUDA_ARCH_LIST is set, which torch turns into flags itself."""
    if os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return []
    return [f"-gencode=arch=compute_{major}{minor},code=sm_{major}{minor}" for major, minor in _devices()]


def _build_key(folder: Path, flags: list[str]) -> str:
    import torch

    about = (torch.__version__, torch.version.cuda, _nvcc(), os.environ.get("CXX"), flags,
             os.environ.get("TORCH_CUDA_ARCH_LIST"), _CXX_FLAGS, _CUDA_FLAGS)
    return f"{source_digest(folder)}_{hashlib.sha256(repr(about).encode()).hexdigest()[:12]}"


def _nvcc() -> str | None:
    from torch.utils import cpp_extension

    nvcc = Path(cpp_extension.CUDA_HOME or "", "bin", "nvcc")
    return str(nvcc) if cpp_extension.CUDA_HOME and nvcc.is_file() else None


def _missing_tools() -> list[str]:
    """What a build would need and this machine lacks, each in words a user can act on."""
    import torch

    missing, cuda, nvcc = [], torch.version.cuda, _nvcc()
    if cuda is None:
        missing.append(f"a CUDA build of torch (this is {torch.__version__})")
    elif nvcc is None:
        missing.append(f"nvcc: install the CUDA toolkit {cuda} and set CUDA_HOME to it, or put nvcc on PATH")
    else:
        run = subprocess.run([nvcc, "--version"], capture_output=True, text=True)
        found = re.search(r"release (\d+)\.(\d+)", run.stdout)
        if found is None:
            missing.append(f"a working nvcc: {nvcc} --version said {(run.stdout + run.stderr).strip()!r}")
        elif found[1] != cuda.split(".")[0]:
            missing.append(f"the CUDA toolkit {cuda} that torch was built with: {nvcc} is {found[1]}.{found[2]}")
    compiler = os.environ.get("CXX") or "c++"
    if shutil.which(compiler.split()[0]) is None:
        missing.append(f"the C++ compiler {compiler}: install g++, or set CXX")
    if shutil.which("ninja", path=_path_with_scripts()) is None:
        missing.append("ninja: pip install ninja")
    return missing


def _path_with_scripts() -> str:
    # pip puts ninja beside the interpreter, which need not be on PATH when it is called by its full name.
    return os.pathsep.join([os.environ.get("PATH", os.defpath), os.path.dirname(sys.executable)])


@contextlib.contextmanager
def _exclusively(path: Path):
    """One process at a time. The system drops the lock with its process: a killed build blocks nobody."""
    import fcntl

    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(folder: Path, target: Path, flags: list[str]) -> None:
    from torch.utils import cpp_extension

    print(f"bc_diffusers: compiling the CUDA operators into {target.parent} (once, well under a minute)",
          file=sys.stderr, flush=True)
    work = target.parent / "work"
    shutil.rmtree(work, ignore_errors=True)  # what a killed build left, torch's own lock file too
    work.mkdir()
    path, os.environ["PATH"] = os.environ.get("PATH"), _path_with_scripts()
    try:
        built = cpp_extension.load(
            _STEM, [str(source) for source in sorted(folder.glob("*.cu"))], extra_cflags=_CXX_FLAGS,
            extra_cuda_cflags=_CUDA_FLAGS + flags, extra_include_paths=[str(folder)], build_directory=str(work),
            is_python_module=False, is_standalone=False)
    except Exception as error:
        log = target.parent / "failed.log"
        log.write_text(str(error))
        lines = str(error).splitlines() or [type(error).__name__]
        first = next((line for line in lines if re.search(r"error\b.*:|cannot find", line)), lines[-1]).strip()
        raise RuntimeError(f"bc_diffusers could not compile its CUDA operators: {first} "
                           f"(all of the compiler's output: {log})") from None
    finally:
        if path is None:
            del os.environ["PATH"]
        else:
            os.environ["PATH"] = path
    os.replace(built, target)  # complete or not there at all; it is loaded already, and a second load finds it so
    shutil.rmtree(work, ignore_errors=True)
