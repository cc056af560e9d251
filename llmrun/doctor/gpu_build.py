"""The build of llama.cpp for this machine's GPU: the choice of its backend, its installation, and the way back.

Runs pip in the environment of this process; the trial of the new build is the caller's.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import llmrun
from llmrun.errors import LlmrunError, UsageError
from llmrun.protocol.llama_folder import CUDA, INSTALLED, is_bundled, llama_version

PACKAGE = INSTALLED
_INCLUDED = Path(llmrun.__file__).with_name("llama.cmake")  # where llmrun is installed
_STDERR = 2


@dataclass(frozen=True, slots=True)
class GpuBuild:
    """A build of llama.cpp with a backend."""

    backend: str  # "CUDA", "HIP", "SYCL", "Vulkan", "Metal" or "" for the processor alone
    flags: str  # of CMake
    folder: str = ""  # of the compiler, where that is outside PATH
    missing: str = ""  # what has to be installed before, "" for nothing

    @property
    def cmake_args(self) -> str:
        """The flags, and the file that builds each library once, without what llmrun does not use."""
        included = f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={shlex.quote(str(_INCLUDED))}" if _INCLUDED.is_file() else ""
        return " ".join(filter(None, (included, self.flags)))

    @property
    def command(self) -> str:
        """The command for a shell."""
        path = f"PATH={self.folder}:$PATH " if self.folder else ""
        text = f'{path}CMAKE_ARGS="{self.cmake_args}" pip {_arguments()}'
        if is_bundled():  # or llmrun's own would still be used
            text += f", then export LLMRUN_LLAMA={INSTALLED}"
        return f"install {self.missing}, then {text}" if self.missing else text


def _arguments() -> str:
    return f"install --force-reinstall --no-cache-dir --no-binary {PACKAGE} {PACKAGE}=={llama_version()}"


# Maker -> backend, llama.cpp's build option, its compiler, where that may be outside PATH, and what it comes with.
_TOOLKITS = {
    "NVIDIA": ("CUDA", "-DGGML_CUDA=on", "nvcc", "/usr/local/cuda/bin", "the CUDA toolkit"),
    "AMD": ("HIP", "-DGGML_HIP=on", "hipcc", "/opt/rocm/bin", "ROCm"),
    "Intel": (
        "SYCL",
        "-DGGML_SYCL=on -DCMAKE_C_COMPILER=icx -DCMAKE_CXX_COMPILER=icpx",
        "icpx",
        "/opt/intel/oneapi/compiler/latest/bin",
        "the oneAPI base toolkit",
    ),
}
_VULKAN = GpuBuild("Vulkan", "-DGGML_VULKAN=on")  # for any card
_METAL = GpuBuild("Metal", "-DGGML_METAL=on")


def gpu_build(makers: Iterable[str]) -> GpuBuild | None:
    """Return the build for the first card that one suits; None without a card.

    The maker's own toolkit comes first, then Vulkan, whose shaders glslc compiles; else the toolkit is missing.

    Args:
        makers: of the graphics cards.
    """
    if sys.platform == "darwin":
        return _METAL
    with_toolkit = [maker for maker in makers if maker in _TOOLKITS]
    for maker in with_toolkit:
        backend, flags, compiler, folder, _ = _TOOLKITS[maker]
        if shutil.which(compiler):
            return GpuBuild(backend, flags)
        if shutil.which(compiler, path=folder):
            return GpuBuild(backend, flags, folder)
    if with_toolkit and shutil.which("glslc"):
        return _VULKAN
    for maker in with_toolkit:
        backend, flags, _, _, toolkit = _TOOLKITS[maker]
        return GpuBuild(backend, flags, missing=toolkit)
    return None


def require_build(makers: Iterable[str]) -> GpuBuild:
    """Return the build to install.

    Raises:
        UsageError: there is no card, or its toolkit is missing.
    """
    build = gpu_build(makers)
    if build is None:
        raise UsageError(
            "there is no GPU to build llama.cpp for",
            why="no graphics card of NVIDIA, AMD or Intel is on the PCI bus",
            hint="in a container, pass the card in; for others, llmrun help install",
        )
    if build.missing:
        what = f"llama.cpp can't be built with {build.backend} yet"
        raise UsageError(what, why=f"{build.missing} is missing", hint=build.command)
    return build


def cuda_package(makers: Iterable[str]) -> str:
    """Return the requirement of the CUDA backend that belongs to llmrun's own llama.cpp; "" where none does."""
    fits = is_bundled() and sys.platform == "linux" and "NVIDIA" in makers
    return f"{CUDA}=={metadata.version('llmrun')}" if fits else ""


def install_package(package: str, tries: Callable[[], None]) -> bool:
    """Install a package with a backend, and try it; return whether the package index has one for this machine.

    Args:
        tries: raises if the backend does not work.

    Raises:
        LlmrunError: the trial failed, and the package is gone again.
    """
    installer = _installer()
    if subprocess.run([*installer, "install", package], stdout=_STDERR, check=False).returncode:
        return False
    try:
        tries()
    except BaseException as error:
        name = package.partition("==")[0]
        confirmed = [] if "uv" in installer else ["-y"]
        subprocess.run([*installer, "uninstall", *confirmed, name], stdout=_STDERR, check=False)
        if isinstance(error, LlmrunError):
            why = ": ".join(filter(None, (str(error), error.why)))
            raise LlmrunError(f"{name} does not work here; it is removed", why=why, hint=error.hint) from error
        raise
    return True


def install(build: GpuBuild, tries: Callable[[], None]) -> None:
    """Install a build, and try it; put the old one back if that fails or is interrupted.

    Args:
        tries: raises if the new build does not work.

    Beside the llama.cpp of llmrun's own wheel, LLMRUN_LLAMA chooses the new build, here for the trial.

    Raises:
        LlmrunError: the build or its trial failed, and the old one is back.
    """
    with _kept() as restore:
        bundled = is_bundled()
        try:
            _run_pip(build)
            if bundled:
                os.environ["LLMRUN_LLAMA"] = INSTALLED
            tries()
        except BaseException as error:
            restore()
            if bundled:
                os.environ.pop("LLMRUN_LLAMA", None)
            if isinstance(error, LlmrunError):
                what = f"llama.cpp with {build.backend} does not work here; the build before is back"
                why = ": ".join(filter(None, (str(error), error.why)))
                raise LlmrunError(what, why=why, hint=error.hint) from error
            raise


def _run_pip(build: GpuBuild) -> None:
    """Run pip, whose output goes to stderr."""
    path = os.environ.get("PATH", "")
    environment = {
        **os.environ,
        "CMAKE_ARGS": build.cmake_args,
        "PATH": f"{build.folder}{os.pathsep}{path}" if build.folder else path,
    }
    done = subprocess.run(
        [*_installer(), *shlex.split(_arguments()), "--no-deps"], env=environment, stdout=_STDERR, check=False
    )
    if done.returncode:
        raise LlmrunError(f"pip ended with status {done.returncode}", hint="its last lines say what is missing")


def _installer() -> list[str]:
    """Return the command of pip for this environment; uv's environments have none of their own."""
    probe = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False)
    if probe.returncode == 0:
        return [sys.executable, "-m", "pip"]
    if shutil.which("uv"):
        return ["uv", "pip", "--python", sys.executable]
    raise UsageError("this environment has no pip", hint=f"{sys.executable} -m ensurepip")


@contextmanager
def _kept() -> Iterator[Callable[[], None]]:
    """Copy the installed files; yield the function that puts them back."""
    kept = list(_files())
    with tempfile.TemporaryDirectory(prefix="llmrun-") as folder:
        copies = {file: Path(folder, str(number)) for number, file in enumerate(kept)}
        for file, copy in copies.items():
            shutil.copy2(file, copy)

        def restore() -> None:
            for file in list(_files()):
                file.unlink(missing_ok=True)
            for file, copy in copies.items():
                file.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(copy, file)

        yield restore


def _files() -> Iterator[Path]:
    """Yield the files of the installed package, if there is one."""
    with suppress(metadata.PackageNotFoundError):
        for file in metadata.distribution(PACKAGE).files or ():
            path = Path(str(file.locate()))
            if path.is_file():
                yield path
