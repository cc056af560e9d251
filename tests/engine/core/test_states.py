"""Saved KV states: found by prefix, checked, capped; whatever is wrong with a file, it is as if there were none."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from llmrun.engine.core.states import KVStore, SavedState, model_key

CAP = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> KVStore:
    return KVStore(tmp_path, "model", CAP)


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_state_comes_back_as_it_was(store: KVStore) -> None:
    assert store.save([1, 2, 3], b"state") > 0
    assert store.find([1, 2, 3, 4], longer_than=0) == SavedState([1, 2, 3], b"state")


def test_the_one_that_shares_most_is_found(store: KVStore) -> None:
    store.save([1, 2, 9, 9], b"a")
    store.save([1, 2, 3, 4, 5], b"b")
    store.save([7], b"c")
    assert store.find([1, 2, 3, 8], longer_than=0) == SavedState([1, 2, 3, 4, 5], b"b")
    assert store.find([1, 2, 3, 8], longer_than=2) is not None
    assert store.find([1, 2, 3, 8], longer_than=3) is None, "three tokens are shared, no more"
    assert store.find([8], longer_than=0) is None


def test_a_longer_state_replaces_its_beginnings(store: KVStore, tmp_path: Path) -> None:
    store.save([1, 2], b"a")
    store.save([1, 2, 3], b"b")
    store.save([1, 3], b"c")
    store.save([1, 2, 3], b"d")
    assert len(files(tmp_path)) == 2
    assert store.find([1, 2, 3], longer_than=0) == SavedState([1, 2, 3], b"d")


@pytest.mark.parametrize("key", ["another model", "model2", ""])
def test_states_of_another_model_or_build_are_not_found(key: str, store: KVStore, tmp_path: Path) -> None:
    store.save([1, 2, 3], b"state")
    other = KVStore(tmp_path, key, CAP)
    assert other.find([1, 2, 3], longer_than=0) is None
    # Not even where a hash would lead to the same folder.
    other._folder = store._folder
    assert other.find([1, 2, 3], longer_than=0) is None


def test_a_damaged_file_is_never_used(store: KVStore, tmp_path: Path) -> None:
    store.save([1, 2, 3], bytes(range(200)))
    (path,) = files(tmp_path)
    good = path.read_bytes()
    rng = random.Random(0)
    for _ in range(400):
        bad = bytearray(good)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        assert store.find([1, 2, 3], longer_than=0) is None
    for length in range(0, len(good), 7):
        path.write_bytes(good[:length])
        assert store.find([1, 2, 3], longer_than=0) is None
    path.write_bytes(good + b"x")
    assert store.find([1, 2, 3], longer_than=0) is None
    path.write_bytes(good)
    assert store.find([1, 2, 3], longer_than=0) is not None


def test_the_next_best_is_taken_when_the_best_is_damaged(store: KVStore, tmp_path: Path) -> None:
    store.save([1, 2, 3, 4], b"best")
    (path,) = files(tmp_path)
    store.save([1, 2, 9], b"next")
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert store.find([1, 2, 3, 4], longer_than=0) == SavedState([1, 2, 9], b"next")
    assert not path.exists()


def test_the_cap_drops_what_was_not_used_for_longest(tmp_path: Path) -> None:
    store = KVStore(tmp_path, "model", 4000)
    for token in range(3):
        store.save([token], bytes(1200))
        os.utime(max(files(tmp_path), key=lambda path: path.stat().st_mtime_ns), (token, token))
    assert store.find([0], longer_than=0), "used now"
    KVStore(tmp_path, "another model", 4000).save([3], bytes(1200))
    assert [bool(store.find([token], longer_than=0)) for token in range(3)] == [True, False, True]


def test_what_is_over_the_cap_alone_is_not_kept(tmp_path: Path) -> None:
    store = KVStore(tmp_path, "model", 1000)
    store.save([1], b"small")
    assert store.save([2], bytes(1000)) == 0
    assert store.find([1], longer_than=0), "and drops nothing"


def test_a_full_disk_leaves_nothing(store: KVStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        store.save([1], b"state")
    assert files(tmp_path) == []


def test_only_the_owner_may_read(store: KVStore, tmp_path: Path) -> None:
    store.save([1], b"state")
    (path,) = files(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_what_a_killed_writer_left_goes(store: KVStore, tmp_path: Path) -> None:
    store.save([1], b"state")
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = store._folder / f"abc.{dead.pid}.tmp"
    left.write_bytes(b"half")
    mine = store._folder / f"abc.{os.getpid()}.tmp"
    mine.write_bytes(b"being written")
    store.save([2], b"state")
    assert (left.exists(), mine.exists()) == (False, True)


def test_the_key_of_a_model_tells_contents_apart(tmp_path: Path) -> None:
    a, b = tmp_path / "a.gguf", tmp_path / "b.gguf"
    a.write_bytes(bytes(5_000_000))
    b.write_bytes(bytes(4_999_999) + b"x")
    copy = tmp_path / "c.gguf"
    copy.write_bytes(a.read_bytes())
    assert model_key(a) == model_key(copy) != model_key(b)


def test_checkpoints_are_saved_with_their_state(store: KVStore) -> None:
    store.save([1, 2, 3, 4], b"state", [(2, b"two"), (3, b"three")])
    saved = SavedState([1, 2, 3, 4], b"state", ((2, b"two"), (3, b"three")))
    assert store.find([1, 2, 9], longer_than=1, cuts=False) == saved
    assert store.find([1, 9], longer_than=0, cuts=False) is None
    assert store.find([1, 9], longer_than=0) == saved


def test_a_state_that_no_checkpoint_replaces_stays(store: KVStore) -> None:
    store.save([1], b"state", [(1, b"one")])
    store.save([1, 2, 3], b"state", [(2, b"two")])
    assert store.find([1, 9], longer_than=0, cuts=False) == SavedState([1], b"state", ((1, b"one"),))
    found = store.find([1, 2, 9], longer_than=1, cuts=False)
    assert found is not None
    assert found.checkpoints == ((2, b"two"),)
