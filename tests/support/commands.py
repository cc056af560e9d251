"""Fixtures of the tests that call commands in this process, with real engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from llmrun.cli import sampling
from llmrun.lab.convert.job import convert_folder
from llmrun.runner import client
from support.hf_writer import files_of, write


@pytest.fixture(autouse=True)
def no_presets() -> None:
    """A process reads the settings for one command; here the presets of one test would be those of the next."""
    sampling.PRESET_ORIGINS.clear()


@pytest.fixture(scope="session")
def random_qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of random weights."""
    folder = tmp_path_factory.mktemp("qwen")
    return convert_folder(write(folder / "hf", files_of("Qwen3ForCausalLM")), folder / "tiny.gguf", type="f32").path


@pytest.fixture
def own_engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each command has an engine of its own, as in a process of its own."""
    with ExitStack() as engines:
        monkeypatch.setattr(client, "prestarted", lambda: engines.enter_context(closing(client.EngineClient())))
        yield
