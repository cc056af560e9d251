"""ggml's RPC backend alone, as a module beside an llama.cpp that was built without it: seconds instead of minutes.

    python tests/support/rpc_module.py LLAMA_CPP TARGET.so
    GGML_BACKEND_PATH=TARGET.so llmrun worker

LLAMA_CPP is the folder of llama.cpp in the source archive of the very llama-cpp-python that is installed: nothing
checks that the layouts of both are the same. Needs g++.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path


def build(llama_cpp: Path, target: Path) -> Path:
    """Compile it.

    Raises:
        subprocess.CalledProcessError: it does not compile.
    """
    package = find_spec("llama_cpp")
    assert package is not None
    assert package.origin is not None
    libraries = Path(package.origin).with_name("lib")
    ggml = llama_cpp / "ggml"
    sources = [str(ggml / "src/ggml-rpc" / name) for name in ("ggml-rpc.cpp", "transport.cpp")]
    flags = ["-O2", "-std=c++17", "-fPIC", "-shared", "-DGGML_BACKEND_DL", "-DGGML_BACKEND_BUILD"]
    flags += ["-DGGML_BACKEND_SHARED", "-DGGML_SHARED", f"-I{ggml / 'include'}", f"-I{ggml / 'src'}"]
    subprocess.run(["g++", *flags, *sources, "-o", str(target), f"-L{libraries}", "-lggml-base"], check=True)
    return target


if __name__ == "__main__":
    print(build(Path(sys.argv[1]), Path(sys.argv[2])))
