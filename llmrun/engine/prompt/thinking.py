"""The reasoning of an answer: its tags and its token budget. Pure; must not know tokens or models."""

from __future__ import annotations

import enum
from typing import NamedTuple

# (opening, closing): the model's own pair is in its chat template.
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

# gpt-oss reasons in one message and answers in the next one, so no template contains the closing text as a whole.
# If the next message is a call, it is on another channel.
_HARMONY_FINAL = "<|channel|>final<|message|>"
_HARMONY_END = "<|end|><|start|>assistant"
_HARMONY = ("<|channel|>analysis<|message|>", _HARMONY_END + _HARMONY_FINAL)
_HARMONY_CALLS = (_HARMONY[0], _HARMONY_END)


def thinking_tags(template: str | None, *, calls: bool = False) -> Tags | None:
    """Return the tags of the reasoning of a model with this chat template; None if it has none.

    Args:
        calls: a call in the template's syntax may follow the reasoning.
    """
    if template and _HARMONY_FINAL in template:
        return _HARMONY_CALLS if calls else _HARMONY
    return next((tags for tags in _KNOWN if template and tags[1] in template), None)


def opens(prompt: str, tags: Tags) -> bool:
    """Return whether a rendered prompt ends with the opening tag, so that the answer begins with reasoning."""
    opening, closing = tags
    return prompt.rfind(opening) > prompt.rfind(closing) and prompt.rstrip().endswith(opening)


def lead_in(tags: Tags | None, *, thinks: bool) -> str:
    """Return the answer's header, to which no grammar applies: gpt-oss begins with the channel of its message."""
    if tags != _HARMONY:
        return ""
    return tags[0] if thinks else _HARMONY_FINAL


def end_of_reasoning(prompt: str, tags: Tags | None) -> str:
    """Return the text after which the answer itself begins, without reasoning."""
    if tags in (_HARMONY, _HARMONY_CALLS):
        return _HARMONY_FINAL
    if tags is None:
        return ""
    return f"{tags[1]}\n\n" if opens(prompt, tags) else ""


class BeginningPart(NamedTuple):
    """A part of the text after the prompt."""

    text: str
    special: bool  # written by the template, so that control texts are control tokens


class AnswerBeginning(NamedTuple):
    """The beginning that an answer is given; the model continues it.

    Attributes:
        parts: all of it, with the tags of the reasoning.
        text: of the answer itself.
        inside: it ends inside the reasoning.
    """

    parts: tuple[BeginningPart, ...]
    text: str
    inside: bool

    @classmethod
    def of(cls, prompt: str, tags: Tags | None, reasoning: str, text: str) -> AnswerBeginning:
        """Return the beginning after a rendered prompt.

        Args:
            tags: None if the model does not reason; the reasoning is left out then.
            reasoning: it is continued if there is no text.
            text: may have reasoning in tags before the answer.
        """
        inside = bool(reasoning and not text)
        if tags is not None and not reasoning and text.lstrip().startswith(tags[0].strip()):
            reasoning, closing, text = text.lstrip()[len(tags[0].strip()) :].partition(tags[1])
            reasoning, text, inside = reasoning.lstrip(), text.lstrip(), not closing
        answer = BeginningPart(text, False)
        can_reason = tags is not None and not prompt.rstrip().endswith(tags[1])
        if tags is None or not can_reason or not (reasoning or inside):
            return cls((BeginningPart(end_of_reasoning(prompt, tags), True), answer), text, False)
        is_harmony = tags[0] == _HARMONY[0]
        opening = "" if opens(prompt, tags) else tags[0].rstrip() + ("" if is_harmony else "\n")
        parts = BeginningPart(opening, True), BeginningPart(reasoning, False)
        if inside:
            return cls(parts, "", True)
        closing = _HARMONY[1] if is_harmony else f"\n{tags[1]}\n\n"
        return cls((*parts, BeginningPart(closing, True), answer), text, False)


class ReasoningStage(enum.Enum):
    BEFORE = enum.auto()  # neither reasoning nor answer has begun
    INSIDE = enum.auto()
    AFTER = enum.auto()  # only blanks since the end of the reasoning
    ANSWER = enum.auto()


class ReasoningTracker(NamedTuple):
    """The stage of an answer, by its text. Tags only count at its beginning, so that an answer can mention them."""

    tags: Tags
    stage: ReasoningStage
    tail: str = ""  # the end of the text, where a tag may have begun

    @classmethod
    def begin(cls, tags: Tags, *, inside: bool) -> ReasoningTracker:
        return cls(tags, ReasoningStage.INSIDE if inside else ReasoningStage.BEFORE)

    def after(self, text: str) -> ReasoningTracker:
        """Return the tracker advanced by a text."""
        if self.stage is ReasoningStage.ANSWER:
            return self
        tail = self.tail + text
        if self.stage is ReasoningStage.INSIDE:
            _, found, rest = tail.partition(self.tags[1])
            if found:
                return ReasoningTracker(self.tags, ReasoningStage.AFTER).after(rest)
            return self._replace(tail=tail[1 - len(self.tags[1]) :])
        start = tail.lstrip()
        if start.startswith(self.tags[0]):
            return ReasoningTracker(self.tags, ReasoningStage.INSIDE).after(start[len(self.tags[0]) :])
        if self.tags[0].startswith(start):
            return self._replace(tail=tail)
        return ReasoningTracker(self.tags, ReasoningStage.ANSWER)


class ThinkingBudget:
    """A limit on the number of tokens of an answer's reasoning.

    Args:
        inside: the prompt ends with the opening tag.
    """

    def __init__(self, tags: Tags, inside: bool, max_tokens: int) -> None:
        self._tags = tags
        self._max_tokens = max_tokens
        # Before the first and after each token of the answer: the tracker, and the number of tokens of reasoning.
        self._states = [(ReasoningTracker.begin(tags, inside=inside), 0)]

    @property
    def is_used_up(self) -> bool:
        """The reasoning has to be closed now."""
        tracker, used = self._states[-1]
        return tracker.stage is ReasoningStage.INSIDE and used >= self._max_tokens

    @property
    def closing(self) -> str:
        """The text that closes the reasoning."""
        closing = _HARMONY[1] if self._tags == _HARMONY_CALLS else self._tags[1]
        return f"\n{closing}\n\n"

    def push(self, text: str) -> None:
        """Add the text of the answer's next token."""
        before, used = self._states[-1]
        after = before.after(text)
        self._states.append((after, used + (before.stage is after.stage is ReasoningStage.INSIDE)))

    def rewind(self, n_tokens: int) -> None:
        """Cut the answer to its first n_tokens."""
        del self._states[n_tokens + 1 :]
