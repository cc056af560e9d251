"""Submodules without their package's `__init__`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from llmrun.engine.llama.submodules import import_submodule, package_folder


def test_package_folder() -> None:
    folder = package_folder("jinja2")
    assert folder is not None
    assert (folder / "sandbox.py").is_file()
    assert package_folder("no_such_package_anywhere") is None


def test_missing_package() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_package_anywhere"):
        import_submodule("no_such_package_anywhere", "module")


def test_init_is_not_run(tmp_path: Path) -> None:
    package = tmp_path / "heavy"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('was run')\n")
    (package / "part.py").write_text("from heavy.other import VALUE\n")
    (package / "other.py").write_text("VALUE = 7\n")
    code = (
        "from llmrun.engine.llama.submodules import import_submodule\n"
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "assert import_submodule('heavy', 'part').VALUE == 7\n"
        "assert import_submodule('heavy', 'other').VALUE == 7\n"
        "import importlib.util\n"
        "assert importlib.util.find_spec('heavy').submodule_search_locations\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)
