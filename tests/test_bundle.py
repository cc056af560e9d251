"""native/bundle.py: a wheel of llmrun with llama.cpp in it, from two small wheels."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

SCRIPT = Path(__file__).parents[1] / "native/bundle.py"
LIBRARIES = (
    "libllama.so", "libmtmd.so", "libggml.so", "libggml-base.so", "libggml-vulkan.so",
    "libggml-cpu-x64.so", "libggml-cpu-armv8.2_1.so", "libggml-cpu-sapphirerapids.so",
)  # fmt: skip


def zipped(path: Path, files: dict[str, str]) -> Path:
    with ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def llmrun_wheel(folder: Path, requires: str = "llama-cpp-python==0.3.36") -> Path:
    info = "llmrun-1.dist-info"
    metadata = f"Name: llmrun\nRequires-Dist: {requires}\nRequires-Dist: numpy\n\nRequires-Dist: in the README\n"
    files = {"llmrun/main.py": "pass", f"{info}/METADATA": metadata, f"{info}/RECORD": "old"}
    return zipped(folder / "llmrun-1-cp311-cp311-linux_x86_64.whl", files)


def llama_wheel(folder: Path, libraries: tuple[str, ...] = LIBRARIES) -> Path:
    layer = ("__init__.py", "llama_cpp.py", "mtmd_cpp.py", "_ctypes_extensions.py", "llama.py", "server/app.py")
    files = {f"llama_cpp/{name}": name for name in layer} | {f"llama_cpp/lib/{name}": name for name in libraries}
    files |= {"llama_cpp/lib/cmake/llama.cmake": "", "include/llama.h": ""}
    files |= {"llama_cpp_python-0.3.36.dist-info/licenses/LICENSE.md": "MIT"}
    return zipped(folder / "llama_cpp_python-0.3.36-py3-none-linux_x86_64.whl", files)


def bundle(*arguments: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_each_library_once_and_no_dependency(tmp_path: Path) -> None:
    done = bundle(llmrun_wheel(tmp_path), llama_wheel(tmp_path), tmp_path / "out")
    assert done.returncode == 0, done.stderr
    with ZipFile(tmp_path / "out/llmrun-1-cp311-cp311-linux_x86_64.whl") as wheel:
        names = [name.removeprefix("llmrun/llama_cpp/") for name in wheel.namelist()]
        assert sorted(names) == sorted([
            "llmrun/main.py", "llmrun-1.dist-info/METADATA", "llmrun-1.dist-info/RECORD", "licenses/LICENSE.md",
            "__init__.py", "llama_cpp.py", "mtmd_cpp.py", "_ctypes_extensions.py",
            *(f"lib/{name}" for name in LIBRARIES if "sapphirerapids" not in name),
        ])  # fmt: skip
        assert wheel.read("llmrun/llama_cpp/__init__.py") == b'__version__ = "0.3.36"\n'
        metadata = wheel.read("llmrun-1.dist-info/METADATA").decode()
        assert metadata.split("\n\n")[0].splitlines()[1:] == [
            "Requires-Dist: typing-extensions>=4.5",
            "Requires-Dist: numpy",
        ]
        record = wheel.read("llmrun-1.dist-info/RECORD").decode().splitlines()
        assert record[-1] == "llmrun-1.dist-info/RECORD,,"
        for line in record[:-1]:
            name, digest, size = line.split(",")
            content = wheel.read(name)
            expected = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            assert (digest, size) == (f"sha256={expected}", str(len(content)))
        assert len(record) == len(names)
    assert "libllama.so" in done.stdout


@pytest.mark.parametrize("missing", ["libmtmd.so", "libggml.so"])
def test_a_library_that_is_missing(tmp_path: Path, missing: str) -> None:
    others = tuple(name for name in LIBRARIES if name != missing)
    done = bundle(llmrun_wheel(tmp_path), llama_wheel(tmp_path, others), tmp_path / "out")
    assert done.returncode == 1
    assert "native/llama_wheel.sh" in done.stderr


def test_backends_that_are_linked_are_refused(tmp_path: Path) -> None:
    linked = ("libllama.so", "libmtmd.so", "libggml.so", "libggml-base.so", "libggml-cpu.so")
    done = bundle(llmrun_wheel(tmp_path), llama_wheel(tmp_path, linked), tmp_path / "out")
    assert done.returncode == 1


def test_a_wheel_that_is_bundled_already(tmp_path: Path) -> None:
    done = bundle(llmrun_wheel(tmp_path, "typing-extensions>=4.5"), llama_wheel(tmp_path), tmp_path / "out")
    assert done.returncode == 1
    assert "already" in done.stderr


@pytest.mark.skipif(not (shutil.which("cc") and shutil.which("readelf")), reason="no compiler")
def test_a_library_that_systems_lack_is_refused(tmp_path: Path) -> None:
    """A backend may need its driver's: without it, it is not loaded."""
    source = tmp_path / "empty.c"
    source.touch()

    def linked(name: str, *needed: str) -> Path:
        path = tmp_path / name
        others = [str(tmp_path / other) for other in needed]
        command = ["cc", "-shared", "-Wl,--no-as-needed", f"-Wl,-soname,{name}", "-o", str(path), str(source)]
        subprocess.run([*command, *others], check=True)
        return path

    linked("libvulkan.so.1")
    linked("libstray.so.1")
    for name, needed, is_good in (
        ("libggml-vulkan.so", "libvulkan.so.1", True),
        ("libggml.so", "libvulkan.so.1", False),
        ("libggml-vulkan.so", "libstray.so.1", False),
    ):
        llama = llama_wheel(tmp_path, tuple(other for other in LIBRARIES if other != name))
        with ZipFile(llama, "a") as archive:
            archive.write(linked(name, needed), f"llama_cpp/lib/{name}")
        done = bundle(llmrun_wheel(tmp_path), llama, tmp_path / "out")
        assert done.returncode == (0 if is_good else 1), done.stderr
        assert ("or newer" in done.stdout) is is_good
        assert is_good or f"{name} needs {needed}" in done.stderr


def test_the_cuda_backend_in_a_wheel_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "libggml-cuda.so").write_text("library")
    command = [sys.executable, str(SCRIPT), "--cuda", str(tmp_path / "libggml-cuda.so"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "llmrun_cuda/lib/libggml-cuda.so" in done.stdout
    (wheel,) = (tmp_path / "out").iterdir()
    name, version, *tag = wheel.stem.split("-")
    with ZipFile(wheel) as archive:
        metadata = archive.read(f"{name}-{version}.dist-info/METADATA").decode()
        assert f"Version: {version}\nLicense: MIT" in metadata
        assert f"Requires-Dist: llmrun=={version}\n" in metadata
        assert f"Tag: {'-'.join(tag)}\n" in archive.read(f"{name}-{version}.dist-info/WHEEL").decode()
        assert archive.read("llmrun_cuda/lib/libggml-cuda.so") == b"library"
        record = archive.read(f"{name}-{version}.dist-info/RECORD").decode().splitlines()
    assert len(record) == 5
    assert [line.split(",")[0] for line in record] == ZipFile(wheel).namelist()
