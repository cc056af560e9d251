"""Truncation of a conversation that is too long: whole turns, as few as possible, and exactly the reported ones."""

from __future__ import annotations

import random
import re

import pytest

from llmrun.chat.truncation import (
    POLICIES,
    SUMMARY_QUESTION,
    DoesNotFit,
    MessageSize,
    Policy,
    Window,
    fit,
    summary_batches,
    summary_request,
    summary_turn,
    truncation_line,
    turns_of,
)
from llmrun.errors import UsageError
from llmrun.protocol.messages import Message


def conversation(*turns: tuple[int, ...], system: int = 0) -> list[MessageSize]:
    """Messages of turns: their tokens, the question's first."""
    messages = [MessageSize("system", system)] if system else []
    for turn in turns:
        messages += [MessageSize("assistant" if index else "user", tokens) for index, tokens in enumerate(turn)]
    return messages


def random_conversation(chance: random.Random) -> tuple[list[MessageSize], Window]:
    turns = [
        tuple(chance.randint(1, 200) for _ in range(chance.choice((2, 2, 2, 2, 1, 3))))
        for _ in range(chance.randint(0, 25))
    ]
    messages = conversation(*turns, (chance.randint(1, 200),), system=chance.choice((0, 1, 50, 300)))
    total = sum(message.tokens for message in messages)
    window = Window(
        tokens=chance.randint(1, total + 50),
        reserve=chance.choice((0, 0, 16, 100)),
        overhead=chance.choice((0, 3)),
        keep=chance.choice((0, 0, 1, 2, 30)),
        summary=chance.choice((10, 80)),
    )
    return messages, window


@pytest.mark.parametrize("policy", POLICIES)
def test_1000_random_conversations(policy: Policy) -> None:
    chance = random.Random(f"conversations {policy}")
    outcomes = {"fits": 0, "drops": 0, "misfit": 0}
    for _ in range(1000):
        messages, window = random_conversation(chance)
        result = fit(messages, window, policy)
        turns = turns_of(messages)
        total = sum(message.tokens for message in messages)
        stand_in = window.summary if policy == "summarize" else 0
        if isinstance(result, DoesNotFit):
            outcomes["misfit"] += 1
            assert total > window.room, "what fits is left alone"
            fixed = [
                *range(turns[0].start),
                *(i for turn in turns[: min(window.keep, len(turns) - 1)] for i in turn),
                *turns[-1],
            ]
            rest = sum(messages[index].tokens for index in fixed)
            everything = total if policy == "stop" else rest + (stand_in if rest < total else 0)
            assert everything > window.room, "it is refused only where nothing helps"
            assert result.why
            assert result.hint
            continue
        outcomes["drops" if result else "fits"] += 1
        gone = {index for turn in result for index in turns[turn]}
        left = [message for index, message in enumerate(messages) if index not in gone]
        assert [message for message in left if message.role == "system"] == messages[: turns[0].start]
        assert left[: turns[0].start] == messages[: turns[0].start], "the system prompt is first"
        assert sum(message.tokens for message in left) + (stand_in if result else 0) <= window.room
        assert len(turns) - 1 not in result
        assert not set(result) & set(range(window.keep))
        if result:
            assert total > window.room
            check_choice(policy, result, messages, window, stand_in)
    assert outcomes["misfit"] > 100
    assert outcomes["fits"] > 10
    assert (outcomes["drops"] > 300) == (policy != "stop")


def check_choice(
    policy: Policy, gone: tuple[int, ...], messages: list[MessageSize], window: Window, stand_in: int
) -> None:
    """The slow twin: one turn less does not fit, and the turns are where the policy takes them."""
    turns = turns_of(messages)
    sizes = [sum(messages[index].tokens for index in turn) for turn in turns]
    total = sum(sizes) + sum(message.tokens for message in messages[: turns[0].start])
    first, last, count = gone[0], gone[-1], len(gone)
    assert gone == tuple(range(first, last + 1)), "nothing stays between two that leave"
    may_leave = range(min(window.keep, len(turns) - 1), len(turns) - 1)
    if policy == "middle":
        older, newer = first - may_leave.start, may_leave.stop - 1 - last
        assert 0 <= newer - older <= 1, "as many stay before as behind, or one less"
        # They alternate, the last one is known by how many there are.
        fewer = gone[1:] if (count + len(may_leave)) % 2 else gone[:-1]
        assert total - sum(sizes[turn] for turn in fewer) + stand_in > window.room, "and none more than needed"
        return
    assert first == may_leave.start, "the oldest that may"
    assert total - sum(sizes[turn] for turn in gone[:-1]) + stand_in > window.room, "and none more than needed"


def test_policies_differ() -> None:
    messages = conversation(*[(10, 10)] * 5, (10,), system=10)
    assert fit(messages, Window(90), "roll") == (0, 1)
    assert fit(messages, Window(90, keep=1), "roll") == (1, 2)
    assert fit(messages, Window(90), "middle") == (1, 2)
    assert fit(messages, Window(90, summary=15), "summarize") == (0, 1, 2)
    assert isinstance(fit(messages, Window(90), "stop"), DoesNotFit)
    assert fit(messages, Window(120), "stop") == ()
    assert fit(messages, Window(120, reserve=1), "roll") == (0,)


def test_what_cannot_fit_says_why() -> None:
    full = fit(conversation((900, 50), (100,), system=50), Window(1024, reserve=256, overhead=4), "stop")
    assert isinstance(full, DoesNotFit)
    assert (
        full.why
        == "the conversation has 1,104 tokens, the context window has 1,024 of which 256 are left for the answer"
    )
    large = fit(conversation((5, 5), (2000,), system=50), Window(1024), "roll")
    assert isinstance(large, DoesNotFit)
    assert "the message has 2,000 tokens, the system prompt and the kept turns have 50" in large.why
    assert "--ctx" in large.hint


def test_nothing_and_no_system_prompt() -> None:
    assert fit([], Window(10), "roll") == ()
    assert isinstance(fit([MessageSize("system", 20)], Window(10), "roll"), DoesNotFit)
    assert turns_of(conversation((1, 1), (1,))) == [range(2), range(2, 3)]
    assert turns_of([MessageSize("assistant", 1), MessageSize("user", 1)]) == [range(1), range(1, 2)]


def test_the_line_names_turns_and_tokens() -> None:
    sky, mars = "Why is the sky blue?", "And\nMars, " + "which is far away, " * 9
    assert truncation_line([(1, sky)], 1234, "roll") == (
        "Turn 1 left the context window: 1,234 tokens, “Why is the sky blue?” (--overflow roll)"
    )
    line = truncation_line([(4, sky), (5, mars)], 99, "summarize")
    assert line.startswith(
        "Turns 4-5 were condensed into a summary: 99 tokens, “Why is the sky blue?” to “And Mars, which"
    )
    assert "\n" not in line
    assert truncation_line([(1, sky), (3, "Moons?")], 5, "middle").startswith("Turns 1, 3 left the context window")
    named = truncation_line([(0, SUMMARY_QUESTION), (3, "Moons?")], 5, "roll")
    assert named.startswith("The summary and turn 3 left the context window: 5 tokens")


def test_the_line_names_every_turn_that_left_and_no_other() -> None:
    chance = random.Random(3)
    for _ in range(300):
        turns = tuple(sorted(chance.sample(range(30), chance.randint(1, 12))))
        line = truncation_line([(turn + 1, "x") for turn in turns], 7, "middle")
        named: set[int] = set()
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", line.split(" left ")[0]):
            named |= set(range(int(first), int(last or first) + 1))
        assert named == {turn + 1 for turn in turns}


def test_a_summary_is_asked_for_and_stands_as_a_turn() -> None:
    turns = [Message("user", "My name is Ada."), Message("assistant", "Hello Ada.")]
    request = summary_request(turns, 120)
    assert request[:2] == turns
    assert request[2].role == "user"
    assert "at most 120 words" in request[2].content
    assert [message.role for message in summary_turn("Ada said hello.")] == ["user", "assistant"]
    with pytest.raises(UsageError, match="no room for a summary"):
        summary_request(turns, 0)


def test_summaries_of_more_than_a_window_are_made_in_parts() -> None:
    assert summary_batches([], 100, 10) == []
    assert summary_batches([40, 40], 100, 10) == [range(2)]
    assert summary_batches([40, 40, 40], 100, 10) == [range(2), range(2, 3)]
    assert summary_batches([101], 100, 10) is None
    assert summary_batches([50, 95], 100, 10) is None, "the summary so far has to go along"
    chance = random.Random(1)
    for _ in range(500):
        sizes = [chance.randint(1, 80) for _ in range(chance.randint(1, 30))]
        batches = summary_batches(sizes, 100, 20)
        assert batches is not None
        assert [index for batch in batches for index in batch] == list(range(len(sizes)))
        assert all(sum(sizes[i] for i in batch) + (20 if number else 0) <= 100 for number, batch in enumerate(batches))
