"""What tuning found does not slow down the start: weights are loaded early wherever its settings load them as usual."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.gguf_writer import tiny_model, write

from llmrun.__main__ import _load_ahead
from llmrun.config import MEASURED_FILE
from llmrun.gguf.reader import read_header
from llmrun.planning.hardware import probe
from llmrun.planning.tuned import Profile, TunableSettings, TunedSettings, remember
from llmrun.runner import launch

DEFAULT = TunableSettings(threads=4, threads_batch=4)


def remember_settings(path: Path, folder: Path, *others: TunableSettings) -> None:
    profiles = tuple(Profile(settings, 1.0, 200.0, 20.0) for settings in others)
    remember(TunedSettings(Profile(DEFAULT, 1.0, 100.0, 10.0), profiles, 0, 0.0), read_header(path), probe(), folder)


@pytest.fixture
def opened(home: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that the engine was told to open."""
    found: list[str] = []
    monkeypatch.setattr(launch, "preload", found.append)
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
    replace(DEFAULT, split_mode="none"),
)


def test_without_tuning_weights_are_loaded_early(opened: list[str], path: Path) -> None:
    _load_ahead(str(path))
    assert opened == [str(path)]


def test_settings_of_the_context_keep_early_loading(opened: list[str], path: Path, home: Path) -> None:
    remember_settings(path, home, *PLAIN)
    _load_ahead(str(path))
    assert opened == [str(path)]


@pytest.mark.parametrize("settings", OTHER)
def test_settings_that_load_otherwise_do_not(
    opened: list[str], path: Path, home: Path, settings: TunableSettings
) -> None:
    remember_settings(path, home, *PLAIN, settings)
    _load_ahead(str(path))
    assert opened == []


def test_settings_of_another_model_do_not_count(opened: list[str], path: Path, home: Path, tmp_path: Path) -> None:
    deeper = write(tmp_path / "deeper.gguf", tiny_model({"llama.block_count": 3}))
    remember_settings(deeper, home, *OTHER)
    _load_ahead(str(path))
    _load_ahead(str(deeper))
    assert opened == [str(path)]


@pytest.mark.parametrize("content", ["", "{", '{"schema": 1, "entries": [{"key": 3, "tuned": 4}]}', "[" * 100_000])
def test_a_damaged_file_is_as_good_as_none(opened: list[str], path: Path, home: Path, content: str) -> None:
    (home / MEASURED_FILE).write_text(content)
    _load_ahead(str(path))
    assert opened == [str(path)]
