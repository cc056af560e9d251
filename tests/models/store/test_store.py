"""The cache on disk: its layout is the one other tools use, and what they put there is found."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.model_disk import NEW, OLD, REPOSITORY, put, put_lm_studio, put_ollama, settings

from llmrun.models.registry import ModelSpec, load_catalogue
from llmrun.models.store.store import Store, all_models
from llmrun.models.store.use import forget_use, last_used, using


@pytest.fixture
def store(tmp_path: Path, home: Path) -> Store:
    return Store(settings(tmp_path / "hub"))


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


def test_where_nobody_asked_for_a_quant_any_will_do(store: Store) -> None:
    path = put(store, "tiny-Q8_0.gguf")
    wanted = spec(filename="tiny-Q4_1.gguf", quant="Q4_1")
    assert store.find(wanted) is None
    assert store.find(replace(wanted, any_quant=True)).path == path  # type: ignore[union-attr]
    exact = put(store, "tiny-Q4_1.gguf", content=b"other")
    assert store.find(replace(wanted, any_quant=True)).path == exact  # type: ignore[union-attr]


def test_capitals_of_a_repository_do_not_matter(store: Store) -> None:
    path = put(store, "tiny-Q8_0.gguf")
    found = store.find(ModelSpec("typed", repository="MAKER/Tiny-gguf", quant="Q8_0"))
    assert found is not None
    assert (found.path, found.repository) == (path, REPOSITORY)


def test_what_others_fetched_from_the_same_repository(store: Store, home: Path) -> None:
    studio = put_lm_studio(home / ".lmstudio/models", REPOSITORY, "tiny-Q8_0.gguf")
    ollama = put_ollama(home / ".ollama/models", f"{REPOSITORY}:Q4_0", b"GGUF 2", file_type="Q4_0", host="hf.co")
    assert store.find(spec(filename="tiny-Q8_0.gguf")).path == studio  # type: ignore[union-attr]
    assert store.find(spec(quant="q4_0")).path == ollama  # type: ignore[union-attr]
    assert store.find(spec(filename="tiny-Q4_0.gguf")).path == ollama  # type: ignore[union-attr]
    assert store.find(spec(quant="Q6_K")) is None
    assert store.find(spec(quant="Q8_0", revision=OLD)) is None  # whose revision nobody knows
    ours = put(store, "tiny-Q8_0.gguf", content=b"GGUF 3")
    assert store.find(spec(quant="Q8_0")).path == ours  # type: ignore[union-attr]


def test_everything_by_its_shortest_name(store: Store, home: Path) -> None:
    entry = load_catalogue().entries["smollm2"]
    put(store, entry.filename("Q4_1"), repository=entry.repository)
    put(store, entry.filename("Q8_0"), repository=entry.repository, content=b"GGUF 2")
    put(store, "tiny-Q4_0.gguf")
    put_lm_studio(home / ".lmstudio/models", "pub/repo", "x-Q4_0.gguf")
    put_ollama(home / ".ollama/models", "library/llama3.2:1b")
    names = [model.name for model in all_models(settings(store.root))]
    assert names == [
        "lmstudio/pub/repo:Q4_0",
        "maker/tiny-GGUF:Q4_0",
        "ollama/llama3.2:1b",
        "smollm2",
        "smollm2:Q8_0",
    ]


def test_two_files_of_the_same_quant_have_two_names(store: Store) -> None:
    put(store, "b-large-Q4_0.gguf")
    put(store, "a-Q4_0.gguf", content=b"other")
    assert [model.name for model in store.installed()] == [f"{REPOSITORY}/b-large-Q4_0.gguf", f"{REPOSITORY}:Q4_0"]
    assert store.find(spec(quant="Q4_0")).filename == "a-Q4_0.gguf"  # type: ignore[union-attr]


def test_when_a_model_was_used(store: Store, tmp_path: Path) -> None:
    path = put(store, "tiny-Q4_0.gguf")
    os.utime(path, (2_000, 1_000))  # its access time means nothing
    assert (store.installed()[0].modified, last_used(path)) == (1_000, 0)
    before = time.time() - 2  # a disk's clock may be coarse
    with using(path):
        assert last_used(path) >= before
    other = tmp_path / "link.gguf"
    other.symlink_to(path)
    assert last_used(other) == last_used(path), "it is the same file"
    forget_use(path)
    assert last_used(path) == 0


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
