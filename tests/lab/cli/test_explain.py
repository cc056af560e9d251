"""`llmrun explain`, with a real engine and a tiny model of random weights."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.installed import SECONDS, eventually
from support.streams import Terminal
from typer.testing import CliRunner

from llmrun.cli import slash
from llmrun.cli.app import app
from llmrun.errors import UsageError
from llmrun.lab.insight.explain import explain_answer
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.sanitize import clean

pytestmark = pytest.mark.usefixtures("package_on_path")


@pytest.fixture
def llmrun(random_qwen: Path, own_engines: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("LLMRUN_HOME", str(tmp_path / "home"))
    return lambda command, *arguments: CliRunner().invoke(app, [command, str(random_qwen), *arguments])


def test_the_answer_is_the_one_that_run_gives(llmrun: Callable[..., Any]) -> None:
    options = ("hello the world", "--raw", "--seed", "5", "--temp", "1.5")
    done = llmrun("run", *options, "--max-tokens", "6")
    found = json.loads(llmrun("explain", *options, "--answer", "6", "--json").stdout)
    seen = found["run"]["pieces"]
    pieces = {piece["token"]: b"" if piece["is_control"] else bytes.fromhex(piece["data"]) for piece in seen}
    answer = found["run"]["tokens"][found["run"]["n_prompt"] :]
    text = b"".join(map(pieces.__getitem__, answer)).decode("utf-8", "replace")
    assert clean(text, newlines=True) == done.stdout
    assert len(found["choices"]) == len(answer) > 1
    assert found["choices"][0]["steps"][0]["name"] == "model", "everything has a name"
    assert 0 <= found["run"]["layers"][0]["heads"][0]["previous"] <= 1
    assert len(found["run"]["lens"]) == len(found["run"]["tokens"]), "--json has the lens of every position"
    assert found["decode_limit"]["tokens_per_second"] > 0
    cache = found["cache"]
    assert cache["bytes_per_token"] == 2 * 2 * 2 * 16 * 2, "layers, K and V, heads, elements, bytes"
    assert cache["unshared_bytes_per_token"] == 2 * cache["bytes_per_token"]


def test_the_story(llmrun: Callable[..., Any]) -> None:
    done = llmrun("explain", "--raw", "hello", "--answer", "2")
    assert {"Tokens", "Layers", "Logit lens", "Attention", "KV cache", "Time", "Sampling"} <= set(
        done.stdout.splitlines()
    )


@pytest.mark.parametrize("answer", ["0", "65"])
def test_wrong_lengths_are_refused_before_a_model_is_loaded(llmrun: Callable[..., Any], answer: str) -> None:
    assert isinstance(llmrun("explain", "hello", "--answer", answer).exception, UsageError)


def test_a_page_is_written(llmrun: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text("what was there before")
    done = llmrun("explain", "--raw", "hello", "--answer", "2", "--temp", "1.25", "-y", "--html", str(file))
    assert done.stdout == ""
    assert str(file) in done.stderr
    page = file.read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert 'name="temperature" min="0" max="2" step="0.01" value="1.25"' in page, "the answer's own settings"
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert len(data["lens"]) == len(data["tokens"]), "a token chosen has everything"
    assert len(data["choices"][0]["model"]) > 5


@pytest.mark.parametrize(("name", "said"), [("page.txt", "end in .html"), ("gone/page.html", "folder")])
def test_a_page_that_cannot_be_written_is_refused_first(
    llmrun: Callable[..., Any], tmp_path: Path, name: str, said: str
) -> None:
    error = llmrun("explain", "hello", "--html", str(tmp_path / name)).exception
    assert isinstance(error, UsageError)
    assert said in f"{error} {error.why}"


def test_a_page_and_json_are_two_results(llmrun: Callable[..., Any], tmp_path: Path) -> None:
    error = llmrun("explain", "hello", "--json", "--html", str(tmp_path / "page.html")).exception
    assert isinstance(error, UsageError)
    assert "used together" in str(error)


def test_a_terminal_sees_that_something_is_computed(
    llmrun: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr, seen = Terminal(), list[bool]()

    def explained(*words: Any, **options: Any) -> Any:
        seen.append(eventually(lambda: "computing every step again" in stderr.getvalue(), SECONDS))
        return explain_answer(*words, **options) if words[0] else None

    output = Output(
        stdin=io.StringIO(), stdout=io.StringIO(), stderr=stderr, environment={"TERM": "xterm", "COLUMNS": "80"}
    )
    monkeypatch.setattr("llmrun.lab.cli.explain.explain_answer", explained)
    monkeypatch.setattr("llmrun.lab.cli.explain.Output", lambda json=False: output)
    assert llmrun("explain", "hello the world", "--raw", "--answer", "2").exit_code == 0
    assert seen == [True]
    chat = SimpleNamespace(output=output)
    stderr.truncate(0)
    monkeypatch.setattr(slash, "_with_last_answer", lambda chat, command: None)
    monkeypatch.setattr("llmrun.lab.cli.explain.show_explained", lambda output, found: None)
    slash.explain(chat, "")  # type: ignore[arg-type]
    assert seen == [True, True]
