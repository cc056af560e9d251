"""Completion after a slash command."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from llmrun.errors import NetworkError
from llmrun.ui.prompt.completion import MAX_CANDIDATES, Candidate, Completion, file_names, offer


def texts(line: str, **commands: Completion | None) -> list[str]:
    """The words offered."""
    return [candidate.text for candidate in offer(line, {f"/{name}": takes for name, takes in commands.items()})[1]]


def names(words: Sequence[str]) -> list[str]:
    return ["one", "only", "two"]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("/", ["/help", "/save ", "/set "]),
        ("/s", ["/save ", "/set "]),
        ("  /he", ["/help"]),
        ("/help", ["/help"]),
        ("/help ", []),
        ("/set ", ["one", "only", "two"]),
        ("/set o", ["one", "only"]),
        ("/set one t", ["two"]),
        ("/set x", []),
        ("/unknown o", []),
        ("o", []),
        ("", []),
        ("say /s", []),
        ("/s\n/s", []),
    ],
)
def test_offer(line: str, offered: list[str]) -> None:
    assert texts(line, help=None, set=names, save=names) == offered


def test_a_completion_sees_the_words_so_far() -> None:
    seen: list[Sequence[str]] = []

    def remember(words: Sequence[str]) -> list[str]:
        seen.append(list(words))
        return []

    for line in ("/set", "/set ", "/set a", "/set a  b"):
        texts(line, set=remember)
    assert seen == [[""], ["a"], ["a", "", "b"]], "and is not asked before its command is complete"


def test_hints() -> None:
    def bounds(words: Sequence[str]) -> list[Candidate]:
        return [Candidate("temperature", "0 to 2"), Candidate("top_k")]

    assert offer("/set t", {"/set": bounds}).hint == ""
    assert offer("/set temp", {"/set": bounds}).candidates == [("temperature", "0 to 2")]
    assert offer("/set temperature", {"/set": bounds}).hint == "0 to 2"
    assert offer("/set top_k", {"/set": bounds}).hint == ""


@pytest.mark.parametrize("error", [OSError("gone"), NetworkError("gone")])
def test_a_failing_completion_offers_nothing(error: Exception) -> None:
    def fail(words: Sequence[str]) -> list[str]:
        raise error

    assert texts("/set x", set=fail) == []


def test_words_without_end_and_words_that_steer_a_terminal() -> None:
    def endless(words: Sequence[str]) -> Iterator[str]:
        return (f"{number}" for number in itertools.count())

    assert len(texts("/set ", set=endless)) == MAX_CANDIDATES
    assert len(texts("/set 999", set=endless)) == 11
    evil = ["a\x1b[31m", "a\nb", "a\u202eb", "a\tb", "a\udcff", "ab", "ab"]
    assert texts("/set a", set=lambda words: evil) == ["ab"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "docs"))
    for name in ("a.txt", "my notes.txt", ".hidden", "docs/é.md", "docs/deep/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("", ["a.txt", "docs/", "my notes.txt"]),
        ("my n", ["notes.txt"]),
        (".h", [".hidden"]),
        ("d", ["docs/"]),
        ("docs/", ["docs/deep/", "docs/é.md"]),
        ("./docs/d", ["./docs/deep/"]),
        ("~/d", ["~/deep/"]),
        ("nowhere/", []),
        ("a.txt/", []),
        ("~nobody-of-this-name/", []),
    ],
)
def test_file_names(folder: Path, typed: str, offered: list[str]) -> None:
    assert texts(f"/file {typed}", file=file_names) == offered
    assert texts(f"/file {folder}/{typed}", file=file_names)[: len(offered)] or not offered or "~" in typed
