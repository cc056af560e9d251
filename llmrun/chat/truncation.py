"""Truncation of a conversation that is longer than the context window: whole turns are dropped, by a named policy.

The choice of turns, the line that reports it, and the form of a summary, as pure functions: token counts come in,
indices go out. "ask" is not a policy: the caller asks and passes the choice.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

from llmrun.errors import ContextOverflowError, UsageError
from llmrun.protocol.messages import Message

Policy = Literal["stop", "roll", "middle", "summarize"]
POLICIES: tuple[Policy, ...] = get_args(Policy)

SUMMARY_QUESTION = "Please summarize our conversation so far."
"""The question before a summary, so that every chat template can render both as a turn."""

SUMMARY_TOKENS = 256
"""Limit of a summary's answer."""
_SUMMARY_QUESTION_TOKENS = 32  # upper bound
_ANSWER_ROOM = 512  # tokens left for an answer without a limit
WORDS_PER_TOKEN = 0.6
_QUOTED = 40  # characters of a quoted question


@dataclass(frozen=True, slots=True)
class MessageSize:
    """A message's role and its tokens, with the template's markers."""

    role: str  # "system", "user" or "assistant"
    tokens: int


@dataclass(frozen=True, slots=True)
class Window:
    """The room in the context window."""

    tokens: int  # of the whole window
    reserve: int = 0  # tokens left for the answer
    overhead: int = 0  # tokens of the template besides the messages, such as the marker that begins the answer
    keep: int = 0  # first turns that are never dropped; the system prompt never is
    summary: int = 0  # maximum tokens of a summary with its question; for "summarize" only

    @classmethod
    def of(cls, n_ctx: int, max_tokens: int | None, *, overhead: int = 0, keep: int = 0) -> Window:
        """Return the room in a window of n_ctx tokens beside an answer of at most max_tokens."""
        reserve = min(max_tokens or _ANSWER_ROOM, n_ctx // 4)
        return cls(n_ctx, reserve, overhead, keep, summary=min(SUMMARY_TOKENS + _SUMMARY_QUESTION_TOKENS, n_ctx // 4))

    @property
    def room(self) -> int:
        """Maximum tokens of all messages together."""
        return self.tokens - self.reserve - self.overhead


@dataclass(frozen=True, slots=True)
class DoesNotFit:
    """The reason why the conversation can't fit by this policy."""

    why: str  # for the user, without a full stop
    hint: str


def turns_of(messages: Sequence[MessageSize]) -> list[range]:
    """Return the indices of each turn's messages, oldest turn first, without the system prompt.

    A turn begins with a question; the last one may have no answer yet.
    """
    first = 1 if messages and messages[0].role == "system" else 0
    starts = [index for index in range(first, len(messages)) if messages[index].role == "user" or index == first]
    ends = [*starts[1:], len(messages)]
    return [range(start, end) for start, end in zip(starts, ends, strict=False)]  # no start: no turn, though an end


def fit(messages: Sequence[MessageSize], window: Window, policy: Policy) -> tuple[int, ...] | DoesNotFit:
    """Choose the fewest whole turns to drop, so that a conversation fits.

    Args:
        messages: the system prompt first, if there is one; the last turn awaits its answer, and stays.
        window: the room.
        policy: "stop" drops nothing; "roll" the oldest turns; "middle" from the middle outwards; "summarize" those
            that "roll" would drop, and as many more as the summary needs.

    Returns:
        Indices of the turns, ascending, see turns_of(); none if everything fits.
    """
    sizes = [sum(messages[index].tokens for index in turn) for turn in turns_of(messages)]
    total = sum(message.tokens for message in messages)
    if total <= window.room:
        return ()
    if policy == "stop":
        return _full(total, window)
    summary = window.summary if policy == "summarize" else 0
    gone: list[int] = []
    left = total
    for turn in _order(policy, window.keep, len(sizes) - 1):
        gone.append(turn)
        left -= sizes[turn]
        if left + summary <= window.room:
            return tuple(sorted(gone))
    return _too_small(left, window, summary, left - (sizes[-1] if sizes else 0))


def _order(policy: Policy, keep: int, end: int) -> list[int]:
    """Return the turns that may be dropped, in the order of dropping."""
    turns = list(range(min(max(keep, 0), end), end)) if end > 0 else []
    if policy != "middle":
        return turns
    middle = (turns[0] + turns[-1]) / 2 if turns else 0.0
    return sorted(turns, key=lambda turn: (abs(turn - middle), turn))


def _full(total: int, window: Window) -> DoesNotFit:
    return DoesNotFit(
        why=f"the conversation has {total + window.overhead:,} tokens, {_room(window)}",
        hint="/clear starts anew, /undo removes the last turn, --overflow roll drops the oldest turns",
    )


def _too_small(left: int, window: Window, summary: int, fixed: int) -> DoesNotFit:
    """Return the reason why even the remaining messages are too long.

    Args:
        left: tokens that remain.
        fixed: tokens of these that are not the last question.
    """
    parts = [f"the message has {left - fixed:,} tokens"]
    if fixed:
        parts.append(f"the system prompt and the kept turns have {fixed:,}")
    if summary:
        parts.append(f"a summary may take {summary:,}")
    return DoesNotFit(
        why=f"{', '.join(parts)}, {_room(window)}",
        hint="send less at once, or give a larger --ctx",
    )


def _room(window: Window) -> str:
    reserved = f" of which {window.reserve:,} are left for the answer" if window.reserve else ""
    return f"the context window has {window.tokens:,}{reserved}"


def truncation_line(turns: Sequence[tuple[int, str]], tokens: int, policy: str) -> str:
    """Return the line that names the dropped turns and their tokens.

    Args:
        turns: number of each as the user counts them, from 1 on, and the text of its question; 0 for a summary.
    """
    names = _names([number for number, _ in turns if number])
    if any(number == 0 for number, _ in turns):
        names = " and ".join(filter(None, ("the summary", names)))
    first, last = _quote(turns[0][1]), _quote(turns[-1][1])
    quoted = first if len(turns) == 1 else f"{first} to {last}"
    what = "was condensed into a summary" if len(turns) == 1 else "were condensed into a summary"
    verb = what if policy == "summarize" else "left the context window"
    return f"{names[0].upper()}{names[1:]} {verb}: {tokens:,} tokens, {quoted} (--overflow {policy})"


def _names(numbers: Sequence[int]) -> str:
    """Return turn numbers in words, with ranges, e.g. "turns 1-3, 5"."""
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
    """Return the messages that ask for a summary: the turns to drop, then the instruction.

    Args:
        turns: messages of these turns, an earlier summary's among them, without a system prompt.
        words: maximum length of the summary.
    """
    if words < 1:
        raise UsageError("there is no room for a summary", hint="give a larger --ctx, or --overflow roll")
    instruction = (
        f"Summarize our conversation so far in at most {words} words. Keep names, numbers, facts, decisions, wishes "
        "and open questions, and code that is still needed. Write only the summary."
    )
    return [*turns, Message("user", instruction)]


def summary_turn(summary: str) -> tuple[Message, Message]:
    """Return the turn that replaces the condensed turns."""
    return Message("user", SUMMARY_QUESTION), Message("assistant", summary)


def condense(
    turns: Sequence[Sequence[Message]], sizes: Sequence[int], n_ctx: int
) -> Generator[list[Message], str, str]:
    """Condense turns into a summary: yield the messages of each request, get its answer, and return the last one.

    Args:
        sizes: tokens of each turn.

    Raises:
        ContextOverflowError: a turn alone is too long for the window.
    """
    batches = summary_batches(sizes, n_ctx - 2 * SUMMARY_TOKENS, SUMMARY_TOKENS)
    if batches is None:
        raise ContextOverflowError("a turn is too long to be summarized", hint="--overflow roll drops it")
    summary: tuple[Message, ...] = ()
    text = ""
    for batch in batches:
        messages = [*summary, *(message for index in batch for message in turns[index])]
        text = (yield summary_request(messages, int(SUMMARY_TOKENS * WORDS_PER_TOKEN))).strip()
        summary = summary_turn(text)
    return text


def summary_batches(sizes: Sequence[int], room: int, summary: int) -> list[range] | None:
    """Return the turns to condense at a time, where all at once are longer than the window.

    From the second batch on, the previous summary is condensed too.

    Args:
        sizes: tokens of each turn.
        room: tokens of a request without the instruction and the answer.
        summary: maximum tokens of a summary with its question.

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
