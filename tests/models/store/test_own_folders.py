"""The models of models.folders: found, named and used in place, and never removed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.model_disk import OLD, put, put_lm_studio, put_ollama, settings

from llmrun.errors import ModelNotFoundError, UsageError
from llmrun.models.location import find_projector, locate
from llmrun.models.registry import resolve
from llmrun.models.store import other_programs
from llmrun.models.store.removal import collect, plan_removal
from llmrun.models.store.store import Store, all_models


@pytest.fixture
def own(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the settings, beside one that is gone."""
    folder = home / "gguf"
    folder.mkdir()
    monkeypatch.setenv("LLMRUN_FOLDERS", json.dumps([str(folder), str(home / "gone")]))
    monkeypatch.setenv("HF_HUB_CACHE", str(home / "hub"))
    return folder


def write(path: Path, content: bytes = b"GGUF") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def names() -> list[str]:
    return [model.name for model in other_programs.models()]


def test_names(own: Path) -> None:
    plain = write(own / "Tiny-1B-Q4_K_M.gguf")
    deep = write(own / "some/where/Deep.gguf")
    write(own / "notes.txt")
    write(own / ".hidden/Trash-Q8_0.gguf")
    write(own / "1/2/3/4/5/TooDeep-Q8_0.gguf")
    assert names() == ["folder/Tiny-1B:Q4_K_M", "folder/Deep"]
    for typed in ("folder/Tiny-1B:Q4_K_M", "folder/tiny-1b", "Tiny-1B:Q4_K_M", "tiny-1b"):
        assert resolve(typed).path == plain
        assert not resolve(typed).is_file, "the server may load it by this name"
    assert locate("deep", settings(own.parent / "hub")).path == deep
    assert [model.place for model in other_programs.models()] == ["models.folders"] * 2


def test_two_files_of_one_name_are_told_by_their_paths(own: Path) -> None:
    first, second = write(own / "a/Tiny-Q8_0.gguf"), write(own / "b/tiny-q8_0.gguf", b"GGUF 2")
    assert names() == [str(first), str(second)]
    assert resolve(names()[1]).path == second


def test_parts_and_projectors(own: Path) -> None:
    first = write(own / "Big-Q4_0-00001-of-00002.gguf", b"GGUF 1")
    write(own / "Big-Q4_0-00002-of-00002.gguf", b"GGUF two")
    write(own / "Lost-Q4_0-00001-of-00002.gguf")
    seeing = write(own / "see/Seeing-Q8_0.gguf")
    projector = write(own / "see/mmproj-Seeing-F16.gguf")
    assert names() == ["folder/Big:Q4_0", "folder/Seeing:Q8_0"], "a part of Lost is missing"
    big = other_programs.models()[0]
    assert (big.path, big.size) == (first, 14)
    assert find_projector(seeing) == projector


def test_what_lm_studio_and_ollama_keep_elsewhere(own: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    studio = put_lm_studio(own, "maker/tiny-GGUF", "tiny-Q4_K_M.gguf")
    put_ollama(home / "disk", "library/llama3.2:1b")
    monkeypatch.setenv("LLMRUN_FOLDERS", json.dumps([str(own), str(home / "disk")]))
    assert names() == ["ollama/llama3.2:1b", "folder/tiny:Q4_K_M"]
    found = locate("maker/tiny-GGUF:Q4_K_M", settings(home / "hub"))
    assert found.path == studio, "by the hub's name, too"


def test_no_file_is_listed_twice(own: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_lm_studio(home / ".lmstudio/models", "maker/tiny-GGUF", "tiny-Q4_K_M.gguf")
    cached = settings(home / "hub")
    put(Store(cached), "tiny-Q8_0.gguf", OLD)
    monkeypatch.setenv("LLMRUN_FOLDERS", json.dumps([str(home / ".lmstudio/models"), str(home)]))
    assert [model.name for model in all_models(cached)] == ["lmstudio/maker/tiny-GGUF:Q4_K_M", "maker/tiny-GGUF:Q8_0"]


def test_nothing_is_removed_there(own: Path, home: Path) -> None:
    path = write(own / "Tiny-Q8_0.gguf")
    store = Store(settings(home / "hub"))
    assert collect(store, include_recent=True) == []
    with pytest.raises(UsageError, match="is in a folder of") as refused:
        plan_removal(store, other_programs.models()[0])
    assert str(path) in refused.value.hint
    assert not other_programs.models()[0].is_ours


def test_a_folder_that_is_gone(own: Path, home: Path) -> None:
    assert own.is_dir()
    assert other_programs.missing_folders() == [home / "gone"]
    with pytest.raises(ModelNotFoundError) as unknown:
        resolve("folder/tiny")
    assert f"{home / 'gone'} is not there" in unknown.value.why
    with pytest.raises(ModelNotFoundError, match="there is no model 'tiny'"):
        resolve("tiny")
