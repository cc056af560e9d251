"""Removing a model: exactly its bytes go, nothing dangles afterwards, and what is in use or another's stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.model_disk import NEW, OLD, REPOSITORY, lonely_home, put, put_lm_studio, put_ollama, settings, tree

from llmrun.errors import ModelNotFoundError, UsageError
from llmrun.models.store import other_programs
from llmrun.models.store.installed import Installed
from llmrun.models.store.removal import plan_removal, remove
from llmrun.models.store.store import Store
from llmrun.models.store.use import holders, in_use, removing, using

pytestmark = pytest.mark.usefixtures("package_on_path")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    lonely_home(tmp_path / "home", monkeypatch)
    return Store(settings(tmp_path / "hub"))


def only(store: Store, quant: str = "") -> Installed:
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
        (holder,) = holders(removal.blobs)
        assert (holder.pid, str(path) in holder.command) == (user.pid, True)
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


def _put_and_find(store: Store) -> Installed:
    put(store, "a/b/tiny-Q4_0.gguf")
    return only(store)
