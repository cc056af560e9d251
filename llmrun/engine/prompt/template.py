"""A conversation -> prompt parts, by the model's own chat template in sandboxed Jinja.

Owns rendering and the rule that text of people and models never becomes control tokens; must not know tokens.
A template is untrusted input: it runs in Jinja's ImmutableSandboxedEnvironment; time, memory, numbers and output are
capped here. What still takes too long, because it never comes back to Python, is ended by the front with this process.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import cached_property
from itertools import groupby
from os.path import commonprefix
from types import FrameType
from typing import Any, NamedTuple, NoReturn, TypeVar

from llmrun.engine.llama.submodules import import_submodule
from llmrun.engine.prompt.images import marked
from llmrun.engine.prompt.tools import (
    OTHERS,
    PROBE,
    PROBE_TOOL,
    for_mistral,
    in_text,
    message_data,
    syntax_in,
    texts,
    tool_data,
    with_responses,
)
from llmrun.errors import BadTemplateError, UsageError
from llmrun.protocol.messages import Image, Message, Tool
from llmrun.protocol.rendering import characters, rendering_share
from llmrun.protocol.toolcalls import GEMMA, MISTRAL, MISTRAL_ARGS, Syntax

_Result = TypeVar("_Result")

MAX_TEMPLATE_CHARACTERS = 128 * 1024
"""Eight times the longest real ones; compiling can't be interrupted."""
MAX_PROMPT_CHARACTERS = 16 * 1024 * 1024
MAX_RENDER_BYTES = 256 * 1024 * 1024
MAX_RENDER_SECONDS = 1.5
"""Real templates take milliseconds. Less than the front's patience: it would end the engine."""
_LEAST_SECONDS = 0.01  # between two looks at the clock
MAX_BITS = 64 * 1024
"""Of a whole number: arithmetic with longer ones can take hours and can't be interrupted."""
MAX_DATE_CHARACTERS = 1024
"""Of a date's layout: the C library writes all of it before it can be interrupted."""

_REFUSES = "the chat template refuses this conversation"
_PROBE_TEXT = "Is this said?"

NAMED = {
    # The most common one, for models that come without.
    "chatml": (
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
}
"""Templates that can be asked for by name."""


class RenderLimits(NamedTuple):
    """What a template may take, besides what any template takes for the conversation itself."""

    characters: int
    n_bytes: int
    seconds: float

    @classmethod
    def of(cls, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> RenderLimits:
        """For a conversation, of which a template makes a few copies."""
        size = characters(messages, tools)
        return cls(
            MAX_PROMPT_CHARACTERS + 4 * size,
            MAX_RENDER_BYTES + 32 * size,
            MAX_RENDER_SECONDS + rendering_share(messages, tools),
        )


class Part(NamedTuple):
    """A stretch of the prompt; where special is false, text of control tokens is just text."""

    text: str
    special: bool


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: Jinja text, as in the GGUF key tokenizer.chat_template.
        bos: text of the begin-of-sequence token.
        eos: text of the end-of-sequence token.

    Raises:
        BadTemplateError: it does not compile.
    """

    def __init__(self, source: str, *, bos: str, eos: str) -> None:
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            most = f"at most {MAX_TEMPLATE_CHARACTERS:,} are taken"
            raise BadTemplateError(f"the chat template has {len(source):,} characters", why=most)
        self._source = source
        self._bos = bos
        self._eos = eos
        # Under the limits already here: Jinja computes constant expressions when it compiles.
        self._template = _limited(lambda: _environment().from_string(source), RenderLimits.of(()))

    @property
    def syntax(self) -> Syntax:
        """How the model is to write calls of tools."""
        return self._own_syntax or OTHERS

    @cached_property
    def _own_syntax(self) -> Syntax | None:
        """The one that the template has for it, if any, as it writes a call that was made.

        Raises:
            BadTemplateError: that takes too long, which says nothing about the template where the machine is busy.
        """
        given = {"messages": [message_data(message, str) for message in PROBE], "tools": [tool_data(PROBE_TOOL, str)]}
        limits = RenderLimits.of(PROBE, (PROBE_TOOL,))
        try:
            return syntax_in(_limited(lambda: self._rendered(given, limits.characters), limits))
        except BadTemplateError as error:
            if isinstance(error.__context__, _OverdueError):
                raise
            return None

    @cached_property
    def _wants_lists(self) -> bool:
        """Whether the template takes a content only as a list of parts, as those of some models that see do."""
        if "type" not in self._source or "'text'" not in self._source.replace('"', "'"):
            return False
        plain = {"messages": [{"role": "user", "content": _PROBE_TEXT}]}
        listed = {"messages": [{"role": "user", "content": [{"type": "text", "text": _PROBE_TEXT}]}]}
        limits = RenderLimits.of(())
        with suppress(BadTemplateError):
            if _PROBE_TEXT in _limited(lambda: self._rendered(plain, limits.characters), limits):
                return False
        with suppress(BadTemplateError):
            return _PROBE_TEXT in _limited(lambda: self._rendered(listed, limits.characters), limits)
        return False

    def render(
        self,
        messages: Sequence[Message],
        control: ControlTexts,
        *,
        thinking: bool | None = None,
        tools: Sequence[Tool] = (),
    ) -> list[Part | Image]:
        """The prompt for the assistant's next turn.

        Ordinarily that is one part, tokenized as llama.cpp does it. Only where a message holds the text of a control
        token is the prompt cut: around that message's text the parts are tokenized as plain text. A template that
        refuses system prompts gets it at the beginning of the first question, as in llama.cpp.

        Args:
            messages: the conversation.
            control: what the tokenizer would turn into control tokens.
            thinking: whether the model is to think first; None leaves it to the template.
            tools: what the model may call.

        Raises:
            BadTemplateError: the template fails, refuses the conversation, or asks for too much.
        """
        wishes = {} if thinking is None else {"enable_thinking": thinking}
        messages, pictures = marked(messages)
        if not tools and all(message.role != "tool" and not message.tool_calls for message in messages):
            pass
        elif self._own_syntax is None:
            messages, tools = in_text(messages, tools), ()
        elif self._own_syntax in (MISTRAL, MISTRAL_ARGS):
            messages = for_mistral(messages)
        try:
            parts = self._parts(messages, tools, control, wishes)
        except BadTemplateError as error:
            merged = _system_in_question(messages)
            if error.what != _REFUSES or merged is None:
                raise
            try:
                parts = self._parts(merged, tools, control, wishes)
            except BadTemplateError:
                raise error from None
        return _with_images(parts, pictures)

    def _parts(
        self, messages: Sequence[Message], tools: Sequence[Tool], control: ControlTexts, wishes: dict[str, Any]
    ) -> list[Part]:
        mask = _Mask(texts(messages, tools), control)
        data = [message_data(message, mask.hide) for message in messages]
        if self._wants_lists:
            data = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in data]
        has_calls = any(message.tool_calls for message in messages)
        given = {**wishes, "messages": with_responses(data) if has_calls and self._own_syntax is GEMMA else data}
        if tools:
            given["tools"] = [tool_data(tool, mask.hide) for tool in tools]
        limits = RenderLimits.of(messages, tools)
        return mask.parts(_limited(lambda: self._rendered(given, limits.characters), limits))

    def _rendered(self, given: dict[str, Any], most: int) -> str:
        pieces: list[str] = []
        size = 0
        for piece in self._template.generate(
            bos_token=self._bos, eos_token=self._eos, add_generation_prompt=True, **given
        ):
            size += len(piece)
            if size > most:
                raise BadTemplateError("the chat template's output has no end")
            pieces.append(piece)
        return "".join(pieces)


class ControlTexts:
    """Texts that the tokenizer would turn into control tokens, prepared for searching."""

    def __init__(self, texts: Iterable[str]) -> None:
        known = sorted(set(texts) - {""})
        self.pattern = re.compile(_longest_of(known) if known else r"(?!)")
        self._longest = max(map(len, known), default=0)
        self._beginnings = {text[:size] for text in known for size in range(1, len(text))}
        self._endings = {text[-size:] for text in known for size in range(1, len(text))}

    def may_join(self, content: str) -> bool:
        """Whether a control text could arise where this content meets the text around it."""
        sizes = range(1, self._longest)
        return any(content[-size:] in self._beginnings or content[:size] in self._endings for size in sizes)


def _longest_of(texts: list[str], depth: int = 20) -> str:
    """A pattern for the longest of some sorted texts that stands somewhere, which is how llama.cpp looks for them.

    Texts that begin alike share that beginning in the pattern: a vocabulary may have thousands of them.
    """
    if depth == 0:
        return "(?:" + "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) + ")"
    branches = []
    for _, group in groupby(filter(None, texts), key=lambda text: text[0]):
        alike = [*group]
        beginning = commonprefix([alike[0], alike[-1]])  # noqa: RUF071 - of texts, not paths
        rests = [text[len(beginning) :] for text in alike]
        branches.append(re.escape(beginning) + (_longest_of(rests, depth - 1) if rests != [""] else ""))
    return f"(?:{'|'.join(branches)})" + ("?" if "" in texts else "")


class _Mask:
    """Hides control texts inside messages behind single private characters while the template runs.

    The template sees the messages unchanged but for these characters, so what it tests, trims or splits works;
    whatever looks like a control token in its output is its own. A message whose edge could complete a control token
    together with the template's text gets an invisible guard there.
    """

    _PRIVATE = range(0x100000, 0x10FFFE)  # plane 16, private use: no tokenizer gives it a meaning
    _GUARD = ""

    def __init__(self, contents: Sequence[str], control: ControlTexts) -> None:
        self._control = control
        found = {text for content in contents for text in control.pattern.findall(content)}
        self._characters: dict[str, str] = {}
        if found or any(control.may_join(content.strip()) for content in contents):
            used = set().union(*contents)
            free = (chr(code) for code in self._PRIVATE if chr(code) not in used)
            hidden = [self._GUARD, *sorted(found)]
            self._characters = dict(zip(hidden, free, strict=False))
            if len(self._characters) < len(hidden):
                raise UsageError("the conversation uses up all private characters of Unicode")
        self._texts = {character: text for text, character in self._characters.items()}
        self._hidden = re.compile(f"[{''.join(self._texts)}]" if self._texts else "(?!)")

    def hide(self, content: str) -> str:
        """The content as the template may see it."""
        if not self._characters:
            return content
        content = self._control.pattern.sub(lambda match: self._characters[match[0]], content)
        text = content.strip()
        if not self._control.may_join(text):
            return content
        start = content.index(text)
        guard = self._characters[self._GUARD]
        return f"{content[:start]}{guard}{text}{guard}{content[start + len(text) :]}"

    def parts(self, text: str) -> list[Part]:
        """Cut the rendered prompt: hidden texts come back, and only the template's own control texts are special."""
        if not self._texts:
            return [Part(text, True)]
        parts: list[Part] = []
        position = 0
        for match in self._control.pattern.finditer(text):
            parts += self._plain(text[position : match.start()])
            parts.append(Part(match[0], True))
            position = match.end()
        return _merged(parts + self._plain(text[position:]))

    def _plain(self, text: str) -> list[Part]:
        """A stretch between control tokens: plain text if anything was hidden in it."""
        shown = self._hidden.sub(lambda match: self._texts[match[0]], text)
        return [Part(shown, shown == text)] if text else []


def _with_images(parts: list[Part], pictures: dict[str, Image]) -> list[Part | Image]:
    """The parts, cut where characters stand for pictures.

    Raises:
        BadTemplateError: the template left one out.
    """
    if not pictures:
        return [*parts]
    found = [
        (piece, part.special) for part in parts for piece in re.split(f"([{''.join(pictures)}])", part.text) if piece
    ]
    if not {*pictures} <= {piece for piece, _ in found}:
        raise BadTemplateError("the chat template leaves a picture out", hint="another one goes with --template")
    return [pictures.get(piece) or Part(piece, special) for piece, special in found]


def _merged(parts: list[Part]) -> list[Part]:
    """Neighbours of one kind as one part: the tokenizer should see as much at once as it may."""
    merged: list[Part] = []
    for part in parts:
        if merged and merged[-1].special == part.special:
            merged[-1] = Part(merged[-1].text + part.text, part.special)
        else:
            merged.append(part)
    return merged


def _system_in_question(messages: Sequence[Message]) -> list[Message] | None:
    """The conversation with its system prompt at the beginning of the first question; None if it has not both."""
    if [message.role for message in messages[:2]] != ["system", "user"]:
        return None
    system, question = messages[:2]
    return [Message("user", f"{system.content}\n{question.content}"), *messages[2:]]


def _environment() -> Any:
    runtime, extensions = import_submodule("jinja2", "runtime"), import_submodule("jinja2", "ext")
    environment = _sandbox(import_submodule("jinja2", "sandbox"))(
        trim_blocks=True, lstrip_blocks=True, extensions=[extensions.loopcontrols, _generation_tag(extensions)]
    )
    environment.filters["tojson"] = _to_json
    environment.filters["round"] = _modest_round(environment.filters["round"])
    # Some templates ask for "tools is not none" and some loop over tools unasked; where there are none, both are right.
    environment.tests["none"] = lambda value: value is None or isinstance(value, runtime.Undefined)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    # Older names of the date and of a list of no tools, as llama.cpp gives them.
    environment.globals["date_string"] = _strftime_now("%d %b %Y")
    environment.globals["datetime"] = _strftime_now("%b %d %Y")
    environment.globals["functions"] = ""
    del environment.globals["lipsum"]  # makes text without end
    return environment


def _sandbox(sandbox: Any) -> Any:
    """Jinja's sandbox, which in addition refuses arithmetic that would not end."""

    class Sandbox(sandbox.ImmutableSandboxedEnvironment):  # type: ignore[misc]  # known only now
        intercepted_binops = frozenset(["**", "*", "//", "%", "/"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            bits = [value.bit_length() for value in (left, right) if isinstance(value, int)]
            if operator == "**" and len(bits) == 2:
                bits.append(bits[0] * max(right, 0))
            if any(size > MAX_BITS for size in bits):
                raise BadTemplateError("the chat template computes with too large numbers")
            return self.binop_table[operator](left, right)

    return Sandbox


def _modest_round(jinjas: Callable[..., Any]) -> Callable[..., Any]:
    """Jinja's filter, which computes ten to the power of whatever it is asked for."""

    def modest(value: Any, precision: int = 0, method: Any = "common") -> Any:
        return jinjas(value, max(-300, min(precision, 300)), method)

    return modest


def _generation_tag(extensions: Any) -> Any:
    """The `{% generation %}` block of Hugging Face templates, which marks the assistant's text for training."""

    class Generation(extensions.Extension):  # type: ignore[misc]  # known only now
        tags = {"generation"}  # noqa: RUF012 - Jinja's own name and type

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Hugging Face's filter, which does not escape HTML as Jinja's own does."""
    import json

    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise BadTemplateError(_REFUSES, why=_line(message))


def _strftime_now(layout: str) -> str:
    if len(layout) > MAX_DATE_CHARACTERS:
        raise BadTemplateError("the chat template asks for too long a date")
    return datetime.now().strftime(layout)


def _line(text: object) -> str:
    return " ".join(str(text).split())[:500]


class _OverdueError(BaseException):
    """Time is up. No Exception: Jinja catches those in constant expressions and goes on."""


def _limited(work: Callable[[], _Result], limits: RenderLimits) -> _Result:
    """Do what a template asks for within the limits; whatever it does wrong becomes BadTemplateError."""
    try:
        with _memory_limit(limits.n_bytes):
            return _in_time(work, limits.seconds)
    except BadTemplateError:
        raise
    except MemoryError:
        raise BadTemplateError("the chat template asks for too much memory") from None
    except _OverdueError:
        raise BadTemplateError(
            f"the chat template takes longer than {limits.seconds:.3g} seconds",
            hint="another one goes with --template",
        ) from None
    except Exception as error:  # a template can raise anything Python has
        why = _line(f"{type(error).__name__}: {error}")
        raise BadTemplateError("the chat template fails", why=why, hint="another one goes with --template") from error


def _in_time(work: Callable[[], _Result], seconds: float) -> _Result:
    """Interrupt what takes too long, as soon as it is back in Python; the interruption may come as late as in here.

    What counts is this thread's processor time: on a busy machine a template that is quick may wait for long.
    """
    if threading.current_thread() is not threading.main_thread():  # signals reach the main thread only
        return work()
    end = time.thread_time() + seconds

    def interrupt(number: int, frame: FrameType | None) -> None:
        left = end - time.thread_time()
        if left <= 0:
            raise _OverdueError
        signal.setitimer(signal.ITIMER_REAL, max(left, _LEAST_SECONDS))

    handler = signal.signal(signal.SIGALRM, interrupt)
    before = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return work()
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)
        signal.signal(signal.SIGALRM, handler)


@contextmanager
def _memory_limit(n_bytes: int) -> Iterator[None]:
    """Cap what a template may allocate, where the system can (Linux)."""
    try:
        import resource
        from pathlib import Path

        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        yield
        return
    limits = resource.getrlimit(resource.RLIMIT_AS)
    wanted = pages * resource.getpagesize() + n_bytes
    if limits[1] != resource.RLIM_INFINITY:
        wanted = min(wanted, limits[1])
    resource.setrlimit(resource.RLIMIT_AS, (wanted, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
