"""Put llama.cpp into a wheel of llmrun, which then needs neither a compiler nor llama-cpp-python.

    python native/bundle.py LLMRUN_WHEEL LLAMA_CPP_PYTHON_WHEEL FOLDER
    python native/bundle.py --cuda LIBRARY FOLDER

The second wheel has its backends in files of their own (release.yml builds it, with llama.cmake). FOLDER gets the
bundled wheel: under llmrun/llama_cpp, the libraries and the three files of llama-cpp-python's ctypes layer that llmrun
imports, with their licences. The second form makes the wheel llmrun-cuda of a library that cuda_wheel.sh has built.
Prints the size of each part, and with Linux the newest glibc that one needs; a library that needs another one than
systems and drivers have is refused. Runs at a release, from a checkout; is not installed.
"""

from __future__ import annotations

import base64
import hashlib
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

LAYER = ("llama_cpp.py", "mtmd_cpp.py", "_ctypes_extensions.py")
LIBRARY = re.compile(r"llama_cpp/lib/([\w.-]+\.(?:so|dylib|dll|metal))")
LICENCE = re.compile(r"llama_cpp_python-[^/]+\.dist-info/(?:licenses/)?((?:.*/)?(?:LICEN[CS]E|AUTHORS)[^/]*)")
UNUSED = re.compile(r"(?:lib)?ggml-cpu-sapphirerapids\.(?:so|dll)")  # zen4 with AMX, whose tiles GCC miscompiles
PERMISSIONS = 0o100755 << 16
SYSTEM = {
    "libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libgcc_s.so.1", "libstdc++.so.6",
    "libgomp.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1",
}  # fmt: skip
"""Libraries that every Linux has, or that auditwheel puts beside ours."""
OF_BACKENDS = {
    "libggml-vulkan.so": {"libvulkan.so.1"},
    "libggml-cuda.so": {"libggml-base.so", "libcuda.so.1", "libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13"},
}
"""Libraries that only a backend may need: without them it is not loaded."""
OLDEST_GLIBC = 28  # 2.28, of the image that releases are built in


def parts(llama: ZipFile) -> dict[str, bytes]:
    """Return the files to add: path in llmrun's wheel -> content."""
    version = next(
        match[1] for name in llama.namelist() if (match := re.match(r"llama_cpp_python-([^/]+)\.dist", name))
    )
    files = {"__init__.py": f'__version__ = "{version}"\n'.encode()}
    files |= {name: llama.read(f"llama_cpp/{name}") for name in LAYER}
    for name in llama.namelist():
        if (match := LIBRARY.fullmatch(name)) and not UNUSED.fullmatch(match[1]):
            files[f"lib/{match[1]}"] = llama.read(name)
        elif match := LICENCE.fullmatch(name):
            files[f"licenses/{match[1]}"] = llama.read(name)
    names = " ".join(files)
    for needed in (r"llama\.", r"mtmd\.", r"ggml\.", r"ggml-base\.", r"ggml-cpu-\w+\."):
        if not re.search(rf"lib/(?:lib)?{needed}", names):
            sys.exit(
                f"no library {needed} in the wheel of llama-cpp-python: native/llama_wheel.sh builds the right one"
            )
    return {f"llmrun/llama_cpp/{name}": content for name, content in files.items()}


def without_dependency(metadata: str) -> str:
    """Return the metadata of a wheel that brings llama.cpp along; its ctypes layer imports typing_extensions."""
    changed, n_changes = re.subn(
        r"(?m)^Requires-Dist: llama-cpp-python\b.*$", "Requires-Dist: typing-extensions>=4.5", metadata
    )
    if n_changes != 1:
        sys.exit("the wheel of llmrun does not depend on llama-cpp-python: is it bundled already?")
    return changed


def bundle(wheel: Path, llama: Path, folder: Path) -> Path:
    """Write the bundled wheel into a folder, under the name of the first one; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / wheel.name
    with ZipFile(wheel) as old, ZipFile(llama) as other, ZipFile(target, "w", ZIP_DEFLATED) as new:
        files = {info: old.read(info) for info in old.infolist()}
        for name, content in parts(other).items():
            files[entry(name)] = content
        for info in [info for info in files if info.filename.endswith(".dist-info/METADATA")]:
            files[info] = without_dependency(files[info].decode()).encode()
        (record,) = [info for info in files if info.filename.endswith(".dist-info/RECORD")]
        del files[record]
        write(new, files, record)
    return target


def write(wheel: ZipFile, files: Mapping[ZipInfo, bytes], record: ZipInfo) -> None:
    """Write the files of a wheel, and the record of them."""
    lines = []
    for info, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{info.filename},sha256={digest},{len(content)}\n")
        wheel.writestr(info, content, ZIP_DEFLATED)
    wheel.writestr(record, "".join((*lines, f"{record.filename},,\n")), ZIP_DEFLATED)


def cuda_wheel(library: Path, folder: Path) -> Path:
    """Write the wheel of a CUDA backend, which belongs to the llmrun of this checkout; return its path."""
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    version = re.findall(r'(?m)^version = "(.+)"', project)[0]
    folder.mkdir(parents=True, exist_ok=True)
    content = library.read_bytes()
    tag = f"py3-none-manylinux_2_{max(needs(content)[1], OLDEST_GLIBC)}_{platform.machine()}"
    target, info = folder / f"llmrun_cuda-{version}-{tag}.whl", f"llmrun_cuda-{version}.dist-info"
    packages = (f"llmrun=={version}", "nvidia-cuda-runtime>=13,<14", "nvidia-cublas>=13,<14")
    metadata = ["Metadata-Version: 2.1", "Name: llmrun-cuda", f"Version: {version}", "License: MIT"]
    metadata += [
        "Summary: The CUDA backend of llmrun's llama.cpp",
        *(f"Requires-Dist: {package}" for package in packages),
    ]
    texts = {
        "llmrun_cuda/__init__.py": "",
        f"{info}/METADATA": "\n".join(metadata) + "\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: llmrun\nRoot-Is-Purelib: false\nTag: {tag}\n",
    }
    files = {f"llmrun_cuda/lib/{library.name}": content}
    files |= {name: text.encode() for name, text in texts.items()}
    with ZipFile(target, "w") as wheel:
        write(wheel, {entry(name): content for name, content in files.items()}, entry(f"{info}/RECORD"))
    return target


def needs(library: bytes) -> tuple[set[str], int]:
    """Return the libraries that an ELF file needs, and N of the newest glibc 2.N; nothing of another file."""
    if not library.startswith(b"\x7fELF"):
        return set(), 0
    with tempfile.NamedTemporaryFile() as file:
        file.write(library)
        file.flush()
        command = ["readelf", "--dynamic", "--version-info", "--wide", file.name]
        text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    versions = [int(version) for version in re.findall(r"GLIBC_2\.(\d+)", text)]
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", text)), max(versions, default=0)


def check_links(wheel: ZipFile) -> int:
    """Return N of the newest glibc 2.N that a library in a wheel needs; end the program if one needs others."""
    glibc, own = 0, {Path(name).name for name in wheel.namelist()}
    for name in wheel.namelist():
        libraries, newest = needs(wheel.read(name))
        others = libraries - SYSTEM - own - OF_BACKENDS.get(Path(name).name, set())
        if others:
            sys.exit(f"{name} needs {', '.join(sorted(others))}, which not every system has")
        glibc = max(glibc, newest)
    return glibc


def entry(name: str) -> ZipInfo:
    """Return the entry of a file in a wheel, which is the same in each build."""
    info = ZipInfo(name, date_time=(2020, 1, 1, 0, 0, 0))
    info.external_attr = PERMISSIONS
    return info


def main() -> None:
    if sys.argv[1] == "--cuda":
        target = cuda_wheel(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        target = bundle(*(Path(argument) for argument in sys.argv[1:4]))
    with ZipFile(target) as wheel:
        for info in wheel.infolist():
            if "/llama_cpp/" in info.filename or "/lib/" in info.filename:
                sys.stdout.write(f"{info.file_size:>12,} {info.compress_size:>12,}  {info.filename}\n")
        if glibc := check_links(wheel):
            sys.stdout.write(f"{'':>25}  glibc 2.{glibc} or newer\n")
    sys.stdout.write(f"{'':>12} {target.stat().st_size:>12,}  {target}\n")


if __name__ == "__main__":
    main()
