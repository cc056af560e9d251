"""What leaves a conversation that is longer than the context window: whole turns, chosen by a named policy.

Owns the choice, the words that say what left, and how a summary stands in for turns; pure, so it must not know
models, tokenizers or terminals. Token counts come in, indices go out. "ask" is no policy here: who can ask, asks,
and comes with what was chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

from llmrun.errors import UsageError
from llmrun.protocol.messages import Message

Policy = Literal["stop", "roll", "middle", "summarize"]
POLICIES: tuple[Policy, ...] = get_args(Policy)

SUMMARY_QUESTION = "Please summarize our conversation so far."
"""What a summary answers: together they are a turn like any other, which every chat template can render."""

_QUOTED = 40  # characters of a question that a line quotes


@dataclass(frozen=True, slots=True)
class MessageSize:
    """A message, as far as the choice needs it.

    Attributes:
        role: "system", "user" or "assistant".
        tokens: of the message as the chat template writes it, its marks included.
    """

    role: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Window:
    """How much room there is.

    Attributes:
        tokens: of the whole context window.
        reserve: of these, to be left for the answer.
        overhead: tokens that the template writes besides the messages, such as the mark that begins the answer.
        keep: how many of the first turns never leave; the system prompt never does anyway.
        summary: most tokens of a summary with its question; counts for "summarize" only.
    """

    tokens: int
    reserve: int = 0
    overhead: int = 0
    keep: int = 0
    summary: int = 0

    @property
    def room(self) -> int:
        """Most tokens that all messages together may have."""
        return self.tokens - self.reserve - self.overhead


@dataclass(frozen=True, slots=True)
class Drop:
    """What leaves.

    Attributes:
        turns: indices of whole turns, ascending; a turn is a question with its answer.
        messages: indices of their messages, ascending.
        tokens: of these messages.
    """

    turns: tuple[int, ...] = ()
    messages: tuple[int, ...] = ()
    tokens: int = 0

    def __bool__(self) -> bool:
        return bool(self.turns)


@dataclass(frozen=True, slots=True)
class Fit:
    """The conversation fits when `drop` has left it, which may be nothing.

    Attributes:
        drop: what is dropped.
        tokens: of the messages that stay; for "summarize" with the most that its summary may take.
    """

    drop: Drop
    tokens: int


@dataclass(frozen=True, slots=True)
class DoesNotFit:
    """The conversation can't be made to fit by this policy.

    Attributes:
        why: for people, no full stop at the end.
        hint: what to do.
        over: how many tokens are too many, even after all that may leave has left.
    """

    why: str
    hint: str
    over: int


def turns_of(messages: Sequence[MessageSize]) -> list[range]:
    """The indices of each turn's messages, oldest turn first; the system prompt is in none.

    A turn begins with a question; the last one may have no answer yet.
    """
    first = 1 if messages and messages[0].role == "system" else 0
    starts = [index for index in range(first, len(messages)) if messages[index].role == "user" or index == first]
    ends = [*starts[1:], len(messages)]
    return [range(start, end) for start, end in zip(starts, ends, strict=False)]  # no start: no turn, though an end


def fit(messages: Sequence[MessageSize], window: Window, policy: Policy) -> Fit | DoesNotFit:
    """Choose the fewest whole turns that have to leave.

    Args:
        messages: the system prompt first, if there is one; the last turn is what is to be answered, and stays.
        window: how much room there is.
        policy: "stop" drops nothing; "roll" the oldest turns; "middle" from the middle outwards; "summarize" those
            that "roll" would drop, and as many more as the summary needs.
    """
    turns = turns_of(messages)
    sizes = [sum(messages[index].tokens for index in turn) for turn in turns]
    total = sum(message.tokens for message in messages)
    if total <= window.room:
        return Fit(Drop(), total)
    if policy == "stop":
        return _full(total, window)
    summary = window.summary if policy == "summarize" else 0
    gone: list[int] = []
    left = total
    for turn in _order(policy, window.keep, len(turns) - 1):
        gone.append(turn)
        left -= sizes[turn]
        if left + summary <= window.room:
            dropped = tuple(sorted(gone))
            indices = tuple(index for turn in dropped for index in turns[turn])
            return Fit(Drop(dropped, indices, total - left), left + summary)
    return _too_small(left, window, summary, left - (sizes[-1] if sizes else 0))


def _order(policy: Policy, keep: int, end: int) -> list[int]:
    """The turns that may leave, in the order in which they do."""
    turns = list(range(min(max(keep, 0), end), end)) if end > 0 else []
    if policy != "middle":
        return turns
    middle = (turns[0] + turns[-1]) / 2 if turns else 0.0
    return sorted(turns, key=lambda turn: (abs(turn - middle), turn))


def _full(total: int, window: Window) -> DoesNotFit:
    return DoesNotFit(
        why=f"the conversation has {total + window.overhead:,} tokens, {_room(window)}",
        hint="/clear begins anew, /undo takes the last turn back, --overflow roll drops the oldest turns",
        over=total - window.room,
    )


def _too_small(left: int, window: Window, summary: int, fixed: int) -> DoesNotFit:
    """What stays is too much already. `fixed` is the part of `left` that is not the last question."""
    parts = [f"the message has {left - fixed:,} tokens"]
    if fixed:
        parts.append(f"the system prompt and the kept turns have {fixed:,}")
    if summary:
        parts.append(f"a summary may take {summary:,}")
    return DoesNotFit(
        why=f"{', '.join(parts)}, {_room(window)}",
        hint="send less at once, or give a larger --ctx",
        over=left + summary - window.room,
    )


def _room(window: Window) -> str:
    reserved = f" of which {window.reserve:,} are left for the answer" if window.reserve else ""
    return f"the context window has {window.tokens:,}{reserved}"


def truncation_line(drop: Drop, policy: Policy, questions: Sequence[str], numbers: Sequence[int] = ()) -> str:
    """The one line that names the turns and tokens that left.

    Args:
        drop: what left; not nothing.
        policy: by which it did.
        questions: the text of each turn's question, by the turn's index; a summary's is SUMMARY_QUESTION.
        numbers: of each turn as the user counts them, 0 for a summary; from 1 on by default.
    """
    counted = [numbers[turn] if numbers else turn + 1 for turn in drop.turns]
    names = _names([number for number in counted if number])
    if 0 in counted:
        names = " and ".join(filter(None, ("the summary", names)))
    first, last = _quote(questions[drop.turns[0]]), _quote(questions[drop.turns[-1]])
    quoted = first if len(drop.turns) == 1 else f"{first} to {last}"
    what = "was condensed into a summary" if len(drop.turns) == 1 else "were condensed into a summary"
    verb = what if policy == "summarize" else "left the context window"
    return f"{names[0].upper()}{names[1:]} {verb}: {drop.tokens:,} tokens, {quoted} (--overflow {policy})"


def _names(numbers: Sequence[int]) -> str:
    """Turn numbers in words, runs of them drawn together; they are ascending."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"turn{'s' if len(numbers) > 1 else ''} {', '.join(words)}" if words else ""


def _quote(text: str) -> str:
    line = " ".join(text[: 4 * _QUOTED].split())
    return f"“{line}”" if len(line) <= _QUOTED else f"“{line[: _QUOTED - 1].rstrip()}…”"


def summary_request(turns: Sequence[Message], words: int) -> list[Message]:
    """What to ask the model for a summary: the turns that are to leave, then the instruction.

    Args:
        turns: messages of the turns that leave, an earlier summary's among them; no system prompt.
        words: most words of the summary.
    """
    if words < 1:
        raise UsageError("there is no room for a summary", hint="give a larger --ctx, or --overflow roll")
    instruction = (
        f"Summarize our conversation so far in at most {words} words. Keep names, numbers, facts, decisions, wishes "
        "and open questions, and code that is still needed. Write only the summary."
    )
    return [*turns, Message("user", instruction)]


def summary_turn(summary: str) -> tuple[Message, Message]:
    """The turn that stands where the condensed turns stood."""
    return Message("user", SUMMARY_QUESTION), Message("assistant", summary)


def summary_batches(sizes: Sequence[int], room: int, summary: int) -> list[range] | None:
    """Which turns to condense at a time, where all at once are longer than the window themselves.

    From the second batch on, the summary so far is condensed along.

    Args:
        sizes: tokens of each turn that is to be condensed.
        room: tokens that a request has for turns, when the instruction and the answer are taken off.
        summary: most tokens of a summary with its question.

    Returns:
        Ranges of indices into sizes, in order; None if one turn alone is too long.
    """
    batches: list[range] = []
    starts = [0, *accumulate(sizes)]
    start = 0
    for end in range(1, len(sizes) + 1):
        space = room - (summary if batches else 0)
        if starts[end] - starts[start] > space and end - 1 > start:
            batches.append(range(start, end - 1))
            start = end - 1
            space = room - summary
        if starts[end] - starts[start] > space:
            return None
    return [*batches, range(start, len(sizes))] if sizes else []
