"""llama.cpp's library, loaded through the ctypes layer of llama-cpp-python, installed or in llmrun's own wheel.

Owns the version, the backends and the choice of kernels at load time. A package's `__init__` that imports much that we
never use is not executed: llama-cpp-python's imports numpy, jinja2 and diskcache, which takes a third of a second.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from llmrun import _native
from llmrun.errors import LlmrunError, UsageError
from llmrun.protocol.llama_folder import (
    GGML,
    KERNELS_VARIABLE,
    backend_folders,
    folder_of,
    own_kernels_wanted,
    package_folder,
)

VERSION = "0.3.36"
_LIBRARY = re.compile(r"(llama|ggml)[^/]*\.(so|dylib|dll)")
_VARIANT = re.compile(r"(?:lib)?ggml-cpu-([\w.]+)\.(?:so|dll)")  # a backend is no .dylib on macOS either
# Their kernels differ from those of skylakex and zen4 in little that a quantized model computes.
_ALIKE = frozenset({"cannonlake", "cascadelake", "cooperlake", "icelake"})
_REGISTRY_FUNCTION = 8  # struct ggml_backend_reg: api_version, then pointers to functions of the backend
_MOST_VARIANTS = 4  # that are compared; others have far fewer instruction sets
_LOG_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
# sizeof of structs passed by value, on 64-bit machines; another layout would corrupt memory silently.
_SIZES = {"llama_model_params": 80, "llama_context_params": 160, "llama_batch": 56}
# C name, and the mangled ones of GCC and Clang, and of Visual C++.
_NEXTN_NAMES = (
    (
        "llama_set_embeddings_nextn",
        "_Z26llama_set_embeddings_nextnP13llama_contextbb",
        "?llama_set_embeddings_nextn@@YAXPEAUllama_context@@_N1@Z",
    ),
    (
        "llama_get_embeddings_nextn",
        "_Z26llama_get_embeddings_nextnP13llama_context",
        "?llama_get_embeddings_nextn@@YAPEAMPEAUllama_context@@@Z",
    ),
    (
        "llama_get_embeddings_nextn_ith",
        "_Z30llama_get_embeddings_nextn_ithP13llama_contexti",
        "?llama_get_embeddings_nextn_ith@@YAPEAMPEAUllama_context@@H@Z",
    ),
)
_CPU_DEVICE = 0  # GGML_BACKEND_DEVICE_TYPE_CPU
_BUFFER_TYPE_FUNCTIONS = 6  # struct ggml_backend_buffer_type: pointers to functions, the device, an object
_installed: dict[int, str] = {}  # buffer types that our kernels answer for: ggml's pointer -> instruction set
_no_kernels = "llama.cpp is not loaded"
_SMALL_STACK = ctypes.create_string_buffer(2048)  # Linux's MINSIGSTKSZ on x86; tiles need 8 KiB more


def import_submodule(package: str, name: str, folder: Path | None = None) -> ModuleType:
    """Import `package.name` without running the package's `__init__`.

    An empty package object with the right `__path__` stands in for the real one. Only the engine process does this: no
    other code there imports these packages.

    Args:
        folder: of the package, if that is not where Python would look.

    Raises:
        ImportError: there is no such package or module.
    """
    if package not in sys.modules:
        folder = folder or folder_of(package)
        if folder is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        stand_in = ModuleType(package)
        stand_in.__path__ = [str(folder)]
        spec = ModuleSpec(package, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        stand_in.__spec__ = spec  # or find_spec() would raise later
        sys.modules[package] = stand_in
    return importlib.import_module(f"{package}.{name}")


@functools.cache
def import_llama() -> Any:
    """Import llama_cpp.llama_cpp without its package's `__init__`.

    Raises:
        LlmrunError: llama-cpp-python is missing, or has another version.
    """
    folder = package_folder()
    if folder is None:
        raise LlmrunError("llama-cpp-python is not installed", hint=f"pip install llama-cpp-python=={VERSION}")
    version = re.search(r'__version__ = "([^"]+)"', (folder / "__init__.py").read_text(encoding="utf-8"))
    if not version or version[1] != VERSION:
        raise LlmrunError(
            f"llama-cpp-python is version {version[1] if version else 'unknown'}",
            why=f"llmrun is written for the memory layout of {VERSION}",
            hint=f"pip install llama-cpp-python=={VERSION}",
        )
    with _small_signal_stack():
        llama = import_submodule("llama_cpp", "llama_cpp", folder)
        _load_backends(llama._lib)
        _choose_kernels(llama._lib)
    for struct, size in _SIZES.items():
        if ctypes.sizeof(getattr(llama, struct)) != size:
            raise LlmrunError(f"{struct} of llama-cpp-python has an unexpected size on this platform")
    return llama


@functools.cache
def build() -> str:
    """Return what identifies the build of llama.cpp that is in use: its version, and its libraries' sizes and times."""
    folder = Path(import_llama()._lib._name).parent
    libraries = sorted(path for path in folder.iterdir() if path.is_file() and _LIBRARY.search(path.name))
    stats = (path.stat() for path in libraries)
    return " ".join((VERSION, *(f"{stat.st_size}-{stat.st_mtime_ns}" for stat in stats)))


def import_mtmd() -> Any:
    """Import llama_cpp.mtmd_cpp, which encodes images, without its package's `__init__`."""
    import_llama()
    return import_submodule("llama_cpp", "mtmd_cpp")  # from the same folder


def start() -> None:
    import_llama().llama_backend_init()


def function(name: str, result: Any, *arguments: Any) -> Any:
    """Return a function of the library with this C signature; llama-cpp-python's own binding stays unchanged."""
    pointer = import_llama()._lib[name]
    pointer.restype, pointer.argtypes = result, arguments
    return pointer


def address(name: str) -> int:
    """Return the address of a function of the library, for native code."""
    return ctypes.cast(import_llama()._lib[name], ctypes.c_void_p).value or 0


class NextnFunctions(NamedTuple):
    """llama.cpp's functions for multi-token prediction, which are exported with C++ names."""

    set_embeddings: Any  # context, on, only rows with logits
    get_embeddings: Any  # context -> hidden states of the last batch's rows
    get_embedding: Any  # context, row -> its hidden state


@functools.cache
def nextn_functions() -> NextnFunctions | None:
    """Return the functions; None if this build has them under no known name."""
    library, pointer = import_llama()._lib, ctypes.c_void_p
    exported = [_exported(library, *names) for names in _NEXTN_NAMES]
    if None in exported:
        return None
    functions = NextnFunctions(*exported)
    functions.set_embeddings.argtypes, functions.set_embeddings.restype = (pointer, ctypes.c_bool, ctypes.c_bool), None
    functions.get_embeddings.argtypes, functions.get_embeddings.restype = (pointer,), pointer
    functions.get_embedding.argtypes, functions.get_embedding.restype = (pointer, ctypes.c_int32), pointer
    return functions


def _exported(library: Any, *names: str) -> Any:
    """Return the first of these functions that a library exports; None without any."""
    for name in names:
        with suppress(AttributeError):
            return library[name]
    return None


def bytes_of(data: bytearray | memoryview) -> Any:
    """Return the memory of bytes that can be written for llama.cpp, without a copy."""
    return (ctypes.c_uint8 * len(data)).from_buffer(data)


class _SignalStack(ctypes.Structure):
    _fields_ = (("pointer", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@contextmanager
def _small_signal_stack() -> Iterator[None]:
    """Make Linux refuse Intel's AMX tiles in the block: GCC miscompiles ggml's tile set-up, and prompts would crash.

    See ggml-org/llama.cpp issue 20824 and pull request 26954. The kernel grants tiles only if every thread's signal
    stack could hold them, so a small one on this thread makes ggml fall back to its AVX-512 kernels. The thread gets
    its own stack back afterwards: a signal handler would not fit on the small one.
    """
    if not sys.platform.startswith("linux"):
        yield
        return
    sigaltstack = ctypes.CDLL(None).sigaltstack
    small = _SignalStack(ctypes.addressof(_SMALL_STACK), 0, len(_SMALL_STACK))
    before = _SignalStack()
    sigaltstack(ctypes.byref(small), ctypes.byref(before))
    try:
        yield
    finally:
        sigaltstack(ctypes.byref(before), None)


def _load_backends(library: Any) -> None:
    """Load the backends of a build that has each in a file of its own, and the best variant for this processor.

    A backend that this machine can't load is passed over, e.g. Vulkan without its loader.

    Raises:
        UsageError: LLMRUN_CPU names a variant that is not there, or not for this processor.
    """
    pointer, folder = ctypes.c_void_p, Path(library._name).parent
    library.ggml_backend_reg_by_name.restype = library.ggml_backend_load.restype = pointer
    if library.ggml_backend_reg_by_name(b"CPU"):
        return  # linked to them
    silent = _LOG_CALLBACK(lambda level, text, data: None)
    library.ggml_log_set(silent, None)
    try:
        for backends in (folder, *backend_folders()[1:]):
            library.ggml_backend_load_all_from_path(os.fsencode(backends))
        variant = os.environ.get("LLMRUN_CPU")
        if variant and not _exchange_variant(library, variant):
            raise UsageError(
                f"this processor can't run LLMRUN_CPU={variant}",
                hint=f"one of {', '.join(sorted(cpu_variants(folder)))}, or unset it",
            )
    finally:
        library.ggml_log_set(None, None)


def _exchange_variant(library: Any, name: str) -> bool:
    """Replace the processor's backend by a variant; return False if this processor can't run it."""
    variants, before = cpu_variants(Path(library._name).parent), _variant_in_use(library)
    if name == before or name not in variants:  # a file that is loaded twice would be unloaded whole
        return name == before
    library.ggml_backend_unload(ctypes.c_void_p(library.ggml_backend_reg_by_name(b"CPU")))
    if library.ggml_backend_load(os.fsencode(variants[name])):
        return True
    if before:
        library.ggml_backend_load(os.fsencode(variants[before]))
    return False


def use_variant(name: str) -> None:
    """Compute with another variant of the processor's backend from now on, unless LLMRUN_CPU has chosen one.

    No model may be open: its buffers are the old variant's. A variant that this processor can't run changes nothing.

    Args:
        name: "" for the one that ggml chose at the start.
    """
    library, first = import_llama()._lib, _first_variant()
    name = name or first
    if name != cpu_variant() and not os.environ.get("LLMRUN_CPU") and _exchange_variant(library, name):
        _choose_kernels(library)


@functools.cache
def _first_variant() -> str:
    return cpu_variant()


def cpu_variants(folder: Path) -> dict[str, Path]:
    """Return the variants of the processor's backend in a folder: name -> file."""
    matches = ((_VARIANT.fullmatch(path.name), path) for path in folder.iterdir())
    return {match[1]: path for match, path in matches if match}


def runnable_variants() -> dict[str, int]:
    """Return the variants that this processor can run, each with ggml's pointer to its device.

    The one that ggml chooses comes first, then those with most instruction sets; none where the backend is linked.
    """
    if not (chosen := _first_variant()):
        return {}
    scores, libraries = dict[str, int](), dict[str, Any]()
    for name, path in cpu_variants(Path(import_llama()._lib._name).parent).items():
        with suppress(OSError, AttributeError), _small_signal_stack():
            libraries[name] = ctypes.CDLL(str(path))
            scores[name] = libraries[name].ggml_backend_score()
    names = sorted((name for name in scores if scores[name]), key=lambda name: (name != chosen, -scores[name]))
    return {name: _device_of(libraries[name]) for name in names}


def distinct_variants() -> dict[str, int]:
    """Return the first few of runnable_variants() that are worth a comparison with ggml's choice."""
    devices = runnable_variants()
    names = [name for name in devices if name == _first_variant() or name not in _ALIKE]
    return {name: devices[name] for name in names[:_MOST_VARIANTS]}


def _device_of(backend: Any) -> int:
    """Return the device of the processor's backend in a library of its own."""
    pointer = ctypes.c_void_p
    backend.ggml_backend_init.restype = pointer
    device = function("ggml_backend_reg_dev_get", pointer, pointer, ctypes.c_size_t)
    return int(device(backend.ggml_backend_init(), 0))


def cpu_variant() -> str:
    """Return the name of the variant in use; "" where the backend is linked, or the system can't tell."""
    return _variant_in_use(import_llama()._lib)


def _variant_in_use(library: Any) -> str:
    match = _VARIANT.fullmatch(Path(_cpu_library_path(library)).name)
    return match[1] if match else ""


def _cpu_library_path(library: Any) -> str:
    """Return the path of the processor's backend; "" if the system can't tell."""
    if sys.platform == "win32":
        return ""
    pointer = ctypes.c_void_p
    info = (pointer * 4)()  # struct Dl_info, which begins with the file's name
    library.ggml_backend_reg_by_name.restype = pointer
    address = pointer.from_address(library.ggml_backend_reg_by_name(b"CPU") + _REGISTRY_FUNCTION)
    if not ctypes.CDLL(None).dladdr(address, info):
        return ""
    return os.fsdecode(ctypes.string_at(info[0] or 0))


def _cpu_library(library: Any) -> Any:
    """Return the library of the processor's backend; the one that links it if the system can't tell."""
    path = _cpu_library_path(library)
    return ctypes.CDLL(path) if path else library


def _choose_kernels(library: Any) -> None:
    """Make ggml choose now which of the processor's special kernels it uses; the choice is final. Then add ours."""
    pointer, names = ctypes.c_void_p, "ggml_backend_dev_by_type ggml_backend_dev_backend_reg"
    for name in (*names.split(), "ggml_backend_reg_get_proc_address", "ggml_backend_buft_get_device"):
        getattr(library, name).restype = pointer
    device = library.ggml_backend_dev_by_type(_CPU_DEVICE)
    registry = library.ggml_backend_dev_backend_reg(pointer(device))
    address = library.ggml_backend_reg_get_proc_address(pointer(registry), b"ggml_backend_dev_get_extra_bufts")
    if address:
        kinds = ctypes.CFUNCTYPE(ctypes.POINTER(pointer), pointer)(address)(device)
        _install_kernels(library, _repacking_type(library, kinds))


def _repacking_type(library: Any, kinds: Any) -> int | None:
    """Return the buffer type for repacked weights; the others, e.g. AMX's, have layouts that our kernels don't know."""
    library.ggml_backend_buft_name.restype = ctypes.c_char_p
    index = 0
    while kinds and kinds[index]:
        if library.ggml_backend_buft_name(ctypes.c_void_p(kinds[index])) == b"CPU_REPACK":
            return int(kinds[index])
        index += 1
    return None


def _install_kernels(library: Any, buffer_type: int | None) -> None:
    """Let our own kernels compute the products they can (native/ggml_kernels.hpp), or remember why they can't.

    LLMRUN_KERNELS names the instruction set that they use, or ggml for none of them.
    """
    global _no_kernels
    names = _native.available_kernels()
    wanted = os.environ.get(KERNELS_VARIABLE) or (names[-1] if names else "")
    wanted = next((name for name in names if name.lower() == wanted.lower()), wanted)
    _native.enable_kernels(own_kernels_wanted())
    barrier = _exported(_cpu_library(library), "ggml_barrier")
    if not own_kernels_wanted():
        _no_kernels = f"{KERNELS_VARIABLE}={GGML}"
    elif not buffer_type:
        _no_kernels = "this build of llama.cpp has no place for them"
    elif buffer_type in _installed:
        _no_kernels = ""
    elif wanted not in names:
        _no_kernels = f"none for {wanted or 'this processor'}"
    elif barrier is None or not _has_known_layout(library, buffer_type):
        _no_kernels = "this build of llama.cpp has another interface"
    else:
        calls = (library.ggml_backend_buffer_is_host, barrier)
        is_host, wait = (ctypes.cast(call, ctypes.c_void_p).value or 0 for call in calls)
        _native.install_kernels(buffer_type, is_host, wait, wanted)
        _installed[buffer_type] = wanted
        _no_kernels = ""


def _has_known_layout(library: Any, buffer_type: int) -> bool:
    """Return whether struct ggml_backend_buffer_type is the one that our kernels know: its device, then an object."""
    fields = (ctypes.c_void_p * (_BUFFER_TYPE_FUNCTIONS + 2)).from_address(buffer_type)
    device = library.ggml_backend_buft_get_device(ctypes.c_void_p(buffer_type))
    return fields[_BUFFER_TYPE_FUNCTIONS] == device and bool(fields[_BUFFER_TYPE_FUNCTIONS + 1])


def kernels() -> Kernels:
    """Return what our own kernels use, and why they can't be used."""
    import_llama()
    return Kernels(next(reversed(_installed.values()), "") if not _no_kernels else "", _no_kernels)


class Kernels(NamedTuple):
    """Our own matrix kernels in the processor's backend.

    Attributes:
        name: their instruction set, e.g. "AVX-512 VNNI"; "" if there are none.
        problem: why there are none.
    """

    name: str
    problem: str
