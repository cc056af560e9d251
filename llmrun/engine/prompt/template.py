"""Rendering of a conversation to prompt parts, with the model's own chat template in sandboxed Jinja.

Owns the rule that text of users and models never becomes control tokens; must not know tokens. A template is untrusted:
it runs in Jinja's ImmutableSandboxedEnvironment, with limits of time, memory, numbers and output. The front kills this
process if a template blocks in C code, where these limits don't apply.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property
from itertools import groupby
from os.path import commonprefix
from types import FrameType
from typing import Any, NamedTuple, NoReturn, TypeVar

from llmrun.engine.llama.submodules import import_submodule
from llmrun.engine.prompt.conversation import TemplateRules, fit
from llmrun.engine.prompt.images import with_placeholders
from llmrun.engine.prompt.tools import (
    OTHERS,
    PROBE,
    PROBE_TOOL,
    collect_texts,
    for_mistral,
    in_text,
    message_data,
    syntax_in,
    tool_data,
    with_responses,
)
from llmrun.errors import BadTemplateError, UsageError
from llmrun.protocol.messages import Image, Message, Tool
from llmrun.protocol.rendering import characters, rendering_share
from llmrun.protocol.toolcalls import GEMMA, MISTRAL, MISTRAL_ARGS, Syntax

_Result = TypeVar("_Result")

MAX_TEMPLATE_CHARACTERS = 128 * 1024  # Eight times the longest real one; compiling can't be interrupted
MAX_PROMPT_CHARACTERS = 16 * 1024 * 1024
MAX_RENDER_BYTES = 256 * 1024 * 1024
MAX_RENDER_SECONDS = 1.5  # Real templates take milliseconds. Less than the front's timeout, which kills the engine
_MIN_SECONDS = 0.01  # between two checks of the time
MAX_BITS = 64 * 1024  # Of an integer: arithmetic with longer ones can take hours and can't be interrupted
MAX_DATE_CHARACTERS = 1024  # Of a date format: strftime can't be interrupted

_REFUSES = "the chat template refuses this conversation"
_FAILS = "the chat template fails"
_PROBE_TEXT = "Is this said?"
_OTHER_TEMPLATE = "choose another template with --template"

NAMED = {
    # The most common one, for models without a template.
    "chatml": (
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
}
"""Templates that can be chosen by name."""


class RenderLimits(NamedTuple):
    """The resource limits of one rendering."""

    characters: int
    n_bytes: int
    seconds: float

    @classmethod
    def of(cls, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> RenderLimits:
        """Return limits for a conversation, of which a template makes a few copies."""
        size = characters(messages, tools)
        return cls(
            MAX_PROMPT_CHARACTERS + 4 * size,
            MAX_RENDER_BYTES + 32 * size,
            MAX_RENDER_SECONDS + rendering_share(messages, tools),
        )


class Part(NamedTuple):
    """A section of the prompt; unless special, control texts in it are tokenized as plain text."""

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
            why = f"the maximum is {MAX_TEMPLATE_CHARACTERS:,}"
            raise BadTemplateError(f"the chat template has {len(source):,} characters", why=why)
        self._source = source
        self._bos = bos
        self._eos = eos
        # Limited here too, because Jinja evaluates constant expressions when it compiles.
        self._template = _limited(lambda: _environment().from_string(source), RenderLimits.of(()))

    @property
    def syntax(self) -> Syntax:
        """The syntax of the model's tool calls."""
        return self._own_syntax or OTHERS

    @cached_property
    def _own_syntax(self) -> Syntax | None:
        """The syntax in which the template writes calls; None if it has none."""
        variables = {
            "messages": [message_data(message, str) for message in PROBE],
            "tools": [tool_data(PROBE_TOOL, str)],
        }
        return syntax_in(self._trial(variables))

    @cached_property
    def _needs_lists(self) -> bool:
        """The template only accepts contents that are lists of parts, as those of some vision models do."""
        if "type" not in self._source or "'text'" not in self._source.replace('"', "'"):
            return False
        plain = {"messages": [{"role": "user", "content": _PROBE_TEXT}]}
        listed = {"messages": [{"role": "user", "content": [{"type": "text", "text": _PROBE_TEXT}]}]}
        return _PROBE_TEXT not in self._trial(plain) and _PROBE_TEXT in self._trial(listed)

    @cached_property
    def _rules(self) -> TemplateRules:
        return TemplateRules(lambda messages, tools: self._trial(self._variables(*self._fitted(messages, tools), str)))

    def _trial(self, variables: dict[str, Any]) -> str:
        """Return the output for a short conversation; "" if the template refuses it or fails.

        Raises:
            BadTemplateError: the template exceeds a limit. On a busy machine that says nothing about the template.
        """
        limits = RenderLimits.of(())
        try:
            return _limited(lambda: self._generate(variables, limits.characters), limits)
        except BadTemplateError as error:
            if error.what not in (_REFUSES, _FAILS):
                raise
            return ""

    def render(
        self,
        messages: Sequence[Message],
        control: ControlTexts,
        *,
        thinking: bool | None = None,
        tools: Sequence[Tool] = (),
    ) -> list[Part | Image]:
        """Render the prompt for the assistant's next turn.

        Usually the prompt is one part, tokenized as in llama.cpp. If a message contains the text of a control token,
        that text becomes a part which is tokenized as plain text. A conversation that the template does not take is
        rewritten, see llmrun.engine.prompt.conversation.

        Args:
            messages: the conversation.
            control: texts that the tokenizer turns into control tokens.
            thinking: the template's enable_thinking; None leaves it undefined.
            tools: the tools that the model may call.

        Raises:
            BadTemplateError: the template fails, refuses the conversation, or exceeds a limit.
        """
        options = {} if thinking is None else {"enable_thinking": thinking}
        messages, images = with_placeholders(messages)
        return _with_images(self._parts(*self._fitted(messages, tools, self._rules), control, options), images)

    def _fitted(
        self, messages: Sequence[Message], tools: Sequence[Tool], rules: TemplateRules | None = None
    ) -> tuple[Sequence[Message], Sequence[Tool]]:
        """Return the conversation and the tools as the template takes them; a trial has no rules yet."""
        has_calls = bool(tools) or any(message.role == "tool" or message.tool_calls for message in messages)
        if has_calls and self._own_syntax is None:
            messages, tools = in_text(messages, tools), ()
        if rules is not None:
            messages = fit(messages, rules)
        if has_calls and self._own_syntax in (MISTRAL, MISTRAL_ARGS):
            messages = for_mistral(messages)
        return messages, tools

    def _parts(
        self, messages: Sequence[Message], tools: Sequence[Tool], control: ControlTexts, options: dict[str, Any]
    ) -> list[Part]:
        mask = _Mask(collect_texts(messages, tools), control)
        variables = options | self._variables(messages, tools, mask.hide)
        limits = RenderLimits.of(messages, tools)
        return mask.parts(_limited(lambda: self._generate(variables, limits.characters), limits))

    def _variables(
        self, messages: Sequence[Message], tools: Sequence[Tool], hide: Callable[[str], str]
    ) -> dict[str, Any]:
        data = [message_data(message, hide) for message in messages]
        if self._needs_lists:
            data = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in data]
        has_calls = any(message.tool_calls for message in messages)
        variables = {"messages": with_responses(data) if has_calls and self._own_syntax is GEMMA else data}
        return variables | ({"tools": [tool_data(tool, hide) for tool in tools]} if tools else {})

    def _generate(self, variables: dict[str, Any], max_characters: int) -> str:
        pieces: list[str] = []
        size = 0
        for piece in self._template.generate(
            bos_token=self._bos, eos_token=self._eos, add_generation_prompt=True, **variables
        ):
            size += len(piece)
            if size > max_characters:
                raise BadTemplateError("the chat template's output is endless")
            pieces.append(piece)
        return "".join(pieces)


class ControlTexts:
    """A search for texts that the tokenizer turns into control tokens."""

    def __init__(self, texts: Iterable[str]) -> None:
        control = sorted(set(texts) - {""})
        self.pattern = re.compile(_longest_of(control) if control else r"(?!)")
        self._longest = max(map(len, control), default=0)
        self._prefixes = {text[:size] for text in control for size in range(1, len(text))}
        self._suffixes = {text[-size:] for text in control for size in range(1, len(text))}

    def may_continue(self, content: str) -> bool:
        """Return whether the end of this content is the beginning of a control text."""
        return any(content[-size:] in self._prefixes for size in range(1, self._longest))

    def may_join(self, content: str) -> bool:
        """Return whether this content and the text around it could form a control text together."""
        sizes = range(1, self._longest)
        return any(content[-size:] in self._prefixes or content[:size] in self._suffixes for size in sizes)


def _longest_of(texts: list[str], depth: int = 20) -> str:
    """Return a pattern for the longest match of some sorted texts, as llama.cpp searches them.

    Common prefixes are factored out, because a vocabulary may have thousands of control tokens.
    """
    if depth == 0:
        return "(?:" + "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) + ")"
    branches = []
    for _, group in groupby(filter(None, texts), key=lambda text: text[0]):
        members = [*group]
        prefix = commonprefix([members[0], members[-1]])  # noqa: RUF071 - of texts, not paths
        rests = [text[len(prefix) :] for text in members]
        branches.append(re.escape(prefix) + (_longest_of(rests, depth - 1) if rests != [""] else ""))
    return f"(?:{'|'.join(branches)})" + ("?" if "" in texts else "")


class _Mask:
    """A replacement of control texts in messages by single private characters while the template runs.

    The rest of the messages is unchanged, so that a template can test, trim or split them. All control texts in the
    output are then the template's own. A message gets invisible guards around it if its edge could form a control text
    with the template's text.
    """

    _PRIVATE = range(0x100000, 0x10FFFE)  # plane 16, private use: no tokenizer has special tokens there
    _GUARD = ""

    def __init__(self, contents: Sequence[str], control: ControlTexts) -> None:
        self._control = control
        matches = {text for content in contents for text in control.pattern.findall(content)}
        self._characters: dict[str, str] = {}
        if matches or any(control.may_join(content.strip()) for content in contents):
            used = set().union(*contents)
            free = (chr(code) for code in self._PRIVATE if chr(code) not in used)
            hidden = [self._GUARD, *sorted(matches)]
            self._characters = dict(zip(hidden, free, strict=False))
            if len(self._characters) < len(hidden):
                raise UsageError("the conversation uses up all private characters of Unicode")
        self._texts = {character: text for text, character in self._characters.items()}
        self._hidden = re.compile(f"[{''.join(self._texts)}]" if self._texts else "(?!)")

    def hide(self, content: str) -> str:
        """Replace the control texts of a content, and guard its edges."""
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
        """Split the rendered prompt into the template's control texts, which are special, and restored plain texts."""
        if not self._texts:
            return [Part(text, True)]
        parts: list[Part] = []
        position = 0
        for match in self._control.pattern.finditer(text):
            parts += self._restore(text[position : match.start()])
            parts.append(Part(match[0], True))
            position = match.end()
        return _merge(parts + self._restore(text[position:]))

    def _restore(self, text: str) -> list[Part]:
        """Return a text between control texts; it is special unless something was hidden in it."""
        restored = self._hidden.sub(lambda match: self._texts[match[0]], text)
        return [Part(restored, restored == text)] if text else []


def _with_images(parts: list[Part], images: dict[str, Image]) -> list[Part | Image]:
    """Split the parts at placeholders of images.

    Raises:
        BadTemplateError: the template's output lacks one.
    """
    if not images:
        return [*parts]
    pieces = [
        (piece, part.special) for part in parts for piece in re.split(f"([{''.join(images)}])", part.text) if piece
    ]
    if not {*images} <= {piece for piece, _ in pieces}:
        raise BadTemplateError("the chat template omits an image", hint=_OTHER_TEMPLATE)
    return [images.get(piece) or Part(piece, special) for piece, special in pieces]


def _merge(parts: list[Part]) -> list[Part]:
    """Join adjacent parts of one kind, so that the tokenizer sees as much text at once as possible."""
    merged: list[Part] = []
    for part in parts:
        if merged and merged[-1].special == part.special:
            merged[-1] = Part(merged[-1].text + part.text, part.special)
        else:
            merged.append(part)
    return merged


def _environment() -> Any:
    runtime, extensions = import_submodule("jinja2", "runtime"), import_submodule("jinja2", "ext")
    environment = _sandbox(import_submodule("jinja2", "sandbox"))(
        trim_blocks=True, lstrip_blocks=True, extensions=[extensions.loopcontrols, _generation_tag(extensions)]
    )
    environment.filters["tojson"] = _to_json
    environment.filters["round"] = _limited_round(environment.filters["round"])
    # Some templates test "tools is not none", others loop over undefined tools: undefined has to satisfy both.
    environment.tests["none"] = lambda value: value is None or isinstance(value, runtime.Undefined)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    # Older names of the date and of an empty list of tools, as in llama.cpp.
    environment.globals["date_string"] = _strftime_now("%d %b %Y")
    environment.globals["datetime"] = _strftime_now("%b %d %Y")
    environment.globals["functions"] = ""
    del environment.globals["lipsum"]  # generates unlimited text
    return environment


def _sandbox(sandbox: Any) -> Any:
    """Return Jinja's sandbox class with a limit for numbers."""

    class Sandbox(sandbox.ImmutableSandboxedEnvironment):  # type: ignore[misc]  # imported lazily
        intercepted_binops = frozenset(["**", "*", "//", "%", "/"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            bits = [value.bit_length() for value in (left, right) if isinstance(value, int)]
            if operator == "**" and len(bits) == 2:
                bits.append(bits[0] * max(right, 0))
            if any(size > MAX_BITS for size in bits):
                raise BadTemplateError("the chat template uses too large numbers")
            return self.binop_table[operator](left, right)

    return Sandbox


def _limited_round(original: Callable[..., Any]) -> Callable[..., Any]:
    """Limit the precision of Jinja's filter, which computes 10 to the power of it."""

    def limited(value: Any, precision: int = 0, method: Any = "common") -> Any:
        return original(value, max(-300, min(precision, 300)), method)

    return limited


def _generation_tag(extensions: Any) -> Any:
    """Return an extension for `{% generation %}`, which marks the assistant's text for training in Hugging Face's."""

    class Generation(extensions.Extension):  # type: ignore[misc]  # imported lazily
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
    """Return JSON as Hugging Face's filter does: without HTML escapes, unlike Jinja's own."""
    import json

    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise BadTemplateError(_REFUSES, why=_line(message))


def _strftime_now(layout: str) -> str:
    if len(layout) > MAX_DATE_CHARACTERS:
        raise BadTemplateError("the chat template uses too long a date format")
    return datetime.now().strftime(layout)


def _line(text: object) -> str:
    return " ".join(str(text).split())[:500]


class _OverdueError(BaseException):
    """A timeout. Not an Exception, because Jinja ignores those in constant expressions."""


def _limited(work: Callable[[], _Result], limits: RenderLimits) -> _Result:
    """Run a template's code within the limits, and turn all of its errors into BadTemplateError."""
    try:
        with _memory_limit(limits.n_bytes):
            return _in_time(work, limits.seconds)
    except BadTemplateError:
        raise
    except MemoryError:
        raise BadTemplateError("the chat template needs too much memory") from None
    except _OverdueError:
        what = f"the chat template takes longer than {limits.seconds:.3g} seconds"
        raise BadTemplateError(what, hint=_OTHER_TEMPLATE) from None
    except Exception as error:  # a template can raise any of Python's
        why = _line(f"{type(error).__name__}: {error}")
        raise BadTemplateError(_FAILS, why=why, hint=_OTHER_TEMPLATE) from error


def _in_time(work: Callable[[], _Result], seconds: float) -> _Result:
    """Run code with a timeout, which takes effect when Python code runs next, perhaps only in this function.

    The limit is this thread's processor time, because a quick template may wait for long on a busy machine.
    """
    if threading.current_thread() is not threading.main_thread():  # signals reach the main thread only
        return work()
    end = time.thread_time() + seconds
    is_running = True

    def interrupt(number: int, frame: FrameType | None) -> None:
        remaining = end - time.thread_time()
        if remaining <= 0:
            raise _OverdueError
        if is_running:  # else the timer would outlive this handler, and kill the process
            signal.setitimer(signal.ITIMER_REAL, max(remaining, _MIN_SECONDS))

    handler = signal.signal(signal.SIGALRM, interrupt)
    before = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return work()
    finally:
        is_running = False
        signal.setitimer(signal.ITIMER_REAL, *before)
        signal.signal(signal.SIGALRM, handler)


@contextmanager
def _memory_limit(n_bytes: int) -> Iterator[None]:
    """Limit the memory that a template may allocate (on Linux)."""
    try:
        import resource
        from pathlib import Path

        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        yield
        return
    limits = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + n_bytes
    if limits[1] != resource.RLIM_INFINITY:
        limit = min(limit, limits[1])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
