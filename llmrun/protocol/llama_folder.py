"""The folder of llama.cpp: in llmrun's own wheel, or of an installed llama-cpp-python.

The wheel of a release brings llama.cpp along; a source install depends on llama-cpp-python. Front and engine both ask;
a start imports nothing here.
"""

from __future__ import annotations

import os
import re
from importlib import util
from pathlib import Path

from llmrun.errors import UsageError

INSTALLED = "llama-cpp-python"
"""Value of LLMRUN_LLAMA that prefers the installed package to the wheel's own."""
CUDA = "llmrun-cuda"
"""The package with a CUDA backend for the wheel's own llama.cpp (native/cuda_wheel.sh)."""
KERNELS_VARIABLE = "LLMRUN_KERNELS"
"""Chooses the matrix kernels: an instruction set of llmrun's own, or GGML; unset, llmrun's best."""
GGML = "ggml"
"""The value that leaves all products to ggml."""
_BUNDLED = Path(__file__).parents[1] / "llama_cpp"  # put there by native/bundle.py


def is_bundled() -> bool:
    """Return whether the llama.cpp of llmrun's own wheel is in use.

    Raises:
        UsageError: LLMRUN_LLAMA has an unknown value.
    """
    chosen = os.environ.get("LLMRUN_LLAMA", "")
    if chosen not in ("", INSTALLED):
        raise UsageError(
            f"LLMRUN_LLAMA is {chosen}",
            hint=f"LLMRUN_LLAMA={INSTALLED} uses that package; LLAMA_CPP_LIB_PATH=FOLDER uses other libraries",
        )
    return not chosen and _BUNDLED.is_dir()


def package_folder() -> Path | None:
    """Return the folder of the ctypes layer in use; None without one. Raises as is_bundled()."""
    if is_bundled():
        return _BUNDLED
    return folder_of("llama_cpp")


def own_kernels_wanted() -> bool:
    """Return whether llmrun's own matrix kernels may compute: if they are chosen; without a choice, on x86.

    On Arm they are right, but were measured on no machine yet.
    """
    chosen = os.environ.get(KERNELS_VARIABLE, "").lower()
    is_x86 = hasattr(os, "uname") and os.uname().machine in ("x86_64", "amd64")  # there are none for Windows
    return chosen != GGML if chosen else is_x86


def choose_kernels(name: str) -> None:
    """Let the engines of this process compute with these matrix kernels: an instruction set's, or GGML, in any case.

    Raises:
        UsageError: this processor has none of that name.
    """
    from llmrun import _native  # few commands choose

    known = {each.lower(): each for each in (GGML, *_native.available_kernels())}
    if name.lower() not in known:
        raise UsageError(f"invalid --kernels {name}", why=f"must be one of {', '.join(known.values())} here")
    os.environ[KERNELS_VARIABLE] = known[name.lower()]


def chosen_kernels() -> dict[str, str]:
    """Return the environment variable that chooses the kernels, if it is set."""
    value = os.environ.get(KERNELS_VARIABLE, "")
    return {KERNELS_VARIABLE: value} if value else {}


def folder_of(package: str) -> Path | None:
    """Return an installed package's folder without importing it; None if it is not installed."""
    spec = util.find_spec(package)
    locations = spec.submodule_search_locations if spec else None
    return Path(next(iter(locations))) if locations else None


def llama_version() -> str:
    """Return the version of llama-cpp-python whose llama.cpp is in use; "" without one. Raises as is_bundled()."""
    if is_bundled():
        text = (_BUNDLED / "__init__.py").read_text(encoding="utf-8")
        return "".join(re.findall(r'__version__ = "(.+)"', text))
    return _installed_version(INSTALLED)


def backend_folders() -> list[Path]:
    """Return the folders with backends: the libraries', and with the wheel's own that of an installed llmrun-cuda.

    Its version has to be llmrun's: ggml's structs are the same then. Raises as is_bundled().
    """
    folders = [folder] if (folder := library_folder()) else []
    package = folder_of("llmrun_cuda") if is_bundled() and not os.environ.get("LLAMA_CPP_LIB_PATH") else None
    if package is not None:
        version = _installed_version(CUDA)
        if version and version == _installed_version("llmrun"):
            folders.append(package / "lib")
    return folders


def _installed_version(package: str) -> str:
    """Return the version of an installed package; "" if it is not installed."""
    from importlib import metadata  # 8 ms, and no start of a source install needs it

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def has_variants() -> bool:
    """Return whether the processor's backend has variants, each in a file. Raises as is_bundled()."""
    folder = library_folder()
    return folder is not None and len([*folder.glob("*ggml-cpu-*")]) > 1


def library_folder() -> Path | None:
    """Return the folder of the libraries in use; None without one. Raises as is_bundled()."""
    if os.environ.get("LLAMA_CPP_LIB_PATH"):
        return Path(os.environ["LLAMA_CPP_LIB_PATH"])
    package = package_folder()
    return package / "lib" if package else None
