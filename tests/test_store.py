"""The cache on disk: its layout is the one other tools use, and what they put there is found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from stand_in_hub import sha256

from llmrun.config import Settings
from llmrun.models.registry import ModelSpec
from llmrun.models.store import Store

REPOSITORY = "maker/tiny-GGUF"
OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(Settings(tmp_path / "hub", "https://hub.invalid", offline=False, debug=False))


def put(store: Store, filename: str, commit: str = OLD, repository: str = REPOSITORY, content: bytes = b"GGUF") -> Path:
    """A file as it is after a pull."""
    name = sha256(f"{filename} {commit}".encode())
    blob = store.blob(repository, name)
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(content)
    path = store.install(repository, commit, filename, name)
    order = 1_000_000_000 * (1 + (commit == NEW))
    os.utime(path.parent, ns=(order, order))
    return path


def spec(**fields: str | None) -> ModelSpec:
    return ModelSpec("typed", repository=REPOSITORY, **fields)  # type: ignore[arg-type]


def test_layout(store: Store) -> None:
    path = put(store, "tiny.Q4_K_M.gguf")
    root = store.root / "models--maker--tiny-GGUF"
    assert path == root / "snapshots" / OLD / "tiny.Q4_K_M.gguf"
    assert path.readlink().parts[:3] == ("..", "..", "blobs")
    assert path.resolve().parent == root / "blobs"
    assert (root / "refs" / "main").read_text() == OLD
    assert store.lock(REPOSITORY, "f" * 64) == store.root / ".locks/models--maker--tiny-GGUF" / f"{'f' * 64}.lock"


def test_huggingface_hub_reads_it(store: Store) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    put(store, "sub/tiny.Q8_0.gguf", content=b"12345")
    scan = huggingface_hub.scan_cache_dir(store.root)
    assert not scan.warnings
    (repository,) = scan.repos
    assert (repository.repo_id, repository.size_on_disk) == (REPOSITORY, 5)
    found = huggingface_hub.try_to_load_from_cache(REPOSITORY, "sub/tiny.Q8_0.gguf", cache_dir=store.root)
    assert Path(found).read_bytes() == b"12345"


def test_nothing_there(store: Store) -> None:
    assert store.installed() == []
    assert store.find(spec(quant="Q4_K_M")) is None
    assert store.find(ModelSpec("x", path=Path("x.gguf"))) is None


def test_found_by_filename_quant_or_neither(store: Store) -> None:
    small, large = put(store, "tiny-Q4_K_M.gguf"), put(store, "tiny-Q8_0.gguf")
    assert store.find(spec(filename="tiny-Q8_0.gguf")).path == large  # type: ignore[union-attr]
    assert store.find(spec(quant="q8_0")).path == large  # type: ignore[union-attr]
    assert store.find(spec()).path == small  # type: ignore[union-attr]
    assert store.find(spec(quant="Q6_K")) is None
    assert store.find(spec(filename="other.gguf")) is None


def test_newest_snapshot_that_has_it(store: Store) -> None:
    old_only = put(store, "tiny-Q8_0.gguf", OLD)
    put(store, "tiny-Q4_0.gguf", OLD)
    newer = put(store, "tiny-Q4_0.gguf", NEW)
    assert store.find(spec(quant="Q4_0")).path == newer  # type: ignore[union-attr]
    assert store.find(spec(quant="Q8_0")).path == old_only  # type: ignore[union-attr]
    assert [(model.quant, model.revision) for model in store.installed()] == [("Q4_0", NEW), ("Q8_0", OLD)]


def test_pinned_revision(store: Store) -> None:
    old = put(store, "tiny-Q4_0.gguf", OLD)
    new = put(store, "tiny-Q4_0.gguf", NEW)
    assert store.find(spec(revision=OLD)).path == old  # type: ignore[union-attr]
    assert store.find(spec(revision="c" * 40)) is None
    assert store.find(spec(revision="v1")) is None
    (store.root / "models--maker--tiny-GGUF/refs/v1").write_text(NEW)
    assert store.find(spec(revision="v1")).path == new  # type: ignore[union-attr]


def test_list(store: Store) -> None:
    put(store, "tiny-Q4_0.gguf", content=b"1234567")
    put(store, "strange.gguf", repository="other/one")
    put(store, "mmproj-F16.gguf", repository="other/one")
    put(store, "config.json", repository="other/two")
    first, second = store.installed()
    assert (first.name, first.repository, first.filename) == (
        f"{REPOSITORY}:Q4_0",
        REPOSITORY,
        "tiny-Q4_0.gguf",
    )
    assert (first.size, first.quant, first.revision) == (7, "Q4_0", OLD)
    assert (second.name, second.quant) == ("other/one/strange.gguf", "")


def test_strangers_in_the_cache(store: Store) -> None:
    path = put(store, "tiny-Q4_0.gguf")
    path.with_name("broken-Q8_0.gguf").symlink_to("../../blobs/nowhere")
    (store.root / "datasets--a--b/snapshots" / OLD).mkdir(parents=True)
    (store.root / "models--maker--tiny-GGUF/snapshots/not-a-commit").mkdir()
    (store.root / "models--maker--tiny-GGUF/snapshots/not-a-commit/x-Q8_0.gguf").write_text("x")
    (store.root / "version.txt").write_text("1")
    assert [model.quant for model in store.installed()] == ["Q4_0"]
    assert store.find(spec(quant="Q8_0")) is None


def test_split_model(store: Store) -> None:
    first = put(store, "big-Q4_0-00001-of-00002.gguf", content=b"123")
    assert store.find(spec(quant="Q4_0")) is None
    assert store.installed() == []
    put(store, "big-Q4_0-00002-of-00002.gguf", content=b"4567")
    (model,) = store.installed()
    assert (model.path, model.size) == (first, 7)
    assert store.find(spec(quant="Q4_0")) == model


def test_where_symlinks_are_impossible(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no symlinks")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    hard = put(store, "tiny-Q4_0.gguf")
    assert hard.stat().st_nlink == 2
    monkeypatch.setattr(os, "link", refuse)
    copy = put(store, "tiny-Q8_0.gguf")
    assert copy.stat().st_nlink == 1
    assert copy.read_bytes() == b"GGUF"


def test_installing_again_replaces_the_link(store: Store) -> None:
    put(store, "tiny-Q4_0.gguf")
    path = put(store, "tiny-Q4_0.gguf", content=b"again")
    assert path.read_bytes() == b"again"
    assert [entry.name for entry in path.parent.iterdir()] == ["tiny-Q4_0.gguf"]


def test_plain_links(store: Store) -> None:
    url = "https://user:canary@example.org/models/tiny-Q4_0.gguf?signature=canary"
    target = store.link_target(url)
    assert target == store.link_target("https://example.org/models/tiny-Q4_0.gguf?signature=other")
    assert target != store.link_target("https://example.com/models/tiny-Q4_0.gguf")
    target.parent.mkdir(parents=True)
    target.write_bytes(b"GGUF")
    store.install_link(url)
    (model,) = store.installed()
    assert (model.name, model.path) == ("https://example.org/models/tiny-Q4_0.gguf", target)
    assert store.find(ModelSpec(url, url=url)) == model


@pytest.mark.parametrize("name", ["..%2f..%2fx.gguf", "%00.gguf", ".gguf", "a%5Cb.gguf"])
def test_names_in_links_stay_in_their_folder(store: Store, name: str) -> None:
    target = store.link_target(f"https://example.org/{name}")
    assert target.parent.parent == store.root / "llmrun-urls"
    assert target.name.isprintable()
    assert not target.name.startswith(".")
