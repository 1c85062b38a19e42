"""Finding and building the compiled operators: what decides about a rebuild, what is said when a tool is missing."""

import multiprocessing
import os
import shutil
import stat
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from bc_diffusers._layout import kernels_folder
from bc_diffusers.ops import library


@pytest.fixture
def sources(tmp_path):
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "a.cu").write_text("int a;")
    (folder / "b.h").write_text("// b")
    (folder / "notes.md").write_text("not compiled")
    return folder


@pytest.fixture
def toolkit(tmp_path, monkeypatch):
    """A machine with all that a build needs; nvcc is a script that only knows its version."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("nvcc", "c++", "ninja"):
        script(tools / name, "echo Cuda compilation tools, release 13.0, V13.0.88")
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.delenv("CXX", raising=False)
    return tools


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_the_digest_follows_every_source_and_nothing_else(sources):
    digests = [library.source_digest(sources)]
    for name, text in (("a.cu", "int b;"), ("b.h", "// c"), ("c.cu", "int c;")):
        (sources / name).write_text(text)
        digests.append(library.source_digest(sources))
    (sources / "c.cu").rename(sources / "d.cu")
    digests.append(library.source_digest(sources))
    assert len(set(digests)) == len(digests)
    (sources / "notes.md").write_text("changed")
    assert library.source_digest(sources) == digests[-1]


def test_a_build_is_kept_until_sources_torch_architectures_or_toolkit_change(sources, toolkit, monkeypatch):
    def key(flags=("-gencode=arch=compute_90,code=sm_90",)):
        return library._build_key(sources, list(flags))

    first = key()
    assert key() == first
    assert key(["-gencode=arch=compute_80,code=sm_80"]) != first
    for change in (lambda m: m.setattr(torch, "__version__", "2.99"),
                   lambda m: m.setattr(torch.version, "cuda", "14.1"),
                   lambda m: m.setenv("TORCH_CUDA_ARCH_LIST", "9.0"),
                   lambda m: m.setenv("CXX", "clang++"),
                   lambda m: m.setattr(cpp_extension, "CUDA_HOME", None)):
        with monkeypatch.context() as m:
            change(m)
            assert key() != first
    assert key() == first
    (sources / "a.cu").write_text("int changed;")
    assert key() != first


def test_names_every_missing_tool(toolkit, monkeypatch, tmp_path):
    assert library._missing_tools() == []
    with monkeypatch.context() as m:
        m.setenv("PATH", str(tmp_path))
        m.setattr(cpp_extension, "CUDA_HOME", None)
        nvcc, compiler, ninja = library._missing_tools()
    assert "CUDA toolkit 13.0" in nvcc and "CUDA_HOME" in nvcc
    assert "install g++" in compiler and "pip install ninja" in ninja
    with monkeypatch.context() as m:
        m.setattr(torch.version, "cuda", None)
        assert "a CUDA build of torch" in library._missing_tools()[0]
    script(toolkit / "nvcc", "echo Cuda compilation tools, release 12.4, V12.4.1")
    assert library._missing_tools() == [f"the CUDA toolkit 13.0 that torch was built with: {toolkit}/nvcc is 12.4"]
    script(toolkit / "nvcc", "echo cannot run >&2; exit 1")
    assert library._missing_tools() == [f"a working nvcc: {toolkit}/nvcc --version said 'cannot run'"]


def test_a_missing_tool_is_one_error(toolkit, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    (toolkit / "nvcc").unlink()
    with pytest.raises(RuntimeError, match="compiles its CUDA operators at first use, and this machine lacks for it: "
                                           "nvcc: install the CUDA toolkit 13.0 and set CUDA_HOME") as error:
        library._load_cached()
    assert "\n" not in str(error.value)
    assert not (tmp_path / "cache").exists()


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_a_source_that_does_not_compile_is_one_error_with_a_log(sources, tmp_path, monkeypatch):
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(Path(shutil.which("nvcc")).resolve().parents[1]))
    (sources / "a.cu").write_text("int f() { return undeclared; }")
    target = tmp_path / "cache" / "key" / "_cuda_ops.so"
    target.parent.mkdir(parents=True)
    with pytest.raises(RuntimeError, match='could not compile .* "undeclared" is undefined') as error:
        library._compile(sources, target, ["-gencode=arch=compute_90,code=sm_90"])
    assert "\n" not in str(error.value)
    assert "undeclared" in (target.parent / "failed.log").read_text()
    assert not target.exists()


def _pretend_to_build(folder, cache, started, builds):
    """Runs in a process of its own: the real locking around a compilation that only takes its time."""
    os.environ["TORCH_EXTENSIONS_DIR"] = str(cache)
    library._sources_folder = lambda: folder
    library._missing_tools = lambda: []
    torch.ops.load_library = lambda path: builds.put("loaded" if Path(path).is_file() else "not there")

    def compile(folder, target, flags):
        builds.put("built")
        started.wait(20)  # the other process is waiting for the lock, or will be
        target.write_text("library")

    library._compile = compile
    library._load_cached()


def test_two_processes_build_once(sources, tmp_path):
    spawn = multiprocessing.get_context("fork")
    started, builds = spawn.Event(), spawn.Queue()
    both = [spawn.Process(target=_pretend_to_build, args=(sources, tmp_path / "cache", started, builds))
            for _ in range(2)]
    for process in both:
        process.start()
    assert builds.get(timeout=20) == "built"
    started.set()
    assert sorted(builds.get(timeout=20) for _ in range(2)) == ["loaded", "loaded"]
    for process in both:
        process.join(20)
        assert process.exitcode == 0


def test_an_installed_library_is_taken_where_its_machine_code_runs():
    names = ["80", "86", "89", "90", "100", "120ptx"]
    for device in ((8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1), (13, 0)):
        assert library._runs_on(names, device), device
    for device in ((7, 5), (11, 0)):
        assert not library._runs_on(names, device), device
    assert not library._runs_on(["90"], (10, 0))


def test_nothing_is_built_at_install_time_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert library.ahead_of_time(kernels_folder()) == ([], {})


def test_install_time_build_names_digest_and_architectures(sources, toolkit, monkeypatch):
    script(toolkit / "nvcc", "case $1 in --list-gpu-arch) echo compute_80 compute_90 compute_120;; "
           "*) echo release 13.0;; esac")
    (extension,), commands = library.ahead_of_time(sources)
    assert extension.name == f"bc_diffusers._cuda_ops_{library.source_digest(sources)}_80_90_120ptx"
    assert "-gencode=arch=compute_120,code=compute_120" in extension.extra_compile_args["nvcc"]
    assert [Path(source).name for source in extension.sources] == ["a.cu"] and "build_ext" in commands
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.6;9.0+PTX")
    assert library.ahead_of_time(sources)[0][0].name.endswith("_86_90ptx")
    monkeypatch.setenv("BC_DIFFUSERS_BUILD_OPS", "0")
    assert library.ahead_of_time(sources) == ([], {})
