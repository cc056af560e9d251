"""Put llama.cpp into a wheel of llmrun, which then needs neither a compiler nor llama-cpp-python.

    python native/bundle.py LLMRUN_WHEEL LLAMA_CPP_PYTHON_WHEEL FOLDER

The second wheel has its backends in files of their own (release.yml builds it, with llama.cmake). FOLDER gets the
bundled wheel: under llmrun/llama_cpp, the libraries and the three files of llama-cpp-python's ctypes layer that llmrun
imports, with their licences. Prints the size of each part. Runs at a release, from a checkout; is not installed.
"""

from __future__ import annotations

import base64
import hashlib
import re
import sys
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

LAYER = ("llama_cpp.py", "mtmd_cpp.py", "_ctypes_extensions.py")
LIBRARY = re.compile(r"llama_cpp/lib/([\w.-]+\.(?:so|dylib|dll|metal))")
LICENCE = re.compile(r"llama_cpp_python-[^/]+\.dist-info/(?:licenses/)?((?:.*/)?(?:LICEN[CS]E|AUTHORS)[^/]*)")
UNUSED = re.compile(r"(?:lib)?ggml-cpu-sapphirerapids\.(?:so|dll)")  # zen4 with AMX, whose tiles GCC miscompiles
PERMISSIONS = 0o100755 << 16


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
    target, lines = folder / wheel.name, []
    with ZipFile(wheel) as old, ZipFile(llama) as other, ZipFile(target, "w", ZIP_DEFLATED) as new:
        files = {info: old.read(info) for info in old.infolist()}
        for name, content in parts(other).items():
            info = ZipInfo(name, date_time=(2020, 1, 1, 0, 0, 0))
            info.external_attr = PERMISSIONS
            files[info] = content
        for info, content in files.items():
            if info.filename.endswith(".dist-info/RECORD"):
                record = info
                continue
            if info.filename.endswith(".dist-info/METADATA"):
                content = without_dependency(content.decode()).encode()
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            lines.append(f"{info.filename},sha256={digest},{len(content)}\n")
            new.writestr(info, content, ZIP_DEFLATED)
        new.writestr(record, "".join((*lines, f"{record.filename},,\n")), ZIP_DEFLATED)
    return target


def main() -> None:
    target = bundle(*(Path(argument) for argument in sys.argv[1:4]))
    with ZipFile(target) as wheel:
        for info in wheel.infolist():
            if "/llama_cpp/" in info.filename:
                sys.stdout.write(f"{info.file_size:>12,} {info.compress_size:>12,}  {info.filename}\n")
    sys.stdout.write(f"{'':>12} {target.stat().st_size:>12,}  {target}\n")


if __name__ == "__main__":
    main()
