"""Removing a model: exactly its bytes go, nothing dangles afterwards, and what is in use or another's stays."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.model_disk import NEW, OLD, REPOSITORY, age, put, put_lm_studio, put_ollama, settings, tree

from llmrun.errors import ModelNotFoundError, UsageError
from llmrun.models.store import other_programs
from llmrun.models.store.installed import InstalledModel
from llmrun.models.store.removal import Leftover, collect, discard, plan_removal, remove
from llmrun.models.store.store import Store
from llmrun.models.store.use import holders, in_use, removing, using

pytestmark = pytest.mark.usefixtures("package_on_path")


@pytest.fixture
def store(home: Path, tmp_path: Path) -> Store:
    return Store(settings(tmp_path / "hub"))


def only(store: Store, quant: str = "") -> InstalledModel:
    return next(model for model in store.installed() if not quant or model.quant == quant)


def dangling(store: Store) -> list[Path]:
    return [path for path in store.root.rglob("*") if path.is_symlink() and not path.exists()]


def test_the_last_model_leaves_nothing(store: Store) -> None:
    put(store, "sub/tiny-Q4_0.gguf", content=b"1234567")
    removal = plan_removal(store, only(store))
    assert (removal.freed, removal.shared, len(removal.blobs)) == (7, (), 1)
    remove(removal)
    assert tree(store.root) == set()


def test_other_files_stay(store: Store) -> None:
    kept = put(store, "tiny-Q8_0.gguf", content=b"kept")
    card = put(store, "README.md", content=b"card")
    put(store, "tiny-Q4_0.gguf", content=b"gone")
    remove(plan_removal(store, only(store, "Q4_0")))
    assert (kept.read_bytes(), card.read_bytes()) == (b"kept", b"card")
    assert [model.quant for model in store.installed()] == ["Q8_0"]
    assert len(list((store.root / "models--maker--tiny-GGUF/blobs").iterdir())) == 2
    assert (store.root / "models--maker--tiny-GGUF/refs/main").exists()


def test_every_revision_goes(store: Store) -> None:
    put(store, "tiny-Q4_0.gguf", OLD, content=b"old")
    put(store, "tiny-Q4_0.gguf", NEW, content=b"newer")
    removal = plan_removal(store, only(store))
    assert removal.freed == 8
    remove(removal)
    assert tree(store.root) == set()


def test_bytes_that_another_name_needs_stay(store: Store) -> None:
    put(store, "tiny-Q4_0.gguf", content=b"same")
    other = put(store, "copy-Q8_0.gguf", NEW, content=b"same")
    removal = plan_removal(store, only(store, "Q4_0"))
    assert (removal.freed, removal.blobs, removal.shared) == (0, (), (f"copy-Q8_0.gguf of {NEW[:7]}",))
    remove(removal)
    assert other.read_bytes() == b"same"
    assert not dangling(store)
    assert not (store.root / f"models--maker--tiny-GGUF/snapshots/{OLD}").exists()


def test_all_parts_of_a_split_model(store: Store) -> None:
    for number in (1, 2):
        put(store, f"big-Q4_0-0000{number}-of-00002.gguf", content=b"part %d" % number)
    remove(plan_removal(store, only(store)))
    assert tree(store.root) == set()


def test_hard_links_and_copies(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no symlinks")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "symlink_to", refuse)
        put(store, "tiny-Q4_0.gguf", content=b"12345")
    removal = plan_removal(store, only(store))
    assert removal.freed == 5
    remove(removal)
    assert tree(store.root) == set()


def test_a_model_of_a_plain_link(store: Store) -> None:
    url = "https://example.org/tiny-Q4_0.gguf"
    target = store.link_target(url)
    target.parent.mkdir(parents=True)
    target.write_bytes(b"GGUF")
    store.install_link(url)
    removal = plan_removal(store, only(store))
    assert removal.freed == 4
    remove(removal)
    assert tree(store.root) == {"llmrun-urls"}


def test_the_hubs_shared_store_is_left_to_the_hub(store: Store) -> None:
    path = put(store, "tiny-Q4_0.gguf", content=b"shared")
    blob = path.resolve()
    shared = store.root / "blobs/ab" / ("ab" + "0" * 62)
    shared.parent.mkdir(parents=True)
    blob.rename(shared)
    blob.symlink_to(os.path.relpath(shared, blob.parent))
    removal = plan_removal(store, only(store))
    assert removal.freed == 0
    assert "hf cache prune" in removal.shared[0]
    remove(removal)
    assert shared.read_bytes() == b"shared"
    assert not dangling(store)


def test_another_programs_models_are_not_ours(store: Store, tmp_path: Path) -> None:
    put_ollama(tmp_path / "home/.ollama/models", "library/tiny:1b")
    put_lm_studio(tmp_path / "home/.lmstudio/models", "a/b", "m-Q4_0.gguf")
    before = tree(tmp_path / "home")
    hints = ("ollama rm tiny:1b", "delete it in LM Studio's My Models")
    for model, hint in zip(other_programs.models(), hints, strict=True):
        with pytest.raises(UsageError, match="belongs to") as caught:
            plan_removal(store, model)
        assert caught.value.hint == hint
    assert tree(tmp_path / "home") == before


@pytest.mark.parametrize("step", range(6))
def test_an_interruption_leaves_nothing_dangling_and_can_be_finished(
    store: Store, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "big-Q4_0-00001-of-00002.gguf", content=b"part 1")
    put(store, "big-Q4_0-00002-of-00002.gguf", content=b"part 2")
    put(store, "tiny-Q8_0.gguf", content=b"other")
    removal = plan_removal(store, only(store, "Q4_0"))
    unlink, calls = Path.unlink, 0

    def interrupted(path: Path, missing_ok: bool = False) -> None:
        nonlocal calls
        calls += 1
        if calls > step:
            raise KeyboardInterrupt
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", interrupted)
    if step < 4:
        with pytest.raises(KeyboardInterrupt):
            remove(removal)
    else:
        remove(removal)
    assert not dangling(store)
    monkeypatch.setattr(Path, "unlink", unlink)
    remove(removal)
    assert [model.quant for model in store.installed()] == ["Q8_0"]
    assert len(list((store.root / "models--maker--tiny-GGUF/blobs").iterdir())) == 1


USE = """
import sys
from pathlib import Path
from llmrun.models.store.use import using
with using(Path(sys.argv[1])):
    print("using", flush=True)
    sys.stdin.read()
"""


def test_a_model_in_use_stays(store: Store) -> None:
    path = put(store, "tiny-Q4_0.gguf")
    removal = plan_removal(store, only(store))
    with subprocess.Popen(
        [sys.executable, "-c", USE, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as user:
        assert user.stdout is not None
        assert user.stdout.readline() == b"using\n"
        assert in_use(path)
        with pytest.raises(UsageError, match="is in use"):
            remove(removal)
        ((pid, command),) = holders(removal.blobs).items()
        assert (pid, str(path) in command) == (user.pid, True)
        assert path.exists()
        with using(path):  # two may use it
            pass
        user.kill()  # whatever becomes of the user
    assert not in_use(path)
    assert not holders(removal.blobs)
    remove(removal)
    assert not path.exists()


def test_nobody_begins_to_use_what_is_being_removed(store: Store) -> None:
    path = put(store, "tiny-Q4_0.gguf")
    with removing([path], "tiny"), pytest.raises(ModelNotFoundError, match="being removed"), using(path):
        pass
    with using(path):
        pass


def test_using_holds_every_part_and_minds_no_missing_file(store: Store) -> None:
    first = put(store, "big-Q4_0-00001-of-00002.gguf", content=b"1")
    second = put(store, "big-Q4_0-00002-of-00002.gguf", content=b"2")
    with using(first):
        assert in_use(second)
    with using(first.with_name("missing.gguf")):
        pass
    assert not in_use(first.with_name("missing.gguf"))


def test_repository_names_are_the_same(store: Store) -> None:
    assert plan_removal(store, _put_and_find(store)).folder.name == "models--" + REPOSITORY.replace("/", "--")


def _put_and_find(store: Store) -> InstalledModel:
    put(store, "a/b/tiny-Q4_0.gguf")
    return only(store)


# ---- garbage in the cache: every byte of no use is found and explained, and nothing else is touched


FOLDER = "models--maker--tiny-GGUF"
SHA = "f" * 64


@pytest.fixture
def store_with_garbage(tmp_path: Path) -> Store:
    return Store(settings(tmp_path / "hub"))


def stray(
    store_with_garbage: Store, name: str, *, days: float = 3, content: bytes = b"123", folder: str = f"{FOLDER}/blobs"
) -> Path:
    """Create an unneeded file of this age."""
    path = store_with_garbage.root / folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    age(path, days)
    return path


def going(store_with_garbage: Store, **options: bool) -> dict[str, str]:
    """Name -> why, of what would be removed."""
    return {found.path.name: found.why for found in collect(store_with_garbage, **options) if not found.keep}


def one(store_with_garbage: Store, path: Path, **options: bool) -> Leftover:
    return next(found for found in collect(store_with_garbage, **options) if found.path == path)


def test_a_clean_cache_has_none(store_with_garbage: Store) -> None:
    assert collect(store_with_garbage) == []
    put(store_with_garbage, "tiny-Q4_0.gguf")
    put(store_with_garbage, "README.md", content=b"card")
    (store_with_garbage.root / "version.txt").write_text("1")
    (store_with_garbage.root / "datasets--a--b/blobs").mkdir(parents=True)
    (store_with_garbage.root / "datasets--a--b/blobs/x").write_text("not ours")
    assert collect(store_with_garbage, include_recent=True, now=time.time() + 1e9) == []


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "less than a second"), (1.2, "1 second"), (59, "59 seconds"), (60, "1 minute")]
)
def test_ages(store_with_garbage: Store, seconds: float, words: str) -> None:
    part = stray(store_with_garbage, f"{SHA}.part")
    (found,) = collect(store_with_garbage, now=part.stat().st_mtime + seconds)
    assert found.keep == f"only {words} old; --all includes it"


def test_parts_of_downloads(store_with_garbage: Store) -> None:
    part = stray(store_with_garbage, f"{SHA}.part")
    stray(store_with_garbage, f"{SHA}.part.map")
    young = stray(store_with_garbage, f"{'e' * 64}.part", days=0.1)
    found = going(store_with_garbage)
    assert found[part.name] == "part of a download, 3 days old; `llmrun pull` would resume it"
    assert set(found) == {part.name, f"{SHA}.part.map"}
    assert one(store_with_garbage, young).keep == "only 2 hours old; --all includes it"
    assert set(going(store_with_garbage, include_recent=True)) == {part.name, f"{SHA}.part.map", young.name}


def test_a_part_with_holes_counts_what_is_on_the_disk(store_with_garbage: Store) -> None:
    part = stray(store_with_garbage, f"{SHA}.part")
    with part.open("r+b") as file:
        file.truncate(1 << 30)
    age(part, 3)
    assert one(store_with_garbage, part).n_bytes < 1 << 20


def test_what_another_program_may_be_writing_stays(store_with_garbage: Store) -> None:
    young = stray(store_with_garbage, f"{SHA}.abcd1234.incomplete", days=0.5)
    old = stray(store_with_garbage, f"{'e' * 64}.abcd1234.incomplete")
    assert one(store_with_garbage, young, include_recent=True).keep == "another program may be writing it"
    assert "huggingface_hub never resumes one" in going(store_with_garbage)[old.name]


HOLD = """
import sys
from filelock import FileLock
with FileLock(sys.argv[1]):
    print(1, flush=True)
    sys.stdin.read()
"""


def test_a_running_download_stays(store_with_garbage: Store) -> None:
    part = stray(store_with_garbage, f"{SHA}.part")
    lock = store_with_garbage.lock("maker/tiny-GGUF", SHA)
    lock.parent.mkdir(parents=True)
    before = collect(store_with_garbage)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as held:
        assert held.stdout is not None
        held.stdout.readline()
        assert one(store_with_garbage, part, include_recent=True).keep == "it is being downloaded right now"
        assert discard(before) == 0  # it began after we looked
        assert part.exists()
        held.kill()
    assert discard(before) == 3
    assert not part.exists()


def test_bytes_without_a_name(store_with_garbage: Store) -> None:
    put(store_with_garbage, "tiny-Q4_0.gguf")
    path = stray(store_with_garbage, SHA, content=b"12345")
    assert going(store_with_garbage) == {SHA: "no snapshot refers to these bytes"}
    assert one(store_with_garbage, path).n_bytes == 5
    found = collect(store_with_garbage)
    store_with_garbage.install("maker/tiny-GGUF", OLD, "late-Q8_0.gguf", SHA)  # it got one since we looked
    assert discard(found) == 0
    assert path.exists()


def test_names_without_bytes(store_with_garbage: Store) -> None:
    path = put(store_with_garbage, "tiny-Q4_0.gguf")
    path.resolve().unlink()
    age(path, 2)
    (found,) = collect(store_with_garbage)
    assert (found.path, found.why) == (path, "a name whose bytes are missing")
    discard([found])
    assert tree(store_with_garbage.root) == set()


def test_an_older_revision_goes_when_a_newer_has_the_same_file(store_with_garbage: Store) -> None:
    old = put(store_with_garbage, "tiny-Q4_0.gguf", OLD, content=b"old weights")
    blob = old.resolve()
    put(store_with_garbage, "config.json", OLD, content=b"{}")
    only_there = put(store_with_garbage, "tiny-Q8_0.gguf", OLD, content=b"only here")
    new = put(store_with_garbage, "tiny-Q4_0.gguf", NEW, content=b"new")
    for path in (old, blob, only_there):
        age(path, 5)
    assert [(found.path, found.n_bytes) for found in collect(store_with_garbage)] == [(old, 0), (blob, 11)]
    assert going(store_with_garbage)[old.name] == f"an older revision; {NEW[:7]} has the same file"
    assert going(store_with_garbage)[blob.name] == "only an older revision has it"
    assert discard(collect(store_with_garbage)) == 11
    assert new.read_bytes() == b"new"
    assert only_there.read_bytes() == b"only here"
    assert collect(store_with_garbage) == []


def test_what_a_branch_or_tag_stands_at_is_not_old(store_with_garbage: Store) -> None:
    old = put(store_with_garbage, "tiny-Q4_0.gguf", OLD, content=b"old")
    (store_with_garbage.root / FOLDER / "refs/pr").mkdir()
    (store_with_garbage.root / FOLDER / "refs/pr/1").write_text(OLD)
    put(store_with_garbage, "tiny-Q4_0.gguf", NEW, content=b"new")
    age(old, 5)
    assert collect(store_with_garbage) == []


def test_an_older_revision_with_the_same_bytes_is_only_a_name(store_with_garbage: Store) -> None:
    old = put(store_with_garbage, "tiny-Q4_0.gguf", OLD)
    new = put(store_with_garbage, "tiny-Q4_0.gguf", NEW)
    age(old, 5)
    assert [(found.path, found.n_bytes) for found in collect(store_with_garbage)] == [(old, 0)]
    discard(collect(store_with_garbage))
    assert new.read_bytes() == b"GGUF"


def test_an_older_revision_that_is_young_or_in_use_keeps_its_bytes(store_with_garbage: Store) -> None:
    old = put(store_with_garbage, "tiny-Q4_0.gguf", OLD, content=b"old")
    put(store_with_garbage, "tiny-Q4_0.gguf", NEW, content=b"new")
    age(old.resolve(), 5)
    assert [(found.path, found.keep[:4]) for found in collect(store_with_garbage)] == [(old, "only")]
    age(old, 5)
    with using(old):
        (found,) = collect(store_with_garbage)
        assert found.keep == "an llmrun process has it loaded"
        assert discard(collect(store_with_garbage)) == 0
    assert old.read_bytes() == b"old"


def test_hard_links_are_names_too(store_with_garbage: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no symlinks")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "symlink_to", refuse)
        put(store_with_garbage, "tiny-Q4_0.gguf")
    assert collect(store_with_garbage, include_recent=True, now=time.time() + 1e9) == []


def test_leftovers_of_installations_and_links(store_with_garbage: Store) -> None:
    put(store_with_garbage, "tiny-Q4_0.gguf")
    stray(store_with_garbage, "tiny-Q8_0.gguf.123.tmp", folder=f"{FOLDER}/snapshots/{OLD}")
    stray(store_with_garbage, "big.gguf.123.tmp")
    assert going(store_with_garbage)["big.gguf.123.tmp"] == "left by an interrupted import"
    stray(store_with_garbage, "link.txt", folder="llmrun-urls/0123")
    stray(store_with_garbage, "x.gguf.unchecked", folder="llmrun-urls/4567")
    stray(store_with_garbage, "x.gguf.part", folder="llmrun-urls/89ab")
    stray(store_with_garbage, "x.gguf", folder="llmrun-urls/cdef")
    stray(store_with_garbage, "link.txt", folder="llmrun-urls/cdef")
    found = going(store_with_garbage)
    assert set(found) == {"tiny-Q8_0.gguf.123.tmp", "big.gguf.123.tmp", "link.txt", "x.gguf.unchecked", "x.gguf.part"}
    discard(collect(store_with_garbage))
    assert "llmrun-urls/cdef/link.txt" in tree(store_with_garbage.root)
    assert not (store_with_garbage.root / "llmrun-urls/0123").exists()


def test_locks_of_downloads_that_are_over(store_with_garbage: Store) -> None:
    done = stray(store_with_garbage, f"{SHA}.lock", folder=f".locks/{FOLDER}", content=b"")
    waiting = stray(store_with_garbage, f"{'e' * 64}.lock", folder=f".locks/{FOLDER}", content=b"")
    stray(store_with_garbage, f"{'e' * 64}.part", days=0.1)
    assert going(store_with_garbage) == {done.name: "the lock of a finished download"}
    discard(collect(store_with_garbage))
    assert not done.exists()
    assert waiting.exists()
