"""What tuning found does not slow down the start: weights are loaded early wherever its settings load them as usual."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.gguf_writer import tiny_model, write

from llmrun.gguf.reader import read_header
from llmrun.model import loading
from llmrun.planning.hardware import probe
from llmrun.planning.settings import TunableSettings
from llmrun.planning.tuned import Profile, TunedSettings, remember

DEFAULT = TunableSettings(threads=4, threads_batch=4)


class FakeRunner:
    """Notes which file it was told to open."""

    def __init__(self) -> None:
        self.opened: list[str] = []

    def open_ahead(self, path: str) -> None:
        self.opened.append(path)


def remember_settings(path: Path, folder: Path, *others: TunableSettings) -> None:
    profiles = tuple(Profile(settings, 1.0, 200.0, 20.0) for settings in others)
    remember(TunedSettings(Profile(DEFAULT, 1.0, 100.0, 10.0), profiles, 0, 0.0), read_header(path), probe(), folder)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeRunner:
    monkeypatch.setenv("LLMRUN_HOME", str(tmp_path))
    found = FakeRunner()
    monkeypatch.setattr(loading.client, "prestarted", lambda: found)
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "model.gguf", tiny_model())


PLAIN = (
    replace(DEFAULT, threads=2),
    replace(DEFAULT, flash_attention="off", n_ubatch=128, kv_type_k="q8_0", kv_type_v="q8_0"),
)
OTHER = (
    replace(DEFAULT, repack=False),
    replace(DEFAULT, mmap=False),
    replace(DEFAULT, huge_pages=True),
    replace(DEFAULT, spins=0),
)


def test_without_tuning_weights_are_loaded_early(engine: FakeRunner, path: Path) -> None:
    loading.open_ahead(str(path))
    assert engine.opened == [str(path)]


def test_settings_of_the_context_keep_early_loading(engine: FakeRunner, path: Path, tmp_path: Path) -> None:
    remember_settings(path, tmp_path, *PLAIN)
    loading.open_ahead(str(path))
    assert engine.opened == [str(path)]


@pytest.mark.parametrize("settings", OTHER)
def test_settings_that_load_otherwise_do_not(
    engine: FakeRunner, path: Path, tmp_path: Path, settings: TunableSettings
) -> None:
    remember_settings(path, tmp_path, *PLAIN, settings)
    loading.open_ahead(str(path))
    assert engine.opened == []


def test_settings_of_another_model_do_not_count(engine: FakeRunner, path: Path, tmp_path: Path) -> None:
    deeper = write(tmp_path / "deeper.gguf", tiny_model({"llama.block_count": 3}))
    remember_settings(deeper, tmp_path, *OTHER)
    loading.open_ahead(str(path))
    loading.open_ahead(str(deeper))
    assert engine.opened == [str(path)]


@pytest.mark.parametrize("content", ["", "{", '{"schema": 1, "entries": [{"key": 3, "tuned": 4}]}', "[" * 100_000])
def test_a_damaged_file_is_as_good_as_none(engine: FakeRunner, path: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "tune.json").write_text(content)
    loading.open_ahead(str(path))
    assert engine.opened == [str(path)]
