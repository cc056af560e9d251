"""What several test modules need: processes started by a test find the package that the test imported."""

from __future__ import annotations

import difflib
import gc
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# `python -m pytest` begins sys.path with its folder, whose llmrun has no native module.
sys.path[:] = [place for place in sys.path if Path(place).resolve() != Path(__file__).resolve().parents[1]]
try:
    import llmrun._native
    from llmrun import errors
except ImportError as error:
    sys.exit(f"llmrun is not installed here ({error}); in its checkout: pip install '.[test]'")

if TYPE_CHECKING:
    from support.remote_server import FarServer

    from llmrun.runner.client import EngineClient

PACKAGE_PARENT = Path(llmrun.__file__).parents[1]
CHOICES_OF_LIBRARIES = {"LLMRUN_LLAMA", "LLMRUN_CPU", "LLMRUN_KERNELS"}
"""What somebody may set for all tests."""


BUSY = ExitStack()


def pytest_addoption(parser: pytest.Parser) -> None:
    help_text = "keep N processes busy at normal priority beside the tests"
    parser.addoption("--busy", type=int, default=0, metavar="N", help=help_text)
    parser.addoption("--write-goldens", action="store_true", help="write tests/goldens anew, to be read as a diff")


def pytest_configure(config: pytest.Config) -> None:
    """Start the processes of --busy, once. Give each worker its own share of the cores: engines that share cores wait
    for one another. `python -m llmrun` is the installed package in the folder of the sources too, which have no
    native module."""
    os.environ["PYTHONSAFEPATH"] = "1"
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None and config.getoption("--busy"):
        from support.busy import busy_processes

        BUSY.enter_context(busy_processes(config.getoption("--busy")))
    if worker is None or not hasattr(os, "sched_setaffinity"):
        return
    n_workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    number = int(worker.removeprefix("gw")) % n_workers  # a worker that replaces a crashed one has a new number
    cores = sorted(os.sched_getaffinity(0))
    share = cores[len(cores) * number // n_workers : len(cores) * (number + 1) // n_workers]
    os.sched_setaffinity(0, share or cores)


def pytest_unconfigure() -> None:
    BUSY.close()


def pytest_report_header(config: pytest.Config) -> str:
    n_busy = config.getoption("--busy")
    return f"beside {n_busy} busy processes" if n_busy else ""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without collections of garbage, which take as long; the tests live to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that have slow tests: in the end one worker would be left alone with such a file."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(autouse=True)
def arguments_are_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages name arguments as the command line does, whatever an earlier test took from the package."""
    monkeypatch.setattr(errors, "rephrase", str)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's home without any model, which is LLMRUN_HOME too: nothing is configured, and no hub is asked."""
    home = tmp_path / "home"
    home.mkdir()
    for name in [name for name in os.environ if name.startswith("LLMRUN_") and name not in CHOICES_OF_LIBRARIES]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    for name in ("HOME", "USERPROFILE", "LLMRUN_HOME"):
        monkeypatch.setenv(name, str(home))
    monkeypatch.setenv("LLMRUN_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return home


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """golden(name, text): the text is what tests/goldens/NAME holds. With --write-goldens, it is written there."""

    def check(name: str, text: str) -> None:
        file = Path(__file__).with_name("goldens") / name
        if request.config.getoption("--write-goldens"):
            file.write_text(text, encoding="utf-8")
        before, now = file.read_text(encoding="utf-8").splitlines(), text.splitlines()
        if changes := [*difflib.unified_diff(before, now, name, "now", n=1, lineterm="")]:
            meant = f"if this is meant: pytest --write-goldens {request.node.nodeid.partition('[')[0]}"
            pytest.fail("\n".join([*changes, meant]), pytrace=False)

    return check


@pytest.fixture
def package_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Subprocesses import llmrun from where this process has it, whatever their folder, and what tests/ has."""
    paths = [str(PACKAGE_PARENT), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


@pytest.fixture
def source_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The installed llmrun is not a release's wheel, which has a llama.cpp of its own."""
    monkeypatch.setattr("llmrun.protocol.llama_folder._BUNDLED", tmp_path / "no llama_cpp")


@pytest.fixture
def start() -> Iterator[Callable[..., EngineClient]]:
    """start(mode): a client of a fake engine, closed in the end."""
    from support.engines import fake_client

    with ExitStack() as clients:
        yield lambda mode="normal": clients.enter_context(closing(fake_client(mode)))


@pytest.fixture
def server() -> Iterator[FarServer]:
    """A remote server."""
    from support import remote_server

    with remote_server.serving() as server:
        yield server


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool], float], bool]:
    """eventually(condition, seconds): whether the condition came true in that time."""

    def wait(condition: Callable[[], bool], seconds: float) -> bool:
        ends = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > ends:
                return False
            time.sleep(0.01)
        return True

    return wait
