"""The reasoning of an answer: its syntax, found by trial renderings, and its token budget.

Pure; must not know tokens, models or Jinja.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from os.path import commonprefix
from typing import NamedTuple

from llmrun.engine.prompt.tools import Render
from llmrun.protocol.messages import Message
from llmrun.protocol.reasoning import ReasoningSyntax, Stage

Tags = tuple[str, str]

# Of templates that leave reasoning out of earlier answers: the tags stand in the template.
_KNOWN = (
    ReasoningSyntax("<think>", "</think>"),
    ReasoningSyntax("[THINK]", "[/THINK]"),
    ReasoningSyntax("<seed:think>", "</seed:think>"),
    ReasoningSyntax("<thinking>", "</thinking>"),
    ReasoningSyntax("<reasoning>", "</reasoning>"),
    ReasoningSyntax("<thought>", "</thought>"),
    ReasoningSyntax("<mm:think>", "</mm:think>"),  # MiniMax M3
    ReasoningSyntax("◁think▷", "◁/think▷"),  # Kimi
    ReasoningSyntax("<|channel>thought", "<channel|>"),  # Gemma 4
    ReasoningSyntax("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),  # Command R7B
    ReasoningSyntax("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
)
# By hand, because its headers have several forms, of which templates write one.
HARMONY = ReasoningSyntax("<|channel|>analysis<|message|>", "<|end|><|start|>assistant", "<|channel|>final<|message|>")

_QUESTION, _ANSWER, _REASONING = Message("user", "Probe question?"), "Probe answer.", "Probe reasoning."
_FRAME = "<answer>", "</answer>"  # around the answer of Hunyuan and others: its template cuts earlier answers out of it
_MARK = re.compile(r"<[^<>]*>|\[[^\[\]]*\]")


def possible_reasoning(control: Collection[str], lead: str = "") -> ReasoningSyntax:
    """Return the tags that a model may write though its template names none: those of its control tokens, or others.

    Args:
        lead: what it writes before an answer; such a model does not reason.
    """
    if lead:
        return ReasoningSyntax("", "", lead)
    return next((syntax for syntax in _KNOWN if {syntax.opening, syntax.closing} <= {*control}), _KNOWN[0])


def known_reasoning(template: str | None) -> ReasoningSyntax | None:
    """Return the syntax of a model whose template names the tags; None if it names none that is known."""
    if template is None:
        return None
    if HARMONY.lead in template:
        return HARMONY
    syntax = next((syntax for syntax in _KNOWN if syntax.closing in template), None)
    if syntax is None:
        return None
    # A template that only cuts answers at the closing tag is of a model that always reasons, as DeepSeek R1's first.
    is_implied = syntax.opening[-1] in ">]" and "think" not in template.lower().replace(syntax.closing, "")
    lead, end = (syntax.lead, syntax.end) if syntax.lead else _FRAME
    has_frame = lead in template and (bool(syntax.lead) or end in template)
    return syntax._replace(is_implied=is_implied, lead=lead * has_frame, end=end * has_frame)


def find_reasoning(template: str, render: Render, ends: Collection[str]) -> ReasoningSyntax | None:
    """Return the syntax of the reasoning of a model with this chat template; None if it has none.

    Args:
        template: its source.
        ends: texts of the control tokens that end an answer.
    """
    if HARMONY.lead in template:
        return HARMONY
    syntax = next(filter(None, (_rendered(render, thinking) for thinking in (None, True))), None)
    if syntax is None:
        syntax = known_reasoning(template)
        return syntax and syntax._replace(words=_begun(render, syntax))
    return syntax._replace(end=_before(syntax.end, ends), tail=_before(syntax.tail, ends))


def _begun(render: Render, syntax: ReasoningSyntax) -> str:
    """Return the words with which prompts begin the reasoning behind its opening tag; "" for none."""
    question, asked = (render((_QUESTION,), thinking=None, begins=begins) for begins in (False, True))
    _, found, words = asked[shared_length(question, asked) :].rpartition(syntax.opening)
    return words.lstrip() if found and syntax.closing not in words else ""


def _before(text: str, ends: Collection[str]) -> str:
    """Return the text up to one that ends the answer, and is no part of it."""
    return min((text.partition(end)[0] for end in ends if end), key=len, default=text)


def _rendered(render: Render, thinking: bool | None) -> ReasoningSyntax | None:
    """Return the syntax that a template writes around the reasoning of an answer; None if it leaves it out."""
    question, asked = (render((_QUESTION,), thinking=thinking, begins=begins) for begins in (False, True))
    begin = asked[shared_length(question, asked) :]

    def turn(reasoning: str) -> str:
        answer = Message("assistant", _ANSWER, reasoning=reasoning)
        whole = render((_QUESTION, answer), thinking=thinking, begins=False)
        return whole[shared_length(question, whole) :]

    before, found, rest = turn(_REASONING).partition(_REASONING)
    between, answered, after = rest.partition(_ANSWER)
    if not (found and answered and _MARK.search(between)) or "type" in between:  # as data, not as reasoning
        return None
    plain = turn("").partition(_ANSWER)[0]
    opening, words = _opening(before, begin, plain)
    closing, lead = _closing(between, begin, plain, len(_MARK.findall(opening)))
    marks = [*_MARK.finditer(after)][: len(_MARK.findall(lead))]
    size = marks[-1].end() if marks and not (begin.strip() and closing.endswith(begin.strip())) else 0
    return ReasoningSyntax(opening, closing, lead, after[:size], after[size:].strip() if size else "", words)


def shared_length(*texts: str) -> int:
    """Return the length of the beginning that texts share."""
    return len(commonprefix(texts))  # noqa: RUF071 - not of paths


def _opening(before: str, begin: str, plain: str) -> tuple[str, str]:
    """Return the text that opens the reasoning, and words of it that the prompt has.

    Args:
        before: a turn up to its reasoning.
        begin: what the template writes of the next answer.
        plain: a turn without reasoning up to its text.
    """
    opening = before.partition(begin.strip())[2] if begin.strip() else ""
    if opening.strip():
        return opening.strip(), ""
    words = begin.partition(before.strip())[2] if before.strip() else ""
    words = "" if _MARK.search(words) else words.lstrip()
    starts = [match.start() for match in _MARK.finditer(before)]
    tails = (before[start:].strip() for start in reversed(starts))
    opening = next((tail for tail in tails if before.count(tail) == 1), before.strip())
    return "" if plain.rstrip().endswith(opening) else opening, words


def _closing(between: str, begin: str, plain: str, n_marks: int) -> tuple[str, str]:
    """Return the text that closes the reasoning, and the one that precedes the answer.

    Args:
        between: the text between reasoning and answer.
        begin, plain: as above.
        n_marks: how many marks the opening has.
    """
    shared = between[len(between) - shared_length(between[::-1], plain[::-1]) :]
    if shared == between:  # the template writes an empty reasoning
        marks = [*_MARK.finditer(between)][: max(n_marks, 1)]
        return between[: marks[-1].end()].strip(), between[marks[-1].end() :].strip()
    if begin.strip() and begin.strip() in shared:
        lead = shared.partition(begin.strip())[2]
    else:
        start = _MARK.search(shared)
        lead = shared[start.start() :] if start else ""
    return between[: len(between) - len(lead)].strip(), lead.strip()


def opens(prompt: str, syntax: ReasoningSyntax) -> bool:
    """Return whether a rendered prompt ends with the opening tag, so that the answer begins with reasoning."""
    begins = [text.rstrip() for text in (syntax.opening, syntax.words) if text.strip()]
    text = prompt.rstrip()
    return any(text.endswith(begin) for begin in begins) and text.rfind(begins[0]) > text.rfind(syntax.closing)


def constrained_tags(syntax: ReasoningSyntax, *, calls: bool) -> Tags:
    """Return the texts between which no grammar applies; a grammar of calls describes the text before an answer too."""
    return syntax.opening, syntax.closing + ("" if calls or syntax.has_word_lead else syntax.lead)


def lead_in(syntax: ReasoningSyntax | None, *, thinks: bool, calls: bool = False) -> str:
    """Return the beginning of an answer that is a message or several, to whose headers no grammar applies."""
    if syntax is None or not syntax.has_messages:
        return ""
    return syntax.opening if thinks else "" if calls else syntax.lead


def end_of_reasoning(prompt: str, syntax: ReasoningSyntax | None) -> str:
    """Return the text after which the answer itself begins, without reasoning."""
    if syntax is None:
        return ""
    if syntax.lead:
        return (syntax.closing if opens(prompt, syntax) else "") + syntax.lead
    return f"{syntax.closing}\n\n" if opens(prompt, syntax) else ""


def closing_text(syntax: ReasoningSyntax) -> str:
    """Return the text that closes a reasoning that the model does not close itself."""
    return f"\n{syntax.closing}{syntax.lead}\n\n"


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
    def of(cls, prompt: str, syntax: ReasoningSyntax | None, reasoning: str, text: str) -> AnswerBeginning:
        """Return the beginning after a rendered prompt.

        Args:
            syntax: None if the model does not reason; the reasoning is left out then.
            reasoning: it is continued if there is no text.
            text: may have reasoning in tags before the answer.
        """
        inside = bool(reasoning and not text)
        if syntax is not None and syntax.opening and not reasoning and text.lstrip().startswith(syntax.opening):
            reasoning, closing, text = text.lstrip()[len(syntax.opening) :].partition(syntax.closing)
            reasoning, text, inside = reasoning.lstrip(), text.lstrip(), not closing
        answer = BeginningPart(text, False)
        can_reason = syntax is not None and not prompt.rstrip().endswith(syntax.closing)
        if syntax is None or not can_reason or not (reasoning or inside):
            return cls((BeginningPart(end_of_reasoning(prompt, syntax), True), answer), text, False)
        gap = "" if syntax.lead else "\n"
        opening = "" if opens(prompt, syntax) else syntax.opening + gap
        parts = BeginningPart(opening, True), BeginningPart(reasoning, False)
        if inside:
            return cls(parts, "", True)
        closing = f"{gap}{syntax.closing}{syntax.lead or gap * 2}"
        return cls((*parts, BeginningPart(closing, True), answer), text, False)


class ReasoningTracker(NamedTuple):
    """The stage of an answer, by its text. Tags only count at its beginning, so that an answer can mention them."""

    tags: Tags
    stage: Stage
    tail: str = ""  # the end of the text, where a tag may have begun

    @classmethod
    def begin(cls, tags: Tags, *, inside: bool) -> ReasoningTracker:
        return cls(tags, Stage.INSIDE if inside else Stage.BEFORE)

    def after(self, text: str) -> ReasoningTracker:
        """Return the tracker advanced by a text."""
        if self.stage is Stage.ANSWER:
            return self
        tail = self.tail + text
        if self.stage is Stage.INSIDE:
            _, found, rest = tail.partition(self.tags[1])
            if found:
                return ReasoningTracker(self.tags, Stage.AFTER).after(rest)
            return self._replace(tail=tail[1 - len(self.tags[1]) :])
        start = tail.lstrip()
        if self.tags[0] and start.startswith(self.tags[0]):
            return ReasoningTracker(self.tags, Stage.INSIDE).after(start[len(self.tags[0]) :])
        if self.tags[0].startswith(start):
            return self._replace(tail=tail)
        return ReasoningTracker(self.tags, Stage.ANSWER)


class ThinkingBudget:
    """A limit on the number of tokens of an answer's reasoning.

    Args:
        inside: the prompt ends with the opening tag.

    Attributes:
        closing: the text that closes the reasoning.
    """

    def __init__(self, syntax: ReasoningSyntax, inside: bool, max_tokens: int) -> None:
        self.closing = closing_text(syntax)
        self._max_tokens = max_tokens
        # Before the first and after each token of the answer: the tracker, and the number of tokens of reasoning.
        self._states = [(ReasoningTracker.begin(syntax[:2], inside=inside), 0)]

    @property
    def is_used_up(self) -> bool:
        """The reasoning has to be closed now."""
        tracker, used = self._states[-1]
        return tracker.stage is Stage.INSIDE and used >= self._max_tokens

    @property
    def n_left(self) -> int | None:
        """The least number of tokens after which the reasoning may have to be closed; None if it has ended."""
        tracker, used = self._states[-1]
        return None if tracker.stage is Stage.ANSWER else max(1, self._max_tokens - used)

    def push(self, text: str) -> None:
        """Add the text of the answer's next token."""
        before, used = self._states[-1]
        after = before.after(text)
        self._states.append((after, used + (before.stage is after.stage is Stage.INSIDE)))

    def rewind(self, n_tokens: int) -> None:
        """Cut the answer to its first n_tokens."""
        del self._states[n_tokens + 1 :]
