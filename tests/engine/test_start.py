"""The start of the engine process: the guessed weights load before most of the engine is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.gguf_writer import runnable_model, write

from llmrun.engine.preload import Preload
from llmrun.errors import BadModelError
from llmrun.protocol.jobs.text import TOKENIZE, TokenizeText
from llmrun.protocol.loading import Load
from llmrun.runner import launch
from llmrun.runner.client import EngineClient


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "tiny.gguf", runnable_model())


@pytest.fixture
def prestarted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A prestarted engine, as the commands have it."""
    for name in ("_prestarted", "has_prestarted", "_has_guess"):
        monkeypatch.setattr(launch, name, getattr(launch, name))
    launch.prestart()
    yield
    launch.take_prestarted()


def preloaded(line: bytes) -> Preload:
    """What the thread makes of the front's line, with the pipe closed behind it."""
    reading, writing = os.pipe()
    os.write(writing, line)
    os.close(writing)
    preload = Preload(reading)
    preload.start()
    preload.join()
    os.close(reading)
    assert preload.has_read.is_set()
    return preload


def test_the_guessed_weights_are_those_that_load_takes(path: Path) -> None:
    weights = preloaded(os.fsencode(path) + b"\n").weights
    assert weights is not None
    assert weights.is_for(Load(str(path), 64))
    weights.close()


@pytest.mark.parametrize("line", [b"", b"\n", b"/no/such/file.gguf\n", b"/\xff\n"])
def test_no_guess_and_a_wrong_one_load_nothing(line: bytes) -> None:
    assert preloaded(line).weights is None


def test_only_the_line_is_read(path: Path) -> None:
    """The commands come behind it in the same pipe."""
    reading, writing = os.pipe()
    os.write(writing, b"\n\0\0\0\x05hello")
    preload = Preload(reading)
    preload.start()
    preload.join()
    assert os.read(reading, 100) == b"\0\0\0\x05hello"
    os.close(reading)
    os.close(writing)


@pytest.mark.usefixtures("package_on_path")
def test_loading_waits_for_no_import_of_the_rest(path: Path) -> None:
    """Each of these takes milliseconds, which the weights would wait for."""
    code = (
        "import sys, llmrun.engine.start; from llmrun.engine import environment; environment.load_libraries();"
        "from llmrun.engine.preload import Preload; Preload();"
        "print([name for name in sys.modules if name.startswith(('llmrun.protocol.messages', 'llmrun.protocol.loading',"
        "'llmrun.gguf.', 'llmrun.engine.main', 'llmrun.engine.core', 'jinja2'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=path.parent, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.usefixtures("package_on_path")
def test_the_first_answer_waits_for_no_import_that_it_does_not_use(path: Path) -> None:
    code = (
        "import sys, llmrun.engine.start; from llmrun.engine import environment; environment.load_libraries();"
        "import llmrun.engine.preload, llmrun.engine.main; environment.import_for_requests(); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=path.parent, capture_output=True, text=True, check=True)
    unused = "email importlib.metadata socket statistics jinja2.meta llmrun.statistics llguidance"
    modules = {*done.stdout.split()}
    assert not modules & {*unused.split()}
    assert len(modules) < 265


@pytest.mark.usefixtures("package_on_path", "prestarted")
def test_a_model_loads_behind_a_right_guess(path: Path) -> None:
    launch.preload(str(path))
    launch.preload("/another.gguf")  # only one line precedes the commands
    engine = EngineClient(launch.take_prestarted())
    assert engine.load(Load(str(path), 64)).n_ctx_train
    engine.close()


@pytest.mark.usefixtures("package_on_path", "prestarted")
def test_a_model_loads_behind_a_wrong_guess(path: Path, tmp_path: Path) -> None:
    launch.preload(str(write(tmp_path / "other.gguf", runnable_model())))
    engine = EngineClient(launch.take_prestarted())
    assert engine.load(Load(str(path), 64)).n_ctx_train
    engine.close()


@pytest.mark.usefixtures("package_on_path", "prestarted")
def test_a_job_runs_without_a_guess(path: Path) -> None:
    engine = EngineClient(launch.take_prestarted())
    assert engine.do(TOKENIZE, TokenizeText(str(path), "Hi", special=False))
    engine.close()


@pytest.mark.usefixtures("package_on_path", "prestarted")
def test_a_guess_that_is_no_model_is_told_by_load(tmp_path: Path) -> None:
    path = tmp_path / "empty.gguf"
    path.touch()
    launch.preload(str(path))
    engine = EngineClient(launch.take_prestarted())
    with pytest.raises(BadModelError, match=r"empty\.gguf"):
        engine.load(Load(str(path), n_ctx=512))
    engine.close()
