"""Import of a package's submodule without running the package's `__init__`, which imports much that we never use.

An empty package object with the right `__path__` stands in for the real one. Only the engine process does this: no
other code there imports these packages.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType


def package_folder(package: str) -> Path | None:
    """Return an installed package's folder without importing it; None if it is not installed."""
    spec = importlib.util.find_spec(package)
    locations = spec.submodule_search_locations if spec else None
    return Path(next(iter(locations))) if locations else None


def import_submodule(package: str, name: str, folder: Path | None = None) -> ModuleType:
    """Import `package.name`.

    Args:
        folder: of the package, if that is not where Python would look.

    Raises:
        ImportError: there is no such package or module.
    """
    if package not in sys.modules:
        folder = folder or package_folder(package)
        if folder is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        stand_in = ModuleType(package)
        stand_in.__path__ = [str(folder)]
        spec = ModuleSpec(package, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        stand_in.__spec__ = spec  # or find_spec() would raise later
        sys.modules[package] = stand_in
    return importlib.import_module(f"{package}.{name}")
