"""The shorter build of llama-cpp-python: native/llama.cmake in a project with the parts that matter."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

INCLUDED = Path(__file__).parents[1] / "native/llama.cmake"

LLAMA_CPP_PYTHON = """
cmake_minimum_required(VERSION 3.21)
project({name} LANGUAGES CXX)
set(LLAMA_BUILD_COMMON ON CACHE BOOL "" FORCE)
add_subdirectory(vendor)
add_subdirectory(mtmd)
"""
LLAMA_CPP = """
cmake_minimum_required(VERSION 3.14...3.28)
project("llama.cpp" CXX)
option(LLAMA_BUILD_COMMON "" ON)
message(STATUS "common: ${LLAMA_BUILD_COMMON}")
"""
MTMD = """
add_library(mtmd mtmd.cpp mtmd.h models/models.h models/a.cpp models/b.cpp)
"""


@pytest.mark.skipif(not shutil.which("cmake"), reason="needs CMake")
@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
@pytest.mark.parametrize(("name", "is_shorter"), [("llama_cpp", True), ("llmrun_native", False)])
def test_common_is_left_out_and_only_graphs_are_united(tmp_path: Path, name: str, is_shorter: bool) -> None:
    """CMAKE_ARGS reaches llmrun's own build, too, which must not change."""
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
        ["cmake", "-S", str(tmp_path), "-B", str(build), include], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert f"common: {'OFF' if is_shorter else 'ON'}" in ran.stdout
    united = "".join(path.read_text() for path in build.rglob("unity_*.cxx"))
    assert [part in united for part in ("models/a.cpp", "models/b.cpp", "/mtmd.cpp")] == [is_shorter, is_shorter, False]
