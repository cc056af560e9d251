"""Why a token was chosen, from the loop's point of view; the arithmetic is tested in test_sampler_explain.py."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.constraints import AfterA
from support.conversation import Conversation
from support.fake_context import END, favouring, hashed, scripted

from llmrun.errors import UsageError
from llmrun.protocol.params import SamplingParams

HOT = SamplingParams(temperature=0.9, top_k=5, top_p=0.9, min_p=0.0, seed=1)


def test_the_last_tokens_oldest_first() -> None:
    talk = Conversation(hashed, n_ctx=200)
    text, _ = talk.answer("Hi", HOT, most=20, remember=4)
    choices = talk.engine.finished(1).sampler.explain(4, 3)
    assert "".join(choice.text for choice in choices) == text[-4:]
    for choice in choices:
        assert [step.name for step in choice.steps] == ["model", "top_k", "top_p", "temperature"]
        assert [step.remaining for step in choice.steps][:2] == [26, 5]
        assert choice.candidates[choice.chosen] == choice.text
        assert choice.steps[-1].probabilities[choice.chosen] > 0
        for step in choice.steps:
            assert len(step.probabilities) == len(choice.candidates)


def test_fewer_than_asked_where_fewer_are_remembered() -> None:
    talk = Conversation(hashed, n_ctx=200)
    talk.answer("Hi", HOT, most=3, remember=16)
    assert len(talk.engine.finished(1).sampler.explain(16, 3)) == 3
    assert len(talk.engine.finished(1).sampler.explain(2, 3)) == 2


def test_the_end_token_has_a_name() -> None:
    talk = Conversation(scripted({"Hi": "yo"}))
    talk.answer("Hi", remember=2)
    assert [choice.text for choice in talk.engine.finished(1).sampler.explain(2, 1)] == ["o", "<end>"]


def test_nothing_is_remembered_unless_asked_for() -> None:
    talk = Conversation(hashed, n_ctx=200)
    talk.answer("Hi", HOT, most=3)
    assert talk.engine.finished(1).sampler.explain(3, 3) == []
    with pytest.raises(UsageError):
        talk.engine.finished(2).sampler.explain(3, 3)


def test_an_answer_can_be_explained_after_others_took_its_slot() -> None:
    """Its explanation is a command of its own, and other clients answer meanwhile."""
    talk = Conversation(hashed, n_ctx=200, n_seq_max=1)
    text, _ = talk.answer("Hi", HOT, most=8, remember=4)
    for request in (2, 3, 4):
        talk.ask("Something else", HOT, most=3, request=request)
        talk.run()
    with pytest.raises(UsageError):
        talk.engine.finished(1)
    choices = talk.engine.explainable(1).sampler.explain(4, 3)
    assert "".join(choice.text for choice in choices) == text[-4:]
    for request in (5, 6):  # the logits that they remember take memory
        talk.ask("Hi", HOT, most=3, remember=4, request=request)
        talk.run()
    with pytest.raises(UsageError):
        talk.engine.explainable(1)


def test_tokens_taken_back_are_forgotten_and_refused_ones_shown_as_cut() -> None:
    def logits(tokens: Sequence[int]) -> Sequence[float]:
        row = favouring({"": ord("n"), "n": ord("o")}.get(bytes(tokens[2:]).decode(), END))
        row[ord("y")] = 10.0
        return row

    talk = Conversation(logits)
    assert talk.answer("Hi", remember=8, ban=("no",)) == ("y", "stop")
    choices = talk.engine.finished(1).sampler.explain(8, 2)
    assert [choice.text for choice in choices] == ["y", "<end>"]
    at = choices[0].candidates.index("n")
    assert choices[0].steps[0].probabilities[at] > 0.9
    assert choices[0].steps[-1].probabilities[at] == 0


def test_forced_tokens_are_computed_as_one_batch_and_said_to_be_forced() -> None:
    talk = Conversation(scripted({"Hi": "xabcy"}))
    assert talk.answer("Hi", constraint=AfterA(), remember=8) == ("xabcy", "stop")
    assert [len(batch) for batch in talk.context.calls] == [2, 1, 3, 1]
    choices = talk.engine.finished(1).sampler.explain(8, 1)
    assert [(choice.text, choice.forced) for choice in choices] == [
        ("x", False),
        ("a", False),
        ("b", True),
        ("c", True),
        ("y", False),
        ("<end>", False),
    ]


@pytest.mark.parametrize("most", range(1, 6))
def test_max_tokens_within_forced_tokens(most: int) -> None:
    talk = Conversation(scripted({"Hi": "xabcy"}))
    assert talk.answer("Hi", constraint=AfterA(), most=most) == ("xabcy"[:most], "length")


def test_a_banned_phrase_among_forced_tokens_goes_back_to_where_there_was_a_choice() -> None:
    def logits(tokens: Sequence[int]) -> Sequence[float]:
        row = favouring(END if tokens[-1] == ord("z") else ord("a"))
        row[ord("z")] = 10.0
        return row

    talk = Conversation(logits)
    constraint = AfterA()
    assert talk.answer("Hi", constraint=constraint, ban=("ab",)) == ("z", "stop")
    assert constraint.taken == [ord("z"), END]
