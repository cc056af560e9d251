"""A file of one's own becomes a model of the cache; its bytes are never nowhere, and what is no model stays out."""

from __future__ import annotations

import errno
import os
from collections import namedtuple
from pathlib import Path

import pytest
from support.gguf_writer import I32, U16, Typed, tiny_model
from support.model_disk import settings, tree
from support.stand_in_hub import sha256

from llmrun.errors import BadModelError, DiskFullError, IntegrityError, ModelNotFoundError, UsageError
from llmrun.models.fingerprint import verify
from llmrun.models.store import importing
from llmrun.models.store.importing import import_model
from llmrun.models.store.removal import collect
from llmrun.models.store.store import Store

MODEL = tiny_model()


@pytest.fixture
def store(home: Path, tmp_path: Path) -> Store:
    return Store(settings(tmp_path / "hub"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "My model-Q4_1.gguf"
    path.write_bytes(MODEL)
    return path


def test_copy(store: Store, source: Path) -> None:
    seen: list[tuple[int, int]] = []
    model = import_model(source, store, on_progress=lambda done, total: seen.append((done, total)))
    assert (model.name, model.path.read_bytes()) == ("local/My-model:Q4_1", MODEL)
    assert model.path.resolve() == store.blob("local/My-model", sha256(MODEL))
    assert seen[-1] == (len(MODEL), len(MODEL))
    assert source.exists()
    assert [found.name for found in store.installed()] == [model.name]
    assert verify(model).state == "ok"
    assert all(leftover.path.suffix == ".lock" for leftover in collect(store))
    assert not list(store.root.rglob("*.tmp"))


def test_move(store: Store, source: Path) -> None:
    before = source.stat().st_ino
    model = import_model(source, store, name="me/tiny", how="move")
    assert not source.exists()
    assert (model.name, model.path.stat().st_ino) == ("me/tiny:Q4_1", before)  # no byte was copied
    assert verify(model).state == "ok"


def test_move_to_another_disk(store: Store, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("another disk")

    monkeypatch.setattr(os, "link", refuse)
    model = import_model(source, store, how="move")
    assert not source.exists()
    assert model.path.read_bytes() == MODEL


def test_link(store: Store, source: Path) -> None:
    model = import_model(source, store, how="link")
    assert model.path.resolve() == source
    assert verify(model).state == "ok"
    assert sum(path.stat().st_size for path in store.root.rglob("*") if path.is_file() and not path.is_symlink()) < 100
    source.write_bytes(MODEL[:-1] + b"!")
    assert verify(model).state == "damaged"


def test_again_under_the_same_and_another_name(store: Store, source: Path) -> None:
    first = import_model(source, store)
    assert import_model(source, store, how="link").path.read_bytes() == MODEL
    assert first.path.resolve() != source  # real bytes are not given up for a link
    import_model(source, store, name="other/name")
    assert [model.name for model in store.installed()] == ["local/My-model:Q4_1", "other/name:Q4_1"]


def test_split_model(store: Store, tmp_path: Path) -> None:
    first, second = (tmp_path / f"big-Q4_1-0000{number}-of-00002.gguf" for number in (1, 2))
    split = {"split.count": Typed(U16, 2), "split.tensors.count": Typed(I32, 3)}
    first.write_bytes(tiny_model({**split, "split.no": Typed(U16, 0)}))
    second.write_bytes(tiny_model({**split, "split.no": Typed(U16, 1)}, tensors=()))
    model = import_model(first, store)
    assert (model.name, model.size) == ("local/big:Q4_1", first.stat().st_size + second.stat().st_size)
    second.unlink()
    with pytest.raises(ModelNotFoundError, match="missing"):
        import_model(first, store, name="me/half")


def test_a_file_without_a_telling_name(store: Store, tmp_path: Path) -> None:
    path = tmp_path / ("sha256-" + sha256(MODEL))
    path.write_bytes(MODEL)
    model = import_model(path, store, name="me/tiny")
    assert (model.name, model.filename) == ("me/tiny:Q4_1", "tiny-Q4_1.gguf")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"no model at all, but long enough to be one", MODEL[:300]])
def test_no_model_is_refused(store: Store, source: Path, content: bytes) -> None:
    source.write_bytes(content)
    with pytest.raises(BadModelError):
        import_model(source, store)
    assert not store.root.exists()


def test_a_projector_is_no_model(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "mmproj-x-F16.gguf"
    path.write_bytes(MODEL)
    with pytest.raises(UsageError, match="not a model by itself"):
        import_model(path, store)


@pytest.mark.parametrize("name", ["a/b/c", "../x", "a/..", "a/b:Q4", "a--b/c", "/a", "a b/c", "-a/b", "a/b..c"])
def test_impossible_names(store: Store, source: Path, name: str) -> None:
    with pytest.raises(UsageError, match="is not a valid model name"):
        import_model(source, store, name=name)


def test_no_room(store: Store, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(100, 100, 10))
    with pytest.raises(DiskFullError) as caught:
        import_model(source, store)
    assert f"{len(MODEL):,} bytes are needed, 10 are free" in caught.value.why
    assert import_model(source, store, how="link").path.exists()  # which takes none


def test_a_disk_that_is_full_meanwhile(store: Store, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(importing, "_copy", refuse)
    with pytest.raises(DiskFullError) as caught:
        import_model(source, store)
    assert f"{len(MODEL):,} more bytes are needed" in caught.value.why
    assert "kept" not in caught.value.hint  # the copy begins again


def test_a_file_that_changes_meanwhile(store: Store, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "_clone", lambda *_: False)

    def grow(done: int, total: int) -> None:
        with source.open("ab") as file:
            file.write(b"more")

    with pytest.raises(IntegrityError, match="changed"):
        import_model(source, store, on_progress=grow)
    assert store.installed() == []


def test_an_interrupted_move_keeps_the_bytes(store: Store, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "install", interrupted)
    with pytest.raises(KeyboardInterrupt):
        import_model(source, store, how="move")
    assert source.read_bytes() == MODEL


def test_anothers_file_is_not_moved(store: Store, source: Path, tmp_path: Path) -> None:
    link = tmp_path / "link-Q4_1.gguf"
    link.symlink_to(source)
    model = import_model(link, store, how="link")
    for path in (link, model.path, model.path.resolve().parent / source.name):
        if path.exists() and path != source:
            with pytest.raises(UsageError, match="can't be moved"):
                import_model(path, store, name="me/tiny", how="move")
    assert tree(store.root / "models--local--link")
