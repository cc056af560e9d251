"""Prediction heads in the engine process: on where the file has them, named, measured, and without effect on a text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.mtp_models import write_mtp_model
from support.served import LiveServer

import llmrun
from llmrun.errors import UsageError
from llmrun.protocol.loading import Load
from llmrun.protocol.messages import AnswerRequest, Finished, Generate, Stats, TextDelta
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.protocol.speculation import Speculation
from llmrun.runner.client import EngineClient


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mtp_model(tmp_path_factory.mktemp("mtp") / "heads.gguf", "qwen35", 1.0)


def answer(engine: EngineClient, speculation: Speculation | None) -> tuple[str, Stats]:
    sampling, limits = SamplingParams(temperature=0.0), Limits(max_tokens=80)
    asked = AnswerRequest((), prompt="the cat sat", sampling=sampling, limits=limits, speculation=speculation)
    text = ""
    for event in engine.submit(Generate(engine.next_request(), asked)):
        if isinstance(event, TextDelta):
            text += event.text
        if isinstance(event, Finished):
            return text, event.stats
    raise AssertionError("it did not finish")


def test_heads_of_an_engine_draft_and_change_no_text(file: Path) -> None:
    engine, load = EngineClient(), Load(str(file), n_ctx=1024, threads=1, n_rollback=3)
    try:
        engine.load(load)
        plain, stats = answer(engine, None)
        assert stats.drafted_tokens == 0
        engine.load(replace(load, draft_heads=True))
        drafted, stats = answer(engine, Speculation(3))
        assert drafted == plain
        assert stats.draft_steps > 10
        assert stats.accepted_tokens > 0.8 * stats.drafted_tokens > 20
        engine.load(replace(load, draft_heads=True, n_seq_max=4, n_cells=4096))
        assert answer(engine, Speculation(3))[0] == plain
    finally:
        engine.close()


def test_heads_are_the_default_of_a_model_that_has_some(file: Path, tmp_path: Path) -> None:
    asked = {"temperature": 0.0, "max_tokens": 60}
    with llmrun.load(file, n_ctx=1024, speculate=3) as model:
        assert model.plan.load.draft_heads
        drafted = model.generate("the cat sat", remember=40, **asked)
        assert drafted.text
        choices = model.explain(40, 1).choices
    with llmrun.load(file, n_ctx=1024, speculate=3, draft="off") as model:
        assert not model.plan.load.draft_heads
        plain = model.generate("the cat sat", **asked)
        assert plain.text
    assert drafted.text == plain.text
    drafts = [(choice, choice.draft) for choice in choices if choice.draft is not None]
    assert {(draft.source, draft.depth) for _, draft in drafts} == {("heads", depth) for depth in (1, 2, 3)}
    assert all(draft.accepted == (draft.text == choice.text) for choice, draft in drafts)
    assert all(draft.probability is not None and 0 < draft.probability <= 1 for _, draft in drafts)
    assert drafted.stats.decode_steps < plain.stats.decode_steps
    trunk = _trunk_and_heads_apart(tmp_path, plain.text, asked)
    with pytest.raises(UsageError, match="has no heads to draft with"):
        llmrun.load(trunk, draft="mtp")


def test_a_server_tells_of_the_heads_their_memory_and_acceptance(file: Path, tmp_path: Path) -> None:
    asked = {"prompt": "the cat sat", "max_tokens": 60, "temperature": 0}
    with LiveServer(tmp_path, ("real",), model=file, speculate=3, parallel=1) as server:
        timings = server.post("/completion", asked).json["timings"]
        (heads,) = (each for each in server.drafts if each.source == "heads")
    assert (heads.model, heads.n_bytes > 0) == ("heads", True)
    assert heads.drafted >= heads.accepted > 20
    assert timings["draft_n"] >= heads.drafted
    assert timings["predicted_per_step"] > 2


def _trunk_and_heads_apart(folder: Path, text: str, asked: dict[str, Any]) -> Path:
    """Check drafts by heads in a file of their own; return the file of the other layers."""
    heads = write_mtp_model(folder / "mtp-heads.gguf", "qwen35", 1.0, part="mtp")
    trunk = write_mtp_model(folder / "trunk.gguf", "qwen35", 1.0, part="trunk")
    with llmrun.load(trunk, n_ctx=1024, speculate=3, draft=heads) as model:
        reply = model.generate("the cat sat", **asked)
        assert reply.text == text
        stats = reply.stats
        assert stats is not None
        assert stats.model_accepted > 0.8 * stats.model_drafted > 20
    other = write_mtp_model(folder / "mtp-other.gguf", "glm4moe", 1.0, part="mtp")
    with pytest.raises(UsageError, match="its architecture is 'glm4moe'"):
        llmrun.load(trunk, draft=other)
    return trunk
