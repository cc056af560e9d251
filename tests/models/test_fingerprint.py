"""Identity of the model that answered."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.model_disk import put, put_lm_studio, put_ollama, settings
from support.stand_in_hub import sha256

from llmrun.models.fingerprint import ModelFingerprint, fingerprint_file, sha256_of, verify
from llmrun.models.store import other_programs
from llmrun.models.store.store import Store


def test_a_model_that_is_a_file_is_named_by_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.gguf").write_bytes(b"GGUF")
    used = fingerprint_file("", Path("m.gguf"))
    assert used.name == used.path == str(tmp_path / "m.gguf")
    assert not used.server


def test_a_server_stands_where_the_file_does() -> None:
    assert ModelFingerprint("smollm2", path="http://127.0.0.1:8080/v1").server == "http://127.0.0.1:8080/v1"


# ---- bytes on this disk are compared with the hash they are stored under; nothing else counts as that hash


@pytest.fixture
def store(tmp_path: Path, home: Path) -> Store:
    return Store(settings(tmp_path / "hub"))


def test_hash_and_progress(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 5_000_000)
    steps: list[int] = []
    assert sha256_of(path, steps.append) == sha256(b"x" * 5_000_000)
    assert (sum(steps), len(steps)) == (5_000_000, 2)


def test_right_and_wrong_bytes(store: Store) -> None:
    path = put(store, "tiny-Q4_0.gguf", content=b"GGUF and weights")
    (model,) = store.installed()
    assert (verify(model).state, verify(model).text) == ("ok", "sha256 matches")
    blob = path.resolve()
    blob.write_bytes(b"GGUF and Weights")
    assert verify(model).state == "damaged"
    assert blob.name in verify(model).text
    blob.write_bytes(b"GGUF and weigh")  # cut off
    assert verify(model).state == "damaged"


def test_every_part_counts(store: Store) -> None:
    put(store, "big-Q4_0-00001-of-00002.gguf", content=b"part 1")
    second = put(store, "big-Q4_0-00002-of-00002.gguf", content=b"part 2")
    (model,) = store.installed()
    assert verify(model).state == "ok"
    second.resolve().write_bytes(b"part X")
    assert "big-Q4_0-00002-of-00002.gguf" in verify(model).text


def test_the_hubs_shared_store_goes_by_another_hash(store: Store) -> None:
    blob = put(store, "tiny-Q4_0.gguf", content=b"shared").resolve()
    shared = store.root / "blobs/ab" / ("ab" + "0" * 62)
    shared.parent.mkdir(parents=True)
    blob.rename(shared)
    blob.symlink_to(os.path.relpath(shared, blob.parent))
    assert verify(store.installed()[0]).state == "ok"


def test_ollama_names_its_blobs_by_their_hash(home: Path) -> None:
    blob = put_ollama(home / ".ollama/models", "library/tiny:1b")
    (model,) = other_programs.models()
    assert verify(model).state == "ok"
    blob.write_bytes(b"else")
    assert verify(model).state == "damaged"


def test_where_nobody_noted_a_hash(home: Path) -> None:
    put_lm_studio(home / ".lmstudio/models", "a/b", "m-Q4_0.gguf")
    (model,) = other_programs.models()
    assert (verify(model).state, verify(model).text) == ("unknown", "no checksum of m-Q4_0.gguf is known")


def test_a_file_that_can_not_be_read(store: Store) -> None:
    path = put(store, "tiny-Q4_0.gguf")
    (model,) = store.installed()
    path.resolve().unlink()
    assert "can't be read" in verify(model).text
