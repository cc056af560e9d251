"""Garbage in the cache: every byte of no use is found and explained, and nothing else is touched."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.model_disk import NEW, OLD, age, put, settings, tree

from llmrun.models.store.removal import Leftover, collect, discard
from llmrun.models.store.store import Store
from llmrun.models.store.use import using

FOLDER = "models--maker--tiny-GGUF"
SHA = "f" * 64

pytestmark = pytest.mark.usefixtures("package_on_path")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(settings(tmp_path / "hub"))


def stray(
    store: Store, name: str, *, days: float = 3, content: bytes = b"123", folder: str = f"{FOLDER}/blobs"
) -> Path:
    """Create an unneeded file of this age."""
    path = store.root / folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    age(path, days)
    return path


def going(store: Store, **options: bool) -> dict[str, str]:
    """Name -> why, of what would be removed."""
    return {found.path.name: found.why for found in collect(store, **options) if not found.keep}


def one(store: Store, path: Path, **options: bool) -> Leftover:
    return next(found for found in collect(store, **options) if found.path == path)


def test_a_clean_cache_has_none(store: Store) -> None:
    assert collect(store) == []
    put(store, "tiny-Q4_0.gguf")
    put(store, "README.md", content=b"card")
    (store.root / "version.txt").write_text("1")
    (store.root / "datasets--a--b/blobs").mkdir(parents=True)
    (store.root / "datasets--a--b/blobs/x").write_text("not ours")
    assert collect(store, include_recent=True, now=time.time() + 1e9) == []


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "less than a second"), (1.2, "1 second"), (59, "59 seconds"), (60, "1 minute")]
)
def test_ages(store: Store, seconds: float, words: str) -> None:
    part = stray(store, f"{SHA}.part")
    (found,) = collect(store, now=part.stat().st_mtime + seconds)
    assert found.keep == f"only {words} old; --all includes it"


def test_parts_of_downloads(store: Store) -> None:
    part = stray(store, f"{SHA}.part")
    stray(store, f"{SHA}.part.map")
    young = stray(store, f"{'e' * 64}.part", days=0.1)
    found = going(store)
    assert found[part.name] == "part of a download, 3 days old; `llmrun pull` would resume it"
    assert set(found) == {part.name, f"{SHA}.part.map"}
    assert one(store, young).keep == "only 2 hours old; --all includes it"
    assert set(going(store, include_recent=True)) == {part.name, f"{SHA}.part.map", young.name}


def test_a_part_with_holes_counts_what_is_on_the_disk(store: Store) -> None:
    part = stray(store, f"{SHA}.part")
    with part.open("r+b") as file:
        file.truncate(1 << 30)
    age(part, 3)
    assert one(store, part).n_bytes < 1 << 20


def test_what_another_program_may_be_writing_stays(store: Store) -> None:
    young = stray(store, f"{SHA}.abcd1234.incomplete", days=0.5)
    old = stray(store, f"{'e' * 64}.abcd1234.incomplete")
    assert one(store, young, include_recent=True).keep == "another program may be writing it"
    assert "huggingface_hub never resumes one" in going(store)[old.name]


HOLD = """
import sys
from filelock import FileLock
with FileLock(sys.argv[1]):
    print(1, flush=True)
    sys.stdin.read()
"""


def test_a_running_download_stays(store: Store) -> None:
    part = stray(store, f"{SHA}.part")
    lock = store.lock("maker/tiny-GGUF", SHA)
    lock.parent.mkdir(parents=True)
    before = collect(store)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as held:
        assert held.stdout is not None
        held.stdout.readline()
        assert one(store, part, include_recent=True).keep == "it is being downloaded right now"
        assert discard(before) == 0  # it began after we looked
        assert part.exists()
        held.kill()
    assert discard(before) == 3
    assert not part.exists()


def test_bytes_without_a_name(store: Store) -> None:
    put(store, "tiny-Q4_0.gguf")
    path = stray(store, SHA, content=b"12345")
    assert going(store) == {SHA: "no snapshot refers to these bytes"}
    assert one(store, path).n_bytes == 5
    found = collect(store)
    store.install("maker/tiny-GGUF", OLD, "late-Q8_0.gguf", SHA)  # it got one since we looked
    assert discard(found) == 0
    assert path.exists()


def test_names_without_bytes(store: Store) -> None:
    path = put(store, "tiny-Q4_0.gguf")
    path.resolve().unlink()
    age(path, 2)
    (found,) = collect(store)
    assert (found.path, found.why) == (path, "a name whose bytes are missing")
    discard([found])
    assert tree(store.root) == set()


def test_an_older_revision_goes_when_a_newer_has_the_same_file(store: Store) -> None:
    old = put(store, "tiny-Q4_0.gguf", OLD, content=b"old weights")
    blob = old.resolve()
    put(store, "config.json", OLD, content=b"{}")
    only_there = put(store, "tiny-Q8_0.gguf", OLD, content=b"only here")
    new = put(store, "tiny-Q4_0.gguf", NEW, content=b"new")
    for path in (old, blob, only_there):
        age(path, 5)
    assert [(found.path, found.n_bytes) for found in collect(store)] == [(old, 0), (blob, 11)]
    assert going(store)[old.name] == f"an older revision; {NEW[:7]} has the same file"
    assert going(store)[blob.name] == "only an older revision has it"
    assert discard(collect(store)) == 11
    assert new.read_bytes() == b"new"
    assert only_there.read_bytes() == b"only here"
    assert collect(store) == []


def test_what_a_branch_or_tag_stands_at_is_not_old(store: Store) -> None:
    old = put(store, "tiny-Q4_0.gguf", OLD, content=b"old")
    (store.root / FOLDER / "refs/pr").mkdir()
    (store.root / FOLDER / "refs/pr/1").write_text(OLD)
    put(store, "tiny-Q4_0.gguf", NEW, content=b"new")
    age(old, 5)
    assert collect(store) == []


def test_an_older_revision_with_the_same_bytes_is_only_a_name(store: Store) -> None:
    old = put(store, "tiny-Q4_0.gguf", OLD)
    new = put(store, "tiny-Q4_0.gguf", NEW)
    age(old, 5)
    assert [(found.path, found.n_bytes) for found in collect(store)] == [(old, 0)]
    discard(collect(store))
    assert new.read_bytes() == b"GGUF"


def test_an_older_revision_that_is_young_or_in_use_keeps_its_bytes(store: Store) -> None:
    old = put(store, "tiny-Q4_0.gguf", OLD, content=b"old")
    put(store, "tiny-Q4_0.gguf", NEW, content=b"new")
    age(old.resolve(), 5)
    assert [(found.path, found.keep[:4]) for found in collect(store)] == [(old, "only")]
    age(old, 5)
    with using(old):
        (found,) = collect(store)
        assert found.keep == "an llmrun process has it loaded"
        assert discard(collect(store)) == 0
    assert old.read_bytes() == b"old"


def test_hard_links_are_names_too(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no symlinks")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "symlink_to", refuse)
        put(store, "tiny-Q4_0.gguf")
    assert collect(store, include_recent=True, now=time.time() + 1e9) == []


def test_leftovers_of_installations_and_links(store: Store) -> None:
    put(store, "tiny-Q4_0.gguf")
    stray(store, "tiny-Q8_0.gguf.123.tmp", folder=f"{FOLDER}/snapshots/{OLD}")
    stray(store, "big.gguf.123.tmp")
    assert going(store)["big.gguf.123.tmp"] == "left by an interrupted import"
    stray(store, "link.txt", folder="llmrun-urls/0123")
    stray(store, "x.gguf.unchecked", folder="llmrun-urls/4567")
    stray(store, "x.gguf.part", folder="llmrun-urls/89ab")
    stray(store, "x.gguf", folder="llmrun-urls/cdef")
    stray(store, "link.txt", folder="llmrun-urls/cdef")
    found = going(store)
    assert set(found) == {"tiny-Q8_0.gguf.123.tmp", "big.gguf.123.tmp", "link.txt", "x.gguf.unchecked", "x.gguf.part"}
    discard(collect(store))
    assert "llmrun-urls/cdef/link.txt" in tree(store.root)
    assert not (store.root / "llmrun-urls/0123").exists()


def test_locks_of_downloads_that_are_over(store: Store) -> None:
    done = stray(store, f"{SHA}.lock", folder=f".locks/{FOLDER}", content=b"")
    waiting = stray(store, f"{'e' * 64}.lock", folder=f".locks/{FOLDER}", content=b"")
    stray(store, f"{'e' * 64}.part", days=0.1)
    assert going(store) == {done.name: "the lock of a finished download"}
    discard(collect(store))
    assert not done.exists()
    assert waiting.exists()
