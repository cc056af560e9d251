"""`llmrun explain`, with a real engine and a tiny model of random weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hf_writer import files_of, write
from typer.testing import CliRunner

from llmrun.cli.app import app
from llmrun.convert.job import convert_folder
from llmrun.errors import UsageError
from llmrun.runner import runner
from llmrun.ui.terminal.sanitize import clean

pytestmark = pytest.mark.usefixtures("package_on_path")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("explain")
    return convert_folder(write(folder / "hf", files_of("Qwen3ForCausalLM")), folder / "tiny.gguf", type="f32").path


@pytest.fixture
def llmrun(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    monkeypatch.setenv("LLMRUN_HOME", str(tmp_path / "home"))
    engines: list[runner.Runner] = []

    def prestarted() -> runner.Runner:
        engines.append(runner.Runner())
        return engines[-1]

    monkeypatch.setattr(runner, "prestarted", prestarted)
    yield lambda command, *arguments: CliRunner().invoke(app, [command, str(model), *arguments])
    for engine in engines:
        engine.close()


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
