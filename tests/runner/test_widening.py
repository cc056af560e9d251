"""A loaded model that begins to decode several answers together: the real engine, models of each kind of memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.architectures import build
from support.tiny_models import ARCHITECTURES, N_LAYERS, WINDOW

import llmrun
from llmrun.errors import BadModelError
from llmrun.model import Model
from llmrun.model.chat_model import with_seeds
from llmrun.protocol.messages import AnswerRequest, Finished, Started
from llmrun.protocol.params import Limits

PROMPT = "abc " * 50
KINDS = ("llama", "gemma3", "mamba", "lfm2")  # one cache, a window, a state, both

pytestmark = pytest.mark.usefixtures("package_on_path")


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    """A tiny model with a conversation in its KV cache."""
    monkeypatch.setenv("LLMRUN_HOME", str(tmp_path / "home"))
    settings = {"block_count": N_LAYERS, "attention.sliding_window": WINDOW, **ARCHITECTURES[request.param]}
    build(tmp_path / "tiny.gguf", request.param, settings)
    with llmrun.load(str(tmp_path / "tiny.gguf"), n_ctx=512, gpu_layers=0) as loaded:
        loaded.generate(PROMPT, max_tokens=3).text  # noqa: B018 - it is waited for
        yield loaded


def several(model: Model, seeds: list[int]) -> list[Started | Finished]:
    sampling, _ = model.sampling({"temperature": 1.0})
    asked = AnswerRequest(prompt=PROMPT, sampling=sampling, limits=Limits(250, ignores_end=True))
    return [event for event in model.answer(*with_seeds(asked, seeds)) if isinstance(event, Started | Finished)]


def test_what_was_computed_moves_along(model: Model) -> None:
    assert model.parallel == 1
    pid = model._runner.pid if model._runner else 0
    model.decode_together(3)
    assert model.parallel == 3
    assert model._runner is not None
    assert model._runner.pid == pid, "the weights stay loaded"
    events = several(model, [1, 2, 3])
    assert [type(event) for event in events].count(Finished) == 3
    assert isinstance(events[0], Started)
    # On one busy core, the first answer may be over before the second request is sent.
    assert any(isinstance(several(model, [1, 2, 3])[1], Started) for _ in range(50)), "together"
    if model.header.architecture == "llama":  # other kinds of memory can't be cut back to the prompt
        assert events[0].reused_tokens == events[0].prompt_tokens - 1
    model.decode_together(2)
    assert model.parallel == 3, "it stays as it is"


@pytest.mark.parametrize("model", ["llama"], indirect=True)  # a failed load has no KV cache of any kind
def test_one_that_fails_leaves_a_model_that_answers(model: Model) -> None:
    before = model.load
    model._load_for = lambda answers: replace(before, path="/not/there.gguf", n_seq_max=answers)
    with pytest.raises(BadModelError):
        model.decode_together(3)
    assert model.load == before
    assert len(several(model, [1, 2])) == 4
