"""The build of llama-cpp-python as llmrun wants it: native/llama.cmake in a project with the parts that matter."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import llmrun

PACKAGE_PARENT = Path(llmrun.__file__).parents[1]
INCLUDED = Path(__file__).parents[1] / "native/llama.cmake"

LLAMA_CPP_PYTHON = """
cmake_minimum_required(VERSION 3.21)
project({name} LANGUAGES CXX)
set(LLAMA_BUILD_COMMON ON CACHE BOOL "" FORCE)
add_subdirectory(vendor)
add_subdirectory(mtmd)
message(STATUS "native: ${GGML_NATIVE}; AVX2: ${GGML_AVX2}; AVX512: ${GGML_AVX512}; AMX: ${GGML_AMX_INT8}")
"""
LLAMA_CPP = """
cmake_minimum_required(VERSION 3.14...3.28)
project("llama.cpp" CXX)
option(LLAMA_BUILD_COMMON "" ON)
option(GGML_NATIVE "" ON)
include(GNUInstallDirs)
add_library(ggml SHARED ../mtmd/mtmd.cpp)
set_target_properties(ggml PROPERTIES VERSION 1.2.3 SOVERSION 1)
install(TARGETS ggml LIBRARY)
message(STATUS "common: ${LLAMA_BUILD_COMMON}")
"""
MTMD = """
add_library(mtmd mtmd.cpp mtmd.h models/models.h models/a.cpp models/b.cpp)
"""


def test_python_m_pytest_imports_the_installed_package(tmp_path: Path) -> None:
    """In a checkout, whose sources have no native module; without an installed one, that is said once."""
    root = Path(__file__).parents[1]
    files = {"pyproject.toml": (root / "pyproject.toml").read_text(), "llmrun/__init__.py": ""}
    files |= {"tests/conftest.py": (root / "tests/conftest.py").read_text()}
    files["tests/test_it.py"] = "def test_it():\n    import llmrun._native\n    import llmrun.errors\n"
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    def test(*flags: str) -> subprocess.CompletedProcess[str]:
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, flags))
        command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "tests"]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)

    found = test(str(PACKAGE_PARENT))
    assert (found.returncode, "1 passed" in found.stdout) == (0, True), found.stdout + found.stderr
    hidden = tmp_path / "hidden/llmrun/__init__.py"
    hidden.parent.mkdir(parents=True)
    hidden.write_text("")
    missing = test(str(tmp_path / "hidden"))
    told = missing.stdout + missing.stderr
    assert (missing.returncode, told.count("llmrun is not installed here"), len(told.splitlines())) == (1, 1, 1), told


def configure(tmp_path: Path, name: str, *flags: str) -> str:
    """Configure a project of this name that looks like llama-cpp-python's; return CMake's messages."""
    files = {"CMakeLists.txt": LLAMA_CPP_PYTHON.replace("{name}", name)}
    files |= {"vendor/CMakeLists.txt": LLAMA_CPP, "mtmd/CMakeLists.txt": MTMD}
    files |= {
        f"mtmd/{source}": "" for source in ("mtmd.cpp", "mtmd.h", "models/models.h", "models/a.cpp", "models/b.cpp")
    }
    for file, content in files.items():
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    include = f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={INCLUDED}"
    build = tmp_path / "build"
    ran = subprocess.run(
        ["cmake", "-S", str(tmp_path), "-B", str(build), include, *flags], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.skipif(not shutil.which("cmake"), reason="needs CMake")
@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
@pytest.mark.parametrize(("name", "is_shorter"), [("llama_cpp", True), ("llmrun_native", False)])
def test_common_is_left_out_and_only_graphs_are_united(tmp_path: Path, name: str, is_shorter: bool) -> None:
    """CMAKE_ARGS reaches llmrun's own build, too, which must not change."""
    configured = configure(tmp_path, name)
    assert f"common: {'OFF' if is_shorter else 'ON'}" in configured
    united = "".join(path.read_text() for path in (tmp_path / "build").rglob("unity_*.cxx"))
    assert [part in united for part in ("models/a.cpp", "models/b.cpp", "/mtmd.cpp")] == [is_shorter, is_shorter, False]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="names of Linux's libraries")
@pytest.mark.skipif(not shutil.which("cmake"), reason="needs CMake")
@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
@pytest.mark.parametrize("flags", [(), ("-DGGML_NATIVE=OFF",)])
def test_each_library_is_installed_once_and_instruction_sets_are_named(tmp_path: Path, flags: tuple[str, ...]) -> None:
    configured = configure(tmp_path, "llama_cpp", *flags)
    build, site = tmp_path / "build", tmp_path / "site"
    for command in (("--build", str(build)), ("--install", str(build), "--prefix", str(site))):
        subprocess.run(["cmake", *command], capture_output=True, check=True)
    assert [path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()] == [
        "llama_cpp/lib/libggml.so"
    ]
    line = re.findall("native: .*", configured)[0]
    if flags:  # for any processor: what llama.cpp chooses
        assert line == "native: OFF; AVX2: ; AVX512: ; AMX: "
    elif platform.machine() == "x86_64" and is_gcc():
        macros = subprocess.run(
            ["c++", "-march=native", "-dM", "-E", "-x", "c++", "/dev/null"], capture_output=True, text=True, check=True
        ).stdout
        has = {name: "ON" if f"__{name}__ 1" in macros else "OFF" for name in ("AVX2", "AVX512BW")}
        assert line == f"native: OFF; AVX2: {has['AVX2']}; AVX512: {has['AVX512BW']}; AMX: "


def is_gcc() -> bool:
    version = subprocess.run(["c++", "--version"], capture_output=True, text=True, check=True).stdout
    return "clang" not in version
