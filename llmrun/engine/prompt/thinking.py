"""The part of an answer in which a model thinks before it speaks: which texts enclose it, and how long it may be.

Pure; must not know tokens or models. What is shown of it is the front's business.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

# (opening, closing), as makers write them; a model's chat template tells which are its own.
_KNOWN = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
    ("<thought>", "</thought>"),
    ("<|channel>thought\n", "<channel|>"),  # Gemma 4
)

Tags = tuple[str, str]

# gpt-oss thinks in one message and answers in the next one: what closes the thoughts stands in no template as a whole.
# The next one may be a call, too; then it is on another channel.
_HARMONY_SIGN = "<|channel|>final<|message|>"
_HARMONY_END = "<|end|><|start|>assistant"
_HARMONY = ("<|channel|>analysis<|message|>", _HARMONY_END + _HARMONY_SIGN)
_HARMONY_CALLS = (_HARMONY[0], _HARMONY_END)


def thinking_tags(template: str | None, *, calls: bool = False) -> Tags | None:
    """The texts between which a model with this chat template thinks; None if it does not.

    Args:
        template: the model's.
        calls: a call of a tool may follow the thoughts, in the syntax of the template.
    """
    if template and _HARMONY_SIGN in template:
        return _HARMONY_CALLS if calls else _HARMONY
    return next((tags for tags in _KNOWN if template and tags[1] in template), None)


def opens(prompt: str, tags: Tags) -> bool:
    """Whether a rendered prompt ends inside the thinking part, so that the answer begins there."""
    opening, closing = tags
    return prompt.rfind(opening) > prompt.rfind(closing) and prompt.rstrip().endswith(opening)


def lead_in(tags: Tags | None, *, thinks: bool) -> str:
    """What the answer has to begin with before a grammar can bind it: gpt-oss says first what kind of message it is."""
    if tags != _HARMONY:
        return ""
    return tags[0] if thinks else _HARMONY_SIGN


class ReasoningStage(enum.Enum):
    """Where an answer is."""

    BEFORE = enum.auto()  # it has begun neither to think nor to speak
    INSIDE = enum.auto()
    BEHIND = enum.auto()  # nothing but blanks has come since it stopped thinking
    ANSWER = enum.auto()


class ReasoningTracker(NamedTuple):
    """Where an answer is, from what it says. Tags count at its beginning only, so that it can speak of them.

    Attributes:
        tags: what encloses the thoughts.
        stage: as it says.
        tail: the end of the text in which a tag may have begun.
    """

    tags: Tags
    stage: ReasoningStage
    tail: str = ""

    @classmethod
    def begin(cls, tags: Tags, *, inside: bool) -> ReasoningTracker:
        """At the beginning of an answer, which the prompt may have put inside the thoughts."""
        return cls(tags, ReasoningStage.INSIDE if inside else ReasoningStage.BEFORE)

    def after(self, text: str) -> ReasoningTracker:
        """Where it is when this text has come, too."""
        if self.stage is ReasoningStage.ANSWER:
            return self
        tail = self.tail + text
        if self.stage is ReasoningStage.INSIDE:
            _, found, rest = tail.partition(self.tags[1])
            return (
                ReasoningTracker(self.tags, ReasoningStage.BEHIND).after(rest)
                if found
                else self._replace(tail=self._kept(tail))
            )
        begun = tail.lstrip()
        if begun.startswith(self.tags[0]):
            return ReasoningTracker(self.tags, ReasoningStage.INSIDE).after(begun[len(self.tags[0]) :])
        return (
            self._replace(tail=tail)
            if self.tags[0].startswith(begun)
            else ReasoningTracker(self.tags, ReasoningStage.ANSWER)
        )

    def _kept(self, tail: str) -> str:
        return tail[1 - len(self.tags[1]) :]


class ThinkingBudget:
    """Counts the tokens of the thinking part.

    Args:
        tags: what it is enclosed in.
        inside: the answer begins inside of it.
        most: how many tokens it may take.
    """

    def __init__(self, tags: Tags, inside: bool, most: int) -> None:
        self._tags = tags
        self._most = most
        # After each token of the answer, and before the first: where it is, and how many tokens of thoughts it has.
        self._known = [(ReasoningTracker.begin(tags, inside=inside), 0)]

    @property
    def used_up(self) -> bool:
        """Whether the part has to be closed now."""
        thoughts, used = self._known[-1]
        return thoughts.stage is ReasoningStage.INSIDE and used >= self._most

    @property
    def closing(self) -> str:
        """The text that closes it."""
        closing = _HARMONY[1] if self._tags == _HARMONY_CALLS else self._tags[1]
        return f"\n{closing}\n\n"

    def push(self, text: str) -> None:
        """One more token of the answer, with this text."""
        before, used = self._known[-1]
        after = before.after(text)
        self._known.append((after, used + (before.stage is after.stage is ReasoningStage.INSIDE)))

    def rewind(self, n_tokens: int) -> None:
        """The answer has only so many tokens left."""
        del self._known[n_tokens + 1 :]
