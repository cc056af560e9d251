"""Saved KV states: found by prefix, checked, capped; whatever is wrong with a file, it is as if there were none."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmrun.engine.core.prefix import Checkpoint, Prefix, Salt
from llmrun.engine.core.states import KVStore, StateKey
from llmrun.system import file_identity

CAP = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> KVStore:
    return KVStore(tmp_path, "model", CAP)


def identified(*paths: Path) -> list[tuple[str, str]]:
    return [(str(path), file_identity(path)) for path in paths]


def of(found: Prefix | None) -> tuple[Any, ...] | None:
    """What a state holds: its tokens, itself, and its checkpoints if it has any."""
    if found is None:
        return None
    checkpoints = tuple((each.length, bytes(each.state)) for each in found.checkpoints)
    return (found.tokens, bytes(found.state), *([checkpoints] if checkpoints else []))


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_state_comes_back_as_it_was(store: KVStore) -> None:
    assert store.save([1, 2, 3], b"state") > 0
    assert of(store.find([1, 2, 3, 4], longer_than=0)) == ([1, 2, 3], b"state")


def test_the_one_that_shares_most_is_found(store: KVStore) -> None:
    store.save([1, 2, 9, 9], b"a")
    store.save([1, 2, 3, 4, 5], b"b")
    store.save([7], b"c")
    assert of(store.find([1, 2, 3, 8], longer_than=0)) == ([1, 2, 3, 4, 5], b"b")
    assert store.find([1, 2, 3, 8], longer_than=2) is not None
    assert store.find([1, 2, 3, 8], longer_than=3) is None, "three tokens are shared, no more"
    assert store.find([8], longer_than=0) is None


def test_a_longer_state_replaces_its_beginnings(store: KVStore, tmp_path: Path) -> None:
    store.save([1, 2], b"a")
    store.save([1, 2, 3], b"b")
    store.save([1, 3], b"c")
    store.save([1, 2, 3], b"d")
    assert len(files(tmp_path)) == 2
    assert of(store.find([1, 2, 3], longer_than=0)) == ([1, 2, 3], b"d")


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
    assert of(store.find([1, 2, 3, 4], longer_than=0)) == ([1, 2, 9], b"next")
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


def test_a_full_disk_costs_no_older_state(store: KVStore, capfd: pytest.CaptureFixture[str]) -> None:
    def full(path: Path) -> int:
        path.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    store.save([1, 2], b"older")
    saver = store.background_saver()
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            store.save([1, 2, 3], full)
        saver.save([1, 2, 3], full)
    saver.wait()
    assert of(store.find([1, 2, 3], longer_than=0)) == ([1, 2], memoryview(b"older"))
    assert not list((store._root / "new").iterdir())
    assert capfd.readouterr().err.count("No space left") == 1, "it is said once"


@pytest.mark.parametrize("back", [0, 3600, 10 * 365 * 86_400])
def test_after_the_clock_was_set_back_the_last_used_states_stay(tmp_path: Path, back: int) -> None:
    store = KVStore(tmp_path, "model", 4000)
    for token in range(3):
        store.save([token], bytes(1200))
    for path in files(tmp_path):
        used_at = path.stat().st_mtime_ns + back * 10**9
        os.utime(path, ns=(used_at, used_at))
    assert store.find([0], longer_than=0), "used now"
    for token in (3, 4):
        store.save([token], bytes(1200))
        assert store.find([token], longer_than=0), "the newest one is not the one to go"
    assert [bool(store.find([token], longer_than=0)) for token in range(5)] == [True, False, False, True, True]
    assert [tokens for tokens, _ in store.saved_turns()] == [[0], [3], [4]]


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


def test_a_key_has_the_hash_of_every_byte_of_every_file(tmp_path: Path) -> None:
    """Also of those in the middle of a large file, and of a split model's second one."""
    first, second, states = tmp_path / "a-00001-of-00002.gguf", tmp_path / "a-00002-of-00002.gguf", tmp_path / "states"
    content = bytearray(random.Random(1).randbytes(6 << 20))

    def key(*, rest: str = "build") -> str | None:
        found = StateKey(states, identified(first, second), rest)
        found.compute()
        return found.known()

    first.write_bytes(content)
    second.write_bytes(b"second")
    original = key()
    assert original is not None
    assert key() == original != key(rest="another build")
    for changed in (first, second):
        before = changed.read_bytes()
        middle = len(before) // 3
        changed.write_bytes(before[:middle] + bytes([before[middle] ^ 1]) + before[middle + 1 :])
        os.utime(changed, ns=(1, 1))
        assert key() != original
        changed.write_bytes(before)
        assert key() == original


def test_until_its_file_was_hashed_a_model_has_no_states(tmp_path: Path) -> None:
    model, states = tmp_path / "model.gguf", tmp_path / "states"
    model.write_bytes(b"weights")

    def store() -> KVStore:
        return KVStore(states, StateKey(states, identified(model), "build"), CAP)

    opened = store()
    assert opened.find([1, 2, 3], longer_than=0) is None
    opened.save([1, 2, 3], b"state")
    assert of(opened.find([1, 2, 3], longer_than=0)) == of(store().find([1, 2, 3], longer_than=0)) is not None
    model.write_bytes(b"Weights")
    assert store().find([1, 2, 3], longer_than=0) is None


def test_a_model_that_was_changed_since_it_was_loaded_saves_nothing(tmp_path: Path) -> None:
    model, states = tmp_path / "model.gguf", tmp_path / "states"
    model.write_bytes(b"weights")
    opened = KVStore(states, StateKey(states, identified(model), "build"), CAP)
    model.write_bytes(b"other weights")
    with pytest.raises(OSError, match="changed since"):
        opened.save([1, 2, 3], b"state")


def test_a_model_that_was_replaced_after_its_file_was_hashed_saves_nothing(tmp_path: Path) -> None:
    """Its state would be found under the original file's hash, when that is put back."""
    model, states = tmp_path / "model.gguf", tmp_path / "states"
    model.write_bytes(b"weights")
    opened = KVStore(states, StateKey(states, identified(model), "build"), CAP)
    opened.save([1, 2, 3], b"state")
    model.write_bytes(b"Weights, other ones")
    with pytest.raises(OSError, match="changed since"):
        opened.save([4, 5, 6], b"state of other weights")
    model.write_bytes(b"weights")
    again = KVStore(states, StateKey(states, identified(model), "build"), CAP)
    again.save([7], b"state")
    assert again.find([1, 2, 3], longer_than=0) is not None
    assert again.find([4, 5, 6], longer_than=0) is None
    assert not list((states / "new").iterdir())


def test_a_file_of_the_hubs_cache_is_named_by_its_hash(tmp_path: Path) -> None:
    blob, link = tmp_path / ("ab" * 32), tmp_path / "model.gguf"
    blob.write_bytes(b"weights")
    link.symlink_to(blob)
    assert StateKey(tmp_path / "states", identified(link), "build").known() == f"{blob.name} build"


def test_checkpoints_are_saved_with_their_state(store: KVStore) -> None:
    store.save([1, 2, 3, 4], b"state", [Checkpoint(2, bytearray(b"two")), Checkpoint(3, bytearray(b"three"))])
    saved = [1, 2, 3, 4], b"state", ((2, b"two"), (3, b"three"))
    assert of(store.find([1, 2, 9], longer_than=1, cuts=False)) == saved
    assert store.find([1, 9], longer_than=0, cuts=False) is None
    assert of(store.find([1, 9], longer_than=0)) == saved


def test_a_state_that_no_checkpoint_replaces_stays(store: KVStore) -> None:
    store.save([1], b"state", [Checkpoint(1, bytearray(b"one"))])
    store.save([1, 2, 3], b"state", [Checkpoint(2, bytearray(b"two"))])
    assert of(store.find([1, 9], longer_than=0, cuts=False)) == ([1], b"state", ((1, b"one"),))
    found = store.find([1, 2, 9], longer_than=1, cuts=False)
    assert found is not None
    assert [each[:2] for each in found.checkpoints] == [(2, b"two")]


def test_files_that_were_opened_once_are_not_opened_again(store: KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt opens no file but the one of its state, which is read once."""
    for first in range(1, 40):
        store.save([first, 2, 3], b"state", [Checkpoint(2, bytearray(b"checkpoint"))])
    store.find([0], longer_than=0)
    opened: list[Path] = []
    unwatched = Path.open

    def watched(path: Path, *args: Any, **options: Any) -> Any:
        opened.append(path)
        return unwatched(path, *args, **options)

    monkeypatch.setattr(Path, "open", watched)
    assert store.find([100, 2, 3], longer_than=0) is None
    assert opened == []
    assert store.find([7, 2, 3, 4], longer_than=0) is not None
    assert len(opened) == 1


def test_a_state_that_was_read_ahead_is_not_read_again(store: KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save([1, 2, 3], b"state", [Checkpoint(2, bytearray(b"checkpoint"))])
    store.read_ahead([1, 2, 3, 4], longer_than=0)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", None)
        assert of(store.find([1, 2, 3, 4], longer_than=0)) == ([1, 2, 3], b"state", ((2, b"checkpoint"),))


def test_what_many_clients_come_back_for_is_read_ahead_for_all_of_them(
    store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for client in range(8):
        store.save([client, 2, 3], b"state")
    for client in range(8):
        store.read_ahead([client, 2, 3, 4], longer_than=0)
    monkeypatch.setattr(store, "_read", None)
    assert [store.find([client, 2, 3, 4], longer_than=0) is not None for client in range(8)] == [True] * 8
    assert not store._ahead


def test_states_read_ahead_that_nobody_asked_for_are_forgotten(store: KVStore) -> None:
    for end in range(100):
        store.save([5, end], b"other")
        store.read_ahead([5, end, 1], longer_than=0)
    assert 8 <= len(store._ahead) <= 64, "each has a descriptor"
    store.forget_ahead()
    assert not store._ahead


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="Linux tells what memory is of files")
def test_a_state_takes_no_memory_of_its_own(tmp_path: Path) -> None:
    """Neither while it is written, nor while it is waited for."""

    def write(path: Path) -> int:
        with path.open("wb") as file:
            for _ in range(64):
                file.write(bytes(range(256)) * 4096)
        return 0

    def anonymous() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) << 10

    store = KVStore(tmp_path, "model", 1 << 30)
    before = anonymous()
    assert store.save([1, 2, 3], write) > 64 << 20
    saved = store.find([1, 2, 3], longer_than=0)
    assert saved is not None
    assert (len(saved.state), saved.state[-1]) == (64 << 20, 255)
    assert bytes(saved.state[:4]) == bytes(range(4))
    saved.state[:4] = b"mine"
    assert anonymous() - before < 24 << 20
    found = store.find([1, 2, 3], longer_than=0)
    assert found is not None
    assert bytes(found.state[:4]) == bytes(range(4)), "the file is as it was"


def test_a_state_that_changed_after_it_was_read_ahead_is_read_again(store: KVStore) -> None:
    store.save([1, 2], b"short")
    store.read_ahead([1, 2, 3, 4], longer_than=0)
    store.save([1, 2, 3], b"long")
    assert of(store.find([1, 2, 3, 4], longer_than=0)) == ([1, 2, 3], b"long")


def test_a_full_folder_keeps_the_hashes(tmp_path: Path) -> None:
    """Else the states would be there, but not found by the next process."""
    model, states = tmp_path / "model.gguf", tmp_path / "states"
    model.write_bytes(b"weights")

    def store() -> KVStore:
        return KVStore(states, StateKey(states, identified(model), "build"), 1000)

    opened = store()
    for first in range(20):
        opened.save([first, 2], bytes(400))
    assert store().find([19, 2], longer_than=0) is not None


def test_the_saver_goes_on_after_a_state_that_found_no_memory(store: KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = store.finish
    left = iter([MemoryError(), OSError()])

    def finish(*args: Any) -> int:
        if (error := next(left, None)) is not None:
            raise error
        return whole(*args)

    monkeypatch.setattr(store, "finish", finish)
    saver = store.background_saver()
    for first in range(3):
        saver.save([first, 2, 3], bytearray(b"state"))
        saver.wait()
    assert of(store.find([2, 2, 3, 4], longer_than=0)) == ([2, 2, 3], b"state")


def test_what_is_on_disk_is_not_saved_again(store: KVStore) -> None:
    """Whoever wrote it; nor what was once, so that prefixes that don't fit together are not written in turns."""
    saver, tokens = store.background_saver(), list(range(1000))
    assert saver.accepts(Prefix(tokens, Salt("me")), 10)
    store.save(tokens[:600], b"state", owner="me")
    assert saver.accepts(Prefix(tokens, Salt("me")), 10)
    assert not saver.accepts(Prefix(tokens, Salt("me")), 10, most_saved=0.5)
    assert not saver.accepts(Prefix(tokens[:800], Salt("me")), 10), "too few are new"
    assert saver.accepts(Prefix(tokens, Salt("you")), 10, most_saved=0)
    assert not saver.accepts(Prefix(tokens, Salt("you"), n_saved=900), 10)
    assert not saver.accepts(Prefix(tokens, Salt("you")), CAP + 1)
