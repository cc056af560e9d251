"""Rewriting of conversations that a chat template refuses or shortens, by rules found with trial renderings.

A text keeps its place: the prompts of a growing conversation keep their common prefix. Pure; must not know Jinja.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from llmrun.engine.prompt.tools import PROBE, PROBE_TOOL
from llmrun.protocol.messages import Message, Rewriting, Tool

_OPENING = Message("user", "...")  # before an assistant's message where a template demands a user's
_SYSTEM, _LATE = Message("system", "Probe system one."), Message("system", "Probe system two.")
_ASKED, _ASKED_AGAIN = Message("user", "Probe question one?"), Message("user", "Probe question two?")
_SAID, _SAID_AGAIN = Message("assistant", "Probe answer one."), Message("assistant", "Probe answer two.")
_CALLED, _RESULT = PROBE[1:]


class TemplateRules:
    """The conversations that a template takes. Each rule is found by a trial rendering when it is first needed.

    Args:
        render: returns the prompt of a conversation, "" if the template refuses it.
        as_text: returns a message with its calls as text, or a result as the user's.

    Attributes:
        rewritings: what was rewritten so far.
    """

    def __init__(
        self, render: Callable[[Sequence[Message], Sequence[Tool]], str], as_text: Callable[[Message], Message]
    ) -> None:
        self._render, self.as_text = render, as_text
        self.rewritings: set[Rewriting] = set()

    @cached_property
    def takes_system(self) -> bool:
        return _SYSTEM.content in self._render((_SYSTEM, _ASKED), ())

    @cached_property
    def takes_late_system(self) -> bool:
        """System text after the first message stays where it stands."""
        return self._keeps_order(_SYSTEM, _ASKED, _SAID, _LATE, _ASKED_AGAIN) and self._keeps_order(_ASKED, _LATE)

    @cached_property
    def takes_neighbours(self) -> bool:
        """Two messages in a row may have the same role."""
        users, answers = (_ASKED, _ASKED_AGAIN), (_ASKED, _SAID, _SAID_AGAIN, _ASKED_AGAIN)
        return self._keeps_order(*users) and self._keeps_order(*answers)

    @cached_property
    def takes_answer_first(self) -> bool:
        return self._keeps_order(_SAID, _ASKED)

    @cached_property
    def takes_empty_answers(self) -> bool:
        return bool(self._render((_ASKED, replace(_SAID, content=""), _ASKED_AGAIN), ()))

    @cached_property
    def takes_no_question(self) -> bool:
        """A conversation may have no user's message."""
        return bool(self._render((_SYSTEM,), ()) and self._render((_SYSTEM,), (PROBE_TOOL,)))

    @cached_property
    def takes_several_calls(self) -> bool:
        """A message may have more than one call."""
        first = _CALLED.tool_calls[0]
        second = first._replace(id="call_9876543210jihgfedcba", arguments='{"town": "Oslo!"}')
        results = _RESULT, replace(_RESULT, content="Midnight", tool_call_id=second.id)
        prompt = self._render((_ASKED, replace(_CALLED, tool_calls=(first, second)), *results), (PROBE_TOOL,))
        return all(text in prompt for text in ("Rome!", "Oslo!", *(result.content for result in results)))

    @cached_property
    def takes_lone_calls(self) -> bool:
        """A call may have no result."""
        return self._keeps_order(_ASKED, _CALLED, _ASKED_AGAIN)

    @cached_property
    def takes_lone_results(self) -> bool:
        """A result may have no call before it."""
        return self._keeps_order(_ASKED, _RESULT, _SAID)

    @cached_property
    def takes_question_after_result(self) -> bool:
        return self._keeps_order(_ASKED, _CALLED, _RESULT, _ASKED_AGAIN)

    @cached_property
    def takes_reasoning_before_text(self) -> bool:
        """A call may have both reasoning and text before it."""
        call = replace(_CALLED, content=_SAID.content, reasoning=_SAID_AGAIN.content)
        return bool(self._render((_ASKED, call, _RESULT), (PROBE_TOOL,)))

    @cached_property
    def takes_text_before_calls(self) -> bool:
        """A call stays where its message has text."""
        prompt = self._render((_ASKED, replace(_CALLED, content=_SAID.content), _RESULT), (PROBE_TOOL,))
        argument = _CALLED.tool_calls[0].arguments.split('"')[-2]
        return argument in prompt.rpartition(_ASKED.content)[2]

    def _keeps_order(self, *messages: Message) -> bool:
        prompt = self._render(messages, (PROBE_TOOL,) if {_CALLED, _RESULT} & {*messages} else ())
        places = [prompt.find(message.content) for message in messages if message.content]
        return places == sorted(places) and places[0] >= 0


def fit(messages: Sequence[Message], rules: TemplateRules) -> list[Message]:
    """Return the conversation as the template takes it; unchanged if the template takes it as it is."""
    fitted = _fit_system(messages, rules)
    if len(fitted) < len(messages) or any(map(operator.ne, fitted, messages)):
        rules.rewritings.add("system")
    if any(len(message.tool_calls) > 1 for message in fitted) and not rules.takes_several_calls:
        fitted = _one_by_one(fitted)
        rules.rewritings.add("calls")
    for index in _lone(fitted):
        is_call = bool(fitted[index].tool_calls)
        if not (rules.takes_lone_calls if is_call else rules.takes_lone_results):
            fitted[index] = rules.as_text(fitted[index])
            rules.rewritings.add("calls")
    if any(each.content and each.tool_calls for each in fitted) and not rules.takes_text_before_calls:
        fitted = [part for each in fitted for part in _apart(each)]
        rules.rewritings.add("calls")
    if any(map(_has_all, fitted)) and not rules.takes_reasoning_before_text:
        fitted = [_with_text_as_reasoning(each) if _has_all(each) else each for each in fitted]
        rules.rewritings.add("reasoning")
    if any(map(_is_empty_answer, fitted)) and not rules.takes_empty_answers:
        fitted = [each for each in fitted if not _is_empty_answer(each)]
    if any(map(_are_neighbours, fitted, fitted[1:])) and not rules.takes_neighbours:
        fitted = _merge(fitted, _are_neighbours)
        rules.rewritings.add("neighbours")
    if any(map(_is_after_result, fitted, fitted[1:])) and not rules.takes_question_after_result:
        fitted = _merge(fitted, _is_after_result)
        rules.rewritings.add("question")
    first = next((index for index, message in enumerate(fitted) if message.role != "system"), len(fitted))
    begins_with_answer = first < len(fitted) and fitted[first].role == "assistant"
    if (begins_with_answer and not rules.takes_answer_first) or (
        all(message.role != "user" for message in fitted) and not rules.takes_no_question
    ):
        fitted.insert(first, _OPENING)
        rules.rewritings.add("opening")
    return fitted


def _fit_system(messages: Sequence[Message], rules: TemplateRules) -> list[Message]:
    """Make system text that the template does not take the user's, after the results of the calls before it."""
    systems = [index for index, message in enumerate(messages) if message.role == "system"]
    if not systems or (rules.takes_system and (systems == [0] or rules.takes_late_system)):
        return [*messages]
    fitted: list[Message] = []
    n_late = 0  # system texts at the end of `fitted`
    for message in messages:
        if message.role == "tool" and n_late:
            fitted.insert(len(fitted) - n_late, message)
        elif message.role != "system":
            fitted.append(message)
            n_late = 0
        elif rules.takes_system and all(each.role == "system" for each in fitted):
            fitted = [_joined(*fitted, message)]
        else:
            fitted.append(replace(message, role="user"))
            n_late += 1
    return fitted


def _one_by_one(messages: Sequence[Message]) -> list[Message]:
    """Make each of several calls in a message one of its own, with its result after it."""
    fitted: list[Message] = []
    rest = [*messages]
    while rest:
        message = rest.pop(0)
        if len(message.tool_calls) < 2:
            fitted.append(message)
            continue
        n_results = next((index for index, each in enumerate(rest) if each.role != "tool"), len(rest))
        results, rest = rest[:n_results], rest[n_results:]
        for call in message.tool_calls:
            fitted.append(replace(message, tool_calls=(call,)))
            message = replace(message, content="", reasoning="")
            result_of_call = next((result for result in results if result.tool_call_id in (call.id, "")), None)
            if result_of_call is not None:
                results.remove(result_of_call)
                fitted.append(result_of_call)
        fitted += results
    return fitted


def _lone(messages: Sequence[Message]) -> set[int]:
    """Return the indexes of calls without results, and of results without calls."""
    lone = set[int]()
    for index, message in enumerate(messages):
        before = messages[index - 1] if index else None
        after = messages[index + 1] if index + 1 < len(messages) else None
        if message.role == "tool":
            is_result = before is not None and (before.tool_calls or (before.role == "tool" and index - 1 not in lone))
            if not is_result:
                lone.add(index)
        elif message.tool_calls and after is not None and after.role != "tool" and not after.tool_calls:
            lone.add(index)
    return lone


def _apart(message: Message) -> Iterator[Message]:
    """Yield a message's text and its calls as two messages."""
    if message.content and message.tool_calls:
        yield replace(message, tool_calls=())
        yield replace(message, content="", reasoning="")
    else:
        yield message


def _has_all(message: Message) -> bool:
    return bool(message.reasoning and message.content and message.tool_calls)


def _with_text_as_reasoning(message: Message) -> Message:
    return replace(message, content="", reasoning=f"{message.reasoning}\n\n{message.content}")


def _is_empty_answer(message: Message) -> bool:
    return message.role == "assistant" and not (message.content or message.tool_calls or message.reasoning)


def _are_neighbours(before: Message, message: Message) -> bool:
    return before.role == message.role != "tool"


def _is_after_result(before: Message, message: Message) -> bool:
    return before.role == "tool" and message.role == "user"


def _merge(messages: Sequence[Message], belong: Callable[[Message, Message], bool]) -> list[Message]:
    """Join each message to the one before if they belong together."""
    merged: list[Message] = []
    for message in messages:
        merged.append(_joined(merged.pop(), message) if merged and belong(merged[-1], message) else message)
    return merged


def _joined(*messages: Message) -> Message:
    """Return messages as one with the role of the first."""
    content = "\n".join(message.content for message in messages if message.content)
    reasoning = "\n".join(message.reasoning for message in messages if message.reasoning)
    calls = sum((message.tool_calls for message in messages), ())
    return replace(messages[0], content=content, tool_calls=calls, reasoning=reasoning)
