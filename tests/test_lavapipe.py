"""tests/gpu/lavapipe.sh with programs that fail: only a test that fails twice fails."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "gpu/lavapipe.sh"
TOOLS = ("bash", "dirname", "mkdir", "timeout", "tail", "cat", "ls", "sed", "grep", "rm", "mv")
# What pytest ends with, one run after the other -> status and text of the script.
RUNS = {
    (0,): (0, ""),
    (1, 0): (0, "once more, alone"),
    (1, 1): (1, "once more, alone"),
    (139,): (0, "GPU tests skipped: pytest ended with status 139"),
    (1, 134): (0, "GPU tests skipped: pytest ended with status 134"),
    (124,): (0, "GPU tests skipped: not finished after"),
}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Debian's packages")


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder that is the whole PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in TOOLS:
        (folder / name).symlink_to(next(Path(each, name) for each in os.get_exec_path() if Path(each, name).exists()))
    return folder


def add(programs: Path, name: str, text: str) -> None:
    path = programs / name
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def run(programs: Path) -> tuple[int, str]:
    command = [str(programs / "bash"), str(SCRIPT), str(programs.parent / "folder")]
    done = subprocess.run(command, env={"PATH": str(programs)}, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout


def test_without_tools_nothing_fails(programs: Path) -> None:
    assert run(programs) == (0, "GPU tests skipped: there is no apt-get\n")


def test_without_packages_nothing_fails(programs: Path) -> None:
    for name in ("dpkg-deb", "cmake", "c++"):
        add(programs, name, "exit 1")
    add(programs, "apt-get", "echo no network; exit 100")
    assert run(programs) == (0, "GPU tests skipped: Mesa's packages can't be had (no network)\n")


def test_a_build_that_takes_too_long_is_given_up(programs: Path) -> None:
    add(programs, "apt-get", "exit 1")
    (programs / "timeout").unlink()
    add(programs, "timeout", "exit 124")
    assert run(programs) == (0, "GPU tests skipped: llama.cpp was not built after 12m\n")


@pytest.mark.parametrize("statuses", RUNS)
def test_only_what_fails_twice_fails(programs: Path, statuses: tuple[int, ...]) -> None:
    folder = programs.parent / "folder"
    (folder / "lib").mkdir(parents=True)
    (folder / "statuses").write_text("".join(f"{status}\n" for status in statuses))
    take = 'read -r status <"$f"; tail -n +2 "$f" >"$f.new"; mv "$f.new" "$f"'
    add(programs, "python", "echo 2")  # GPUs
    add(programs, "pytest", f'f={folder}/statuses; {take}; exit "$status"')
    status, text = run(programs)
    assert (status, RUNS[statuses][1] in text) == (RUNS[statuses][0], True)


def test_without_the_driver_nothing_fails(programs: Path) -> None:
    (programs.parent / "folder/lib").mkdir(parents=True)
    add(programs, "python", "exit 139")
    assert run(programs) == (0, "GPU tests skipped: the driver does not work here\n")


def test_the_drivers_check_imports_what_exists() -> None:
    """Otherwise the driver seems to be broken, and all GPU tests are skipped."""
    imports = re.findall(r"from (llmrun[\w.]+) import (\w+)", SCRIPT.read_text(encoding="utf-8"))
    assert imports
    assert all(hasattr(importlib.import_module(module), name) for module, name in imports)
