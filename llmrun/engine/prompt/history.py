"""Earlier answers of a conversation as the model generated them, instead of as the chat template writes them anew.

A template drops the reasoning of an earlier answer, trims its text and writes its calls in JSON of its own; clients
leave reasoning out. Each difference makes the rest of the prompt new, and hides from the model what it thought. So the
tokens of finished answers are remembered in a tree of prompts. A later prompt of the conversation begins with the
tokens that stood in the earlier one and those of the answer; the template writes only what comes after.

Owns the tree, and what makes a message equal to a remembered one; must not know Jinja, llama.cpp or the loop.
"""

from __future__ import annotations

import hashlib
import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from llmrun.engine.prompt.control_texts import Part, text_of
from llmrun.engine.prompt.thinking import shared_length
from llmrun.errors import BadTemplateError
from llmrun.protocol.answer import ResponseAccumulator
from llmrun.protocol.codec import load_json
from llmrun.protocol.media import Media
from llmrun.protocol.messages import Finished, Message, PromptHistory, TextDelta, Tool

MAX_TOKENS = 1 << 22
"""Of all remembered prompts and answers together: 16 MiB. Prompts that begin alike share their beginning."""

Render = Callable[[Sequence[Message]], list[Part | Media]]
"""Returns the prompt of a conversation by its chat template."""

_MAX_OPENING = 128  # characters at the end of a prompt that the template leaves out in later ones: tags of reasoning
_MARKER, _NEXT_MARKER, _ARGUMENT = "endofanswer", "nextmessage", "argument"
_QUESTION, _NEXT = Message("user", "earlierquestion"), Message("user", _NEXT_MARKER)


class Conversation:
    """The messages of a request, each with a digest of the conversation up to it.

    Two conversations have the same digest if their messages are equal. Of an answer, only what a client sees is
    compared: its text without the blanks around it, and its calls, with arguments as JSON values.

    Args:
        context: everything else that the prompt depends on, but the tools.
        tools: that the prompt describes.
        private: nothing of it may be saved.

    Attributes:
        question: index of the last user's message; -1 without one.
    """

    def __init__(
        self,
        context: Sequence[object],
        messages: Sequence[Message],
        tools: tuple[Tool, ...] = (),
        *,
        private: bool = False,
    ) -> None:
        self.messages, self.tools, self.private = messages, tools, private
        self.digests = [hashlib.sha256(json.dumps([*context]).encode()).digest()]
        self._calls: dict[str, int] = {}  # id -> number of the call
        for message in messages:
            self.digests.append(self.digest_with(message))
        self.question = max((index for index, each in enumerate(messages) if each.role == "user"), default=-1)

    @property
    def has_calls(self) -> bool:
        return any(message.tool_calls or message.role == "tool" for message in self.messages)

    def digest_with(self, message: Message) -> bytes:
        """Return the digest of the conversation with one more message."""
        data: list[Any] = [message.role]
        if message.role == "assistant":
            data += [message.content.strip(), [[call.name, _value(call.arguments)] for call in message.tool_calls]]
        else:
            media = [(hashlib.sha256(file.data.encode()).hexdigest(), file.at) for file in message.media]
            # Clients without ids get new ones in each request.
            data += [message.content, message.name, self._calls.get(message.tool_call_id, message.tool_call_id), media]
        for call in message.tool_calls:
            self._calls[call.id] = len(self._calls)
        return hashlib.sha256(self.digests[-1] + json.dumps(data, sort_keys=True).encode()).digest()


def _value(arguments: str) -> Any:
    """Return the JSON value of a call's arguments, in which 1.0 equals 1; the text if it is not JSON."""
    try:
        return load_json(arguments, parse_float=_number)
    except ValueError:
        return arguments.strip()


def _number(text: str) -> float | int:
    number = float(text)
    return int(number) if number.is_integer() else number


def _reasonings(messages: Sequence[Message]) -> tuple[str, ...]:
    """Return the reasoning of each answer among messages."""
    return tuple(message.reasoning.strip() for message in messages if message.role == "assistant")


@dataclass(slots=True, eq=False)
class Turn:
    """A finished answer and its prompt.

    Attributes:
        digest: of the conversation with the answer.
        tools: that the prompt describes.
        parent: the last earlier answer whose tokens the prompt begins with.
        tokens: of the prompt after the parent's, and of the answer without its end token.
        reasonings: of the answers after the parent's, the last is its own; "" for none.
        reasons: reasoning stands in the prompt or the answer, or the tags of an empty one.
        keeps: reasoning of turns before the last question stands in the prompt.
        private: it must not be saved.
        compared: number of tokens of the prompt of this question that was last compared with the template's own form; 0
            is none.
    """

    digest: bytes
    tools: tuple[Tool, ...]
    parent: Turn | None
    tokens: array[int]
    reasonings: tuple[str, ...]
    reasons: bool
    keeps: bool
    private: bool = False
    compared: int = 0

    @property
    def path(self) -> list[Turn]:
        """The turns from this one back to the first."""
        found, turn = list[Turn](), self
        while True:
            found.append(turn)
            if turn.parent is None:
                return found
            turn = turn.parent

    @property
    def n_tokens(self) -> int:
        """The number of tokens from the beginning of the prompt to the end of the answer."""
        return sum(len(turn.tokens) for turn in self.path)

    @property
    def all_tokens(self) -> list[int]:
        """The tokens from the beginning of the prompt to the end of the answer."""
        return [token for turn in reversed(self.path) for token in turn.tokens]

    def agrees(self, conversation: Conversation, n_messages: int) -> bool:
        """Return whether a client has left out the reasoning of each answer, or sent it unchanged.

        Equal conversations may have other tools.
        """
        remembered = (each for turn in reversed(self.path) for each in turn.reasonings)
        return all(
            sent in ("", known)
            for sent, known in zip(_reasonings(conversation.messages[:n_messages]), remembered, strict=True)
        )


class Beginning(NamedTuple):
    """The first messages of a conversation, which stand in its prompt as they were generated."""

    turn: Turn
    n_messages: int


class OpenTurn:
    """A prompt whose answer is remembered when it has finished.

    Args:
        conversation: of the prompt.
        messages: of the conversation, with the reasoning that the client has left out.
        beginning: of the prompt; None if the template wrote all of it.
        keeps: reasoning of turns before the last question may stand in the prompt.
        begins: text that the answer begins with, which stands in the prompt.

    Attributes:
        keeps: it does stand there.
        reasons: as in Turn.
        is_shortened, kept_tools: as in PromptHistory.
        compared: as in Turn.
    """

    def __init__(
        self,
        history: History,
        conversation: Conversation,
        messages: Sequence[Message],
        beginning: Beginning | None,
        *,
        keeps: bool,
        begins: str = "",
    ) -> None:
        self._tree, self._conversation, self._begins = history, conversation, begins
        self.beginning = beginning
        self.is_shortened = False
        self.kept_tools = 0
        self.compared = 0
        self._deltas: list[TextDelta] = []
        question, (turn, n_known) = conversation.question, beginning or (None, 0)
        self._reasonings = _reasonings(messages[n_known:])
        is_earlier = n_known <= question  # the last known answer is from before the question
        self.keeps = (turn is not None and (turn.reasons if is_earlier else turn.keeps)) or (
            keeps and any(each.reasoning for each in messages[n_known:question])
        )
        self.reasons = self.keeps or (turn is not None and not is_earlier and turn.reasons)
        self.reasons |= any(each.reasoning for each in messages[max(n_known, question) :])

    @property
    def history(self) -> PromptHistory | None:
        """What stands in the prompt; None if the template wrote it in its own form."""
        if self.beginning is None:
            if not self.is_shortened and not self.kept_tools:
                return None
            return PromptHistory(0, 0, is_shortened=self.is_shortened, kept_tools=self.kept_tools)
        turn = self.beginning.turn
        return PromptHistory(len(turn.path), turn.n_tokens, kept_tools=self.kept_tools)

    def remember(self, messages: Sequence[Message], tokens: Sequence[int]) -> None:
        """Remember the beginning of the prompt, whose last message is an answer.

        Args:
            messages: that stand in it, with their reasoning.
            tokens: of it, without the end token of the answer.
        """
        turn, n_known = self.beginning or (None, 0)
        conversation = self._conversation
        self._tree.add(
            Turn(
                conversation.digests[len(messages)],
                conversation.tools,
                turn,
                array("i", tokens[turn.n_tokens if turn is not None else 0 :]),
                _reasonings(messages[n_known:]),
                reasons=self.reasons,
                keeps=self.keeps,
                private=conversation.private,
            )
        )

    def take(self, delta: TextDelta) -> None:
        self._deltas.append(delta)

    def finish(self, finished: Finished, tokens: Sequence[int]) -> None:
        """Remember the answer.

        Args:
            finished: the model ended the answer itself, with an end token.
            tokens: of prompt and answer; the last one is the end token.
        """
        response, conversation = ResponseAccumulator(), self._conversation
        for delta in self._deltas:
            response.take(delta)
        response.take(finished)
        parent = self.beginning.turn if self.beginning is not None else None
        answer = Message("assistant", self._begins + response.text, response.calls)
        turn = Turn(
            conversation.digest_with(answer),
            conversation.tools,
            parent,
            array("i", tokens[parent.n_tokens if parent is not None else 0 : -1]),
            (*self._reasonings, response.reasoning.strip()),
            reasons=self.reasons or bool(response.reasoning.strip()),
            keeps=self.keeps,
            private=conversation.private,
            compared=self.compared,
        )
        self._tree.add(turn)


class History:
    """The remembered turns, in a tree; the least recently used ones are forgotten. Safe from any thread.

    Args:
        max_tokens: limit of the tokens of all turns.

    Attributes:
        saved: returns tokens of saved states, and what turns_of() returned for them; called once, when it is needed.
    """

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self.saved: Callable[[], Iterable[tuple[list[int], bytes]]] = tuple
        self._is_loaded = False
        self._max_tokens = max_tokens
        self._lock = threading.Lock()
        self._turns: dict[bytes, list[Turn]] = {}  # digest -> turns, the last used one at the end
        self._order: OrderedDict[Turn, None] = OrderedDict()  # least recently used first; a parent after its children
        self.n_tokens = 0

    def add(self, turn: Turn) -> Turn:
        """Remember a turn; return the equal one that is known already, if any."""
        with self._lock:
            same = (
                each
                for each in self._turns.get(turn.digest, ())
                if (each.parent, each.tokens, each.reasonings, each.tools)
                == (turn.parent, turn.tokens, turn.reasonings, turn.tools)
            )
            turn = next(same, turn)
            self._use(turn)
            while self.n_tokens > self._max_tokens:
                self._forget(next(iter(self._order)))
        return turn

    def _use(self, turn: Turn) -> None:
        for each in turn.path:
            if each not in self._order:  # new, or forgotten while an answer to it was generated
                self.n_tokens += len(each.tokens)
            else:
                self._turns[each.digest].remove(each)
            self._turns.setdefault(each.digest, []).append(each)
            self._order[each] = None
            self._order.move_to_end(each)

    def _forget(self, turn: Turn) -> None:
        del self._order[turn]
        self.n_tokens -= len(turn.tokens)
        self._turns[turn.digest].remove(turn)
        if not self._turns[turn.digest]:
            del self._turns[turn.digest]

    def turns_of(self, tokens: list[int]) -> bytes:
        """Return the turns whose tokens these are or begin with, as data for later processes."""
        found: dict[Turn | None, tuple[int, int]] = {None: (-1, 0)}  # turn -> its place in the data, its last token
        data: list[list[object]] = []
        tools: dict[tuple[Tool, ...], int] = {}  # -> their place in the data
        with self._lock:
            for turn in reversed(self._order):  # a parent before its children
                _, start = found.get(turn.parent, (0, len(tokens)))
                end = start + len(turn.tokens)
                if not turn.private and turn.parent in found and tokens[start:end] == turn.tokens.tolist():
                    place = found[turn.parent][0]
                    found[turn] = len(data), end
                    number = tools.setdefault(turn.tools, len(tools))
                    data.append([turn.digest.hex(), number, place, end, turn.reasonings, turn.reasons, turn.keeps])
        return json.dumps({"tools": [*tools], "turns": data}).encode()

    def _load(self) -> None:
        """Add the turns of saved states."""
        if self._is_loaded:
            return
        self._is_loaded = True
        for tokens, data in self.saved():
            found: list[Turn] = []
            saved = load_json(data or b"{}")
            tools = [tuple(Tool(*each) for each in some) for some in saved.get("tools", ())]
            for digest, number, place, end, reasonings, *flags in saved.get("turns", ()):
                parent = found[place] if place >= 0 else None
                start = parent.n_tokens if parent is not None else 0
                reasons, keeps = flags
                turn = Turn(
                    bytes.fromhex(digest),
                    tools[number],
                    parent,
                    array("i", tokens[start:end]),
                    (*reasonings,),
                    reasons,
                    keeps,
                )
                found.append(self.add(turn))

    def find(self, conversation: Conversation, *, keeps: bool) -> Beginning | None:
        """Return the longest remembered beginning of a conversation.

        Args:
            keeps: reasoning of turns before the last question may stand in it.
        """
        if any(message.role == "assistant" for message in conversation.messages):
            self._load()
        with self._lock:
            for n_messages in range(len(conversation.messages), 0, -1):
                for turn in self._known(conversation, n_messages):
                    is_earlier = n_messages <= conversation.question
                    if keeps or not (turn.reasons if is_earlier else turn.keeps):
                        self._use(turn)
                        return Beginning(turn, n_messages)
        return None

    def _known(self, conversation: Conversation, n_messages: int) -> list[Turn]:
        """Return the turns that end with a message of the conversation, the last used one first."""
        return [turn for turn in self._equal(conversation, n_messages) if turn.tools == conversation.tools]

    def tools_of(self, conversation: Conversation) -> tuple[Tool, ...]:
        """Return the tools with which the conversation was last answered; none if it was not, or had none."""
        if not any(message.role == "assistant" for message in conversation.messages):
            return ()
        self._load()
        with self._lock:
            for n_messages in range(len(conversation.messages), 0, -1):
                if known := self._equal(conversation, n_messages):
                    return known[0].tools
        return ()

    def _equal(self, conversation: Conversation, n_messages: int) -> list[Turn]:
        """Return the turns that end with a message of the conversation, with whatever tools."""
        following = conversation.messages[n_messages : n_messages + 1]
        if any(each.role == "assistant" for each in following):  # some templates write both as one message
            return []
        found = reversed(self._turns.get(conversation.digests[n_messages], ()))
        return [turn for turn in found if turn.agrees(conversation, n_messages)]

    def with_reasoning(self, conversation: Conversation, beginning: Beginning | None) -> list[Message]:
        """Return the messages, those after a known beginning with the reasoning that the client has left out."""
        completed = list(conversation.messages)
        with self._lock:
            for index, message in enumerate(completed):
                is_after = beginning is None or index >= beginning.n_messages
                if is_after and message.role == "assistant" and not message.reasoning:
                    known = self._known(conversation, index + 1)
                    completed[index] = replace(message, reasoning=known[0].reasonings[-1]) if known else message
        return completed


def keeps_reasoning(render: Render) -> bool:
    """Return whether a template writes the reasoning of answers before the last question."""
    with suppress(BadTemplateError):
        prompt = render([_QUESTION, Message("assistant", "answer", reasoning=_MARKER), _NEXT])
        return _MARKER in text_of(prompt)
    return False


def begin_alike(*renders: Render) -> bool:
    """Return whether these prompts of a question are equal up to the question."""
    with suppress(BadTemplateError):
        return len({text_of(render([_QUESTION])).partition(_QUESTION.content)[0] for render in renders}) == 1
    return False


def after_answer(
    messages: Sequence[Message], n_messages: int, trial: Render, render: Render, ends: Collection[str], written: str
) -> list[Part | Media] | None:
    """Return the parts of a prompt after an answer, which begin with the text that ends it.

    The conversation is rendered with a marker as the answer's text, or in its last call. How the text after the marker
    begins is shown by other renderings in which the next messages are marked too.

    Args:
        messages: the answer is the last one of the first `n_messages`.
        trial: returns the prompt of a short conversation.
        render: returns the prompt of the whole conversation.
        ends: the texts of end tokens.
        written: the last text of the answer's tokens, without its end token.

    Returns:
        None if the end of the answer can't be told for certain.
    """
    if any(_MARKER in text or _NEXT_MARKER in text for message in messages for text in message.texts):
        return None
    before, answer, following = messages[: n_messages - 1], _marked(messages[n_messages - 1]), messages[n_messages:]
    n_results = next((index for index, each in enumerate(following) if each.role != "tool"), len(following))
    marked = [replace(each, content=_NEXT_MARKER, media=()) for each in following[: max(1, n_results)]]
    with suppress(BadTemplateError):
        short = text_of(trial([_QUESTION, answer, *marked]))
        if _repeats(text_of(trial([_QUESTION])), short):
            return None
        rest = _after(_MARKER, render([*before, answer, *following]))
        if rest is None:
            return None
        written = written if answer.tool_calls else ""
        end = _end_of_answer(short, ends, written, text_of(rest))
        if end is None:
            whole = text_of(render([*before, answer, *marked, *following[len(marked) :]]))
            end = _end_of_answer(whole, ends, written, text_of(rest))
        return _without(end, rest) if end is not None else None
    return None


def _repeats(open_prompt: str, prompt: str) -> bool:
    """Return whether a template ends a prompt with text that it leaves out once the answer is there.

    In later prompts, those instructions would stand again and again.
    """
    opening = open_prompt.rpartition(_QUESTION.content)[2]
    later = prompt.rpartition(_MARKER)[0].rpartition(_QUESTION.content)[2]
    return len(opening) - shared_length(opening, later) > _MAX_OPENING


def _end_of_answer(prompt: str, ends: Collection[str], written: str, rest: str) -> str | None:
    """Return what follows the marker of an answer up to its end; None if that is not certain.

    Args:
        prompt: with a marked answer and marked messages after it.
        written: the last text of an answer that ends with a call.
        rest: of the real prompt after the answer's marker; it must begin alike.
    """
    before, _, after = prompt.rpartition(_MARKER)
    between = after.partition(_NEXT_MARKER)[0]
    at, end = min(((between.find(text), text) for text in ends if text in between), default=(0, ""))
    if not before or _NEXT_MARKER in before or not rest.startswith(between[:at] + end if end else between):
        return None
    if end or not written:
        return between[:at]
    # Without an end token after the call, the template goes on where the model did; the marker's quotes are its own.
    closings = (between[:size] for size in range(len(between), 0, -1))
    return next((each for each in closings if (bare := each.lstrip('"')) and written.endswith(bare)), None)


def _marked(answer: Message) -> Message:
    """Return an answer with the marker as its last visible text."""
    if not answer.tool_calls:
        return replace(answer, content=_MARKER)
    *calls, last = answer.tool_calls
    return replace(answer, tool_calls=(*calls, last._replace(arguments=json.dumps({_ARGUMENT: _MARKER}))))


def _after(marker: str, parts: Sequence[Part | Media]) -> list[Part | Media] | None:
    """Return the parts after a marker; None unless it occurs once."""
    found = [(index, part) for index, part in enumerate(parts) if isinstance(part, Part) and marker in part.text]
    if len(found) != 1 or found[0][1].text.count(marker) != 1:
        return None
    index, part = found[0]
    rest = part.text.partition(marker)[2]
    return [*([part._replace(text=rest)] if rest else []), *parts[index + 1 :]]


def _without(beginning: str, parts: Sequence[Part | Media]) -> list[Part | Media]:
    """Return the parts without the text that they begin with."""
    rest, n_left = list[Part | Media](), len(beginning)
    for part in parts:
        if not n_left or isinstance(part, Media):
            rest.append(part)
            continue
        if len(part.text) > n_left:
            rest.append(part._replace(text=part.text[n_left:]))
        n_left -= min(n_left, len(part.text))
    return rest
