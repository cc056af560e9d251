"""Names: what people type becomes the right place, and what can't be a name is refused in words."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from llmrun.errors import LlmrunError, ModelNotFoundError, UsageError
from llmrun.models import registry
from llmrun.models.registry import (
    Catalogue,
    CatalogueEntry,
    Mirror,
    ModelSpec,
    load_catalogue,
    resolve,
    similar_quants,
)

MIRROR = Mirror("wheel", "1", "wheel/Tiny.Q4_1.gguf", "0" * 64, 10, 9, "abc")
TINY = CatalogueEntry(
    alias="tiny",
    title="Tiny",
    parameters="1M",
    repository="Makers/Tiny-GGUF",
    file="Tiny.{quant}.gguf",
    quant="Q4_1",
    quants=("Q4_1", "q8_0"),
    license="MIT",
    kind="chat",
    context=512,
    released="2026-01",
    checked="2026-01",
    source="a test",
    size_mb=1,
    sampling={"temperature": 0.5},
    mirror=MIRROR,
)
LARGE = CatalogueEntry(
    alias="large-8b",
    title="Large",
    parameters="8B",
    repository="Makers/Large-GGUF",
    file="Large-{quant}.gguf",
    quant="Q4_K_M",
    quants=("Q4_K_M",),
    license="MIT",
    kind="chat",
    context=512,
    released="2026-01",
    checked="2026-01",
    source="a test",
    size_mb=1,
)
CATALOGUE = Catalogue({"tiny": TINY, "large-8b": LARGE}, "tiny")


@pytest.fixture(autouse=True)
def small_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "load_catalogue", lambda: CATALOGUE)


@pytest.fixture(autouse=True)
def empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_alias_takes_the_default_quant_with_its_mirror_and_advice() -> None:
    spec = resolve("tiny")
    assert spec == ModelSpec(
        "tiny",
        repository="Makers/Tiny-GGUF",
        quant="Q4_1",
        filename="Tiny.Q4_1.gguf",
        alias="tiny",
        license="MIT",
        mirror=MIRROR,
        sampling={"temperature": 0.5},
        any_quant=True,
    )


def test_a_quant_that_was_asked_for_is_the_one() -> None:
    assert not resolve("tiny:Q4_1").any_quant
    assert not resolve("Makers/Tiny-GGUF:q4_1").any_quant
    assert resolve("Makers/Tiny-GGUF").any_quant


@pytest.mark.parametrize(
    ("wanted", "near"),
    [
        ("q4", ["Q4_K_M", "Q4_K_S"]),
        ("q4km", ["Q4_K_M"]),
        ("km", ["Q4_K_M"]),
        ("latest", ["Q8_0"]),
        ("Q8_1", ["Q8_0"]),
        ("xyz", []),
    ],
)
def test_similar_quants(wanted: str, near: list[str]) -> None:
    assert similar_quants(wanted, ["Q8_0", "Q4_K_M", "Q4_K_S"]) == near


def test_short_names() -> None:
    assert CATALOGUE.short_name("Makers/Tiny-GGUF", "Tiny.Q4_1.gguf") == "tiny"
    assert CATALOGUE.short_name("makers/tiny-gguf", "Tiny.q8_0.gguf") == "tiny:Q8_0"
    assert CATALOGUE.short_name("Makers/Tiny-GGUF", "Other.gguf") is None
    assert CATALOGUE.short_name("", "Tiny.Q4_1.gguf") is None


def test_words_that_an_entry_matches() -> None:
    assert LARGE.matches(["LARGE", "8b"])
    assert LARGE.matches(["makers"])
    assert not LARGE.matches(["large", "4b"])
    assert not replace(LARGE, alias="large-18b").matches(["large-18b", "1large"])
    assert not replace(LARGE, alias="large-18b").matches(["8b"])  # that is another size


def test_alias_with_quant_uses_the_spelling_of_the_files_and_has_no_mirror() -> None:
    spec = resolve("Tiny:Q8_0")
    assert (spec.quant, spec.filename, spec.mirror, spec.alias) == ("Q8_0", "Tiny.q8_0.gguf", None, "tiny")


def test_unknown_quant_of_an_alias_names_the_known_ones_and_a_way_on() -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve("tiny:q4")
    assert "did you mean tiny:Q4_1?" in caught.value.hint
    with pytest.raises(ModelNotFoundError) as caught:
        resolve("tiny:q2_k")
    assert "Q4_1, Q8_0" in caught.value.why
    assert "Makers/Tiny-GGUF:q2_k" in caught.value.hint
    assert resolve("Makers/Tiny-GGUF:q2_k").quant == "Q2_K"  # what the hint says works


@pytest.mark.parametrize(
    "name",
    [
        "someone/model.v2-GGUF",
        "hf.co/someone/model.v2-GGUF",
        "huggingface.co/someone/model.v2-GGUF/",
        "https://huggingface.co/someone/model.v2-GGUF",
        "https://huggingface.co/someone/model.v2-GGUF/tree/main",
        "hf://someone/model.v2-GGUF",
    ],
)
def test_repository(name: str) -> None:
    assert resolve(name) == ModelSpec(name, repository="someone/model.v2-GGUF")


@pytest.mark.parametrize("name", ["a/b:q4_k_m", "hf.co/a/b:Q4_K_M", "hf://a/b:Q4_K_M"])
def test_repository_with_quant(name: str) -> None:
    assert resolve(name) == ModelSpec(name, repository="a/b", quant="Q4_K_M")


@pytest.mark.parametrize(
    ("name", "revision", "filename"),
    [
        ("a/b/c.gguf", "main", "c.gguf"),
        ("a/b/sub/c.GGUF", "main", "sub/c.GGUF"),
        ("hf://a/b/c.gguf", "main", "c.gguf"),
        ("https://hf.co/a/b/resolve/main/c.gguf?download=true", "main", "c.gguf"),
        ("https://huggingface.co/a/b/blob/main/sub/c%20d.gguf", "main", "sub/c d.gguf"),
        ("https://huggingface.co/a/b/resolve/refs%2Fpr%2F1/c.gguf", "refs/pr/1", "c.gguf"),
        ("HTTPS://HuggingFace.co/a/b/resolve/0123abc/c.gguf", "0123abc", "c.gguf"),
    ],
)
def test_file_in_a_repository(name: str, revision: str, filename: str) -> None:
    spec = resolve(name)
    assert (spec.repository, spec.revision, spec.filename, spec.quant) == ("a/b", revision, filename, None)


def test_catalogued_repository_is_the_same_as_its_alias() -> None:
    spec = resolve("hf.co/makers/tiny-gguf")
    assert (spec.filename, spec.mirror) == ("Tiny.Q4_1.gguf", MIRROR)


def test_other_file_of_a_catalogued_repository_keeps_the_advice() -> None:
    spec = resolve("Makers/Tiny-GGUF/Other.gguf")
    assert (spec.filename, spec.alias, spec.mirror) == ("Other.gguf", "tiny", None)
    assert spec.sampling == {"temperature": 0.5}


def test_other_link() -> None:
    link = "https://example.org/models/x.gguf?token=1"
    assert resolve(link) == ModelSpec(link, url=link)


@pytest.mark.parametrize("name", ["x.gguf", "./x.gguf", "sub/x.gguf", "plain", "sub/plain", "some/deep/x.gguf"])
def test_file_that_exists_is_a_path(name: str, empty_directory: Path) -> None:
    path = empty_directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    spec = resolve(name)
    assert spec.path is not None
    assert spec.path.is_absolute()
    assert spec.path.samefile(path)
    assert spec.repository is None


def test_folder_with_one_model(empty_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = empty_directory / "models/mine"
    folder.mkdir(parents=True)
    with pytest.raises(ModelNotFoundError, match="there is no model in the folder"):
        resolve("./models/mine")
    for name in ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "mmproj-m.gguf", "README.md"):
        (folder / name).touch()
    assert resolve("./models/mine").path == folder / "m-00001-of-00002.gguf"
    assert resolve("models/mine/").repository == "models/mine"  # without a dot it is the hub's
    (folder / "sub").mkdir()
    for inside, name in ((folder, "."), (folder / "sub", "..")):
        monkeypatch.chdir(inside)
        path = resolve(name).path
        assert path is not None
        assert path.samefile(folder / "m-00001-of-00002.gguf")
    monkeypatch.chdir(empty_directory)
    (folder / "other.gguf").touch()
    with pytest.raises(ModelNotFoundError, match="has 2 models") as caught:
        resolve("./models/mine")
    assert caught.value.hint == f"name one: {folder / 'm-00001-of-00002.gguf'}"


def test_any_part_leads_to_the_first(empty_directory: Path) -> None:
    (empty_directory / "m-00002-of-00002.gguf").touch()
    assert resolve("m-00002-of-00002.gguf").path == empty_directory / "m-00002-of-00002.gguf"
    (empty_directory / "m-00001-of-00002.gguf").touch()
    assert resolve("m-00002-of-00002.gguf").path == empty_directory / "m-00001-of-00002.gguf"


def test_home_directory(empty_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(empty_directory))
    (empty_directory / "x.gguf").touch()
    assert resolve("~/x.gguf").path == empty_directory / "x.gguf"


def test_alias_wins_over_a_file_of_that_name(empty_directory: Path) -> None:
    (empty_directory / "tiny").touch()
    assert resolve("tiny").alias == "tiny"
    assert resolve("./tiny").path == empty_directory / "tiny"


@pytest.mark.parametrize("name", ["x.gguf", "./x.gguf", "sub/x.gguf", "../x", "/no/such", "~nobody-here/x.gguf"])
def test_missing_file(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="no file"):
        resolve(name)


@pytest.mark.parametrize(
    ("name", "guess"),
    [("tinny", "tiny"), ("large:9b", "large-8b"), ("LARGE", "large-8b"), ("tini:Q8_0", "tiny")],
)
def test_unknown_name_guesses(name: str, guess: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve(name)
    assert f"did you mean {guess}?" in caught.value.hint
    assert "llmrun list --all" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "alias", "quant"),
    [
        ("tiny:latest", "tiny", "Q4_1"),
        ("tiny:1m", "tiny", "Q4_1"),
        ("large:8b", "large-8b", "Q4_K_M"),
        ("Large:8B", "large-8b", "Q4_K_M"),
        ("large:8b-instruct-q4_K_M", "large-8b", "Q4_K_M"),
        ("tiny:1m-q8_0", "tiny", "Q8_0"),
    ],
)
def test_names_as_ollama_writes_them(name: str, alias: str, quant: str) -> None:
    spec = resolve(name)
    assert (spec.alias, spec.quant) == (alias, quant)


@pytest.mark.parametrize("name", ["tiny:9b", "large:latest", "large:8b-q2_K"])
def test_what_ollama_may_have_and_the_catalogue_has_not(name: str) -> None:
    with pytest.raises(ModelNotFoundError):
        resolve(name)


@pytest.mark.parametrize(
    ("name", "alias"), [("llama3.2:1b", "llama3.2-1b"), ("smollm2:latest", "smollm2"), ("smollm2:135m", "smollm2"),
                        ("smollm2:360m", "smollm2-360m"), ("qwen3:4b", "qwen3-4b"), ("gemma3:1b", "gemma3-1b")]
)  # fmt: skip
def test_names_that_ollamas_users_know(name: str, alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "load_catalogue", load_catalogue)
    assert resolve(name).alias == alias


def test_unknown_name_without_anything_close() -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve("xylophone")
    assert caught.value.hint == "see `llmrun list --all`"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "   ",
        "x" * 5000,
        "tiny\nextra",
        "tiny\x1b[31m",
        "a b/c",
        "-a/b",
        "a/.b",
        "a/b..c",
        "a/../b",
        "hf.co/a",
        "hf://",
        "a/b:Q4/c.gguf",
        "a/b:Q4 K",
        "a/b/README.md",
        "a/b/../c.gguf",
        "a/b/..%2Fc.gguf",
        "a/b/c//d.gguf",
        "https://huggingface.co/a/b/resolve/..%2F../c.gguf",
        "https://huggingface.co/a/b/resolve/main/%2E%2E/c.gguf",
        "https://huggingface.co/",
        "http://example.org/x.gguf",
        "http://huggingface.co/a/b",
        "ftp://example.org/x.gguf",
        "file:///x.gguf",
        "https://example.org/page",
        "https://[::1/x.gguf",
        "https:///x.gguf",
    ],
)
def test_what_can_not_be_a_name(name: str) -> None:
    with pytest.raises(UsageError):
        resolve(name)


def test_plain_http_says_what_to_type() -> None:
    with pytest.raises(UsageError) as caught:
        resolve("http://example.org/x.gguf")
    assert caught.value.hint == "use https://example.org/x.gguf"


def test_very_long_component_is_no_crash() -> None:
    with pytest.raises(LlmrunError):
        resolve("x" * 300)
    with pytest.raises(LlmrunError):
        resolve("./" + "x" * 300 + ".gguf")


@pytest.mark.parametrize(
    "text",
    ["", "default = 1", "[models.x]\ntitle = 'x'", "default = 'x'\nmodels = 3", "not toml", "x = " + "[" * 9_000, None],
)
def test_damaged_catalogue_is_explained(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(LlmrunError) as caught:
        load_catalogue(path)
    assert str(path) in caught.value.why
    assert caught.value.hint


@pytest.mark.parametrize("place", ["site/llmrun/models.toml", "site/models.toml"])
def test_catalogue_of_a_wheel_and_of_a_checkout(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "__file__", str(tmp_path / "site/llmrun/models/registry.py"))
    path = tmp_path / place
    path.parent.mkdir(parents=True)
    path.touch()
    assert registry._catalogue_file() == path


def test_import_is_light() -> None:
    heavy = "numpy huggingface_hub rich prompt_toolkit httpx psutil jinja2 tomllib difflib llama_cpp typer"
    code = f"import sys, llmrun.models.registry; sys.exit(' '.join(set({heavy.split()}) & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], stderr=subprocess.PIPE)
    assert ran.stderr.strip() == b""
