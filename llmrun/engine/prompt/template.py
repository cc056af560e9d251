"""Rendering of a conversation to prompt parts, with the model's own chat template in sandboxed Jinja.

Must not know tokens. A template is untrusted: it runs in Jinja's sandbox, with limits of time, numbers, texts and
output. The front kills this process if a template blocks in C code, where these limits don't apply.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import cached_property, lru_cache, partial
from types import FrameType
from typing import Any, NamedTuple, TypeVar

from llmrun.engine.llama.base import ALLOCATING
from llmrun.engine.prompt.call_syntax import find_syntax, for_vocabulary, syntax_by_vocabulary
from llmrun.engine.prompt.control_texts import ControlTexts, Part, Placeholders
from llmrun.engine.prompt.conversation import TemplateRules, fit
from llmrun.engine.prompt.sandbox import (
    OTHER_TEMPLATE,
    REFUSES,
    CompiledTemplate,
    dates,
    one_line,
)
from llmrun.engine.prompt.thinking import find_reasoning, known_reasoning
from llmrun.engine.prompt.tools import (
    PROBE_TOOL,
    ToolForm,
    ToolSupport,
    as_text,
    collect_texts,
    data_of,
    find_support,
    in_text,
    message_data,
    tool_data,
    with_ids,
    with_responses,
    with_simple_schema,
)
from llmrun.errors import BadTemplateError
from llmrun.protocol.arguments import EFFORTS
from llmrun.protocol.media import Media
from llmrun.protocol.messages import Message, Rewriting, Tool, characters, rendering_share
from llmrun.protocol.reasoning import ReasoningSyntax
from llmrun.protocol.toolcalls import HARMONY, HARMONY_AS_TOLD, HERMES, CallSyntax

_Result = TypeVar("_Result")

MAX_TEMPLATE_CHARACTERS = 128 * 1024  # Eight times the longest real one; compiling can't be interrupted
MAX_PROMPT_CHARACTERS = 16 * 1024 * 1024
MAX_RENDER_SECONDS = 1.5  # of processor time; real templates take milliseconds. Half of what the front allows
MAX_GROWTH_BYTES = 256 * 1024 * 1024  # of the process while a template runs for more than a moment
_MIN_SECONDS = 0.01  # between two checks of the time
_POLL_SECONDS = 0.02  # between two checks of the memory

_FAILS = "the chat template fails"
_PROBE_TEXT = "Is this said?"
_QUESTION, _REASONED = Message("user", "Is it?"), Message("assistant", "It is.", reasoning=_PROBE_TEXT)
_EFFORT_VARIABLES = ("reasoning_effort", "reasoning_strength", "thinking_effort")
_REASONED_AGAIN = Message("assistant", "It is still.", reasoning="It was.")

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
    seconds: float

    @classmethod
    def of(cls, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> RenderLimits:
        """Return limits for a conversation, of which a template makes a few copies."""
        size = characters(messages, tools)
        return cls(
            MAX_PROMPT_CHARACTERS + 4 * size,
            MAX_RENDER_SECONDS + rendering_share(messages, tools),
        )


class ReasoningSwitch(NamedTuple):
    """The variable of a template that decides about the reasoning of earlier turns."""

    name: str
    kept: Any  # the value that keeps it
    dropped: Any  # the one that leaves it out
    tags: (
        ReasoningSyntax | None
    )  # around reasoning in the content, as LFM2.5's template takes it; None if it stands apart


@lru_cache(maxsize=1)
def compile_template(source: str) -> CompiledTemplate:
    """Compile a template. The last one is kept: the engine compiles a model's before the first request.

    Raises:
        BadTemplateError: it does not compile.
    """
    if len(source) > MAX_TEMPLATE_CHARACTERS:
        why = f"the maximum is {MAX_TEMPLATE_CHARACTERS:,}"
        raise BadTemplateError(f"the chat template has {len(source):,} characters", why=why)
    # Limited too, because Jinja evaluates constant expressions when it compiles.
    return _limited(lambda: CompiledTemplate(source), RenderLimits.of(()))


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: Jinja text, as in the GGUF key tokenizer.chat_template.
        bos: text of the begin-of-sequence token.
        eos: text of the end-of-sequence token.
        control: texts of the vocabulary's control tokens.
        ends: texts of those that end an answer.

    Attributes:
        source: as given.

    Raises:
        BadTemplateError: it does not compile.
    """

    def __init__(
        self, source: str, *, bos: str, eos: str, control: Collection[str] = (), ends: Sequence[str] = ()
    ) -> None:
        self.source = source
        self._bos = bos
        self._eos = eos
        self._control_texts, self._ends = control, ends or (eos,)
        self._reported: set[Rewriting] = set()
        self._template = compile_template(source)

    @cached_property
    def syntax(self) -> CallSyntax:
        """The syntax of the model's tool calls."""
        found = None
        if self._support.calls:
            end = self.reasoning.end if self.reasoning is not None else ""
            found = find_syntax(partial(self._render_trial, form=self._support.form), end)
        if HARMONY.lead in self.source or (found is not None and HARMONY_AS_TOLD in found.begin + str(found.call[0])):
            return HARMONY
        found = found or syntax_by_vocabulary(self._control_texts, self.source) or HERMES
        return for_vocabulary(found, self._control_texts, self._ends)

    @cached_property
    def reasoning(self) -> ReasoningSyntax | None:
        """The syntax of the model's reasoning; None if it does not reason."""
        return find_reasoning(self.source, self._render_trial, self._ends)

    @cached_property
    def lead(self) -> str:
        """The text that the model writes before an answer, e.g. its receiver; "" if it reasons, or for none."""
        if self.reasoning is not None:
            return ""
        asked = self._render_trial((_QUESTION,))
        whole = self._render_trial((_QUESTION, Message("assistant", _PROBE_TEXT)), begins=False)
        lead = whole.removeprefix(asked).partition(_PROBE_TEXT)[0] if whole.startswith(asked) else ""
        return lead if lead.strip() else ""

    @cached_property
    def _support(self) -> ToolSupport:
        """The parts of tools that the template writes. A role that it only copies is none that the model knows."""
        found = find_support(self._render_trial, (PROBE_TOOL,), knows_responses="tool_responses" in self.source)
        return found._replace(results=found.results and (found.calls or found.tools))

    @cached_property
    def _support_of_history(self) -> ToolSupport:
        """The parts of earlier calls that the template writes where no tools are given any more."""
        found = find_support(self._render_trial, (), knows_responses="tool_responses" in self.source)
        return found._replace(results=found.results and (found.calls or self._support.tools))

    @cached_property
    def _needs_lists(self) -> bool:
        """The template only accepts contents that are lists of parts, as those of some vision models do."""
        if "type" not in self.source or "'text'" not in self.source.replace('"', "'"):
            return False
        plain = {"messages": [{"role": "user", "content": _PROBE_TEXT}]}
        listed = {"messages": [{"role": "user", "content": [{"type": "text", "text": _PROBE_TEXT}]}]}
        return _PROBE_TEXT not in self._trial(plain) and _PROBE_TEXT in self._trial(listed)

    @cached_property
    def _has_thinking_parts(self) -> bool:
        """The template takes reasoning only as a part of the content, as Mistral's do."""
        answer = message_data(Message("assistant", "It is.", reasoning=_PROBE_TEXT), str)
        question = {"role": "user", "content": "Is it?"}
        plain, listed = ({"messages": [question, each, question]} for each in (answer, _with_thinking_part(answer)))
        if _PROBE_TEXT in self._trial(plain):
            return False
        prompt = self._trial(listed)
        return _PROBE_TEXT in prompt and "type" not in prompt  # else the template prints the part as data

    def _with_reasoning(self, message: dict[str, Any], tags: ReasoningSyntax | None) -> dict[str, Any]:
        """Return a message with its reasoning where the template takes it."""
        if tags is not None:
            return _with_reasoning_in_content(message, tags)
        return _with_thinking_part(message) if self._has_thinking_parts else message

    @cached_property
    def _effort_variable(self) -> str | None:
        return next((name for name in _EFFORT_VARIABLES if name in self.source), None)

    @cached_property
    def _efforts(self) -> list[str]:
        """The reasoning efforts that the template takes, "none" only if it names that."""
        if self._effort_variable is None:
            return []
        common, quoted = ("low", "medium", "high"), self.source.replace('"', "'")
        efforts = [effort for effort in EFFORTS if effort in common or f"'{effort}'" in quoted]
        variables = {"messages": [{"role": "user", "content": _PROBE_TEXT}], **_thinking_variables(True)}
        return [name for name in efforts if name == "none" or self._trial({**variables, self._effort_variable: name})]

    def _nearest_effort(self, effort: str) -> str | None:
        """Return the nearest reasoning effort that the template takes; None if it takes none."""
        if effort in self._efforts or effort == "none":
            return effort if effort in self._efforts else None
        efforts = (known for known in self._efforts if known != "none")
        return min(efforts, key=lambda known: abs(EFFORTS.index(known) - EFFORTS.index(effort)), default=None)

    @cached_property
    def _reasoning_switch(self) -> ReasoningSwitch | None:
        """The variable that decides about the reasoning of earlier turns; None if the template has none."""
        tags = known_reasoning(self.source)
        return self._find_switch(None) or (None if tags is None else self._find_switch(tags))

    def _find_switch(self, tags: ReasoningSyntax | None) -> ReasoningSwitch | None:
        """Find the switch by trial renderings.

        Only variables with a telling name are tried: others show reasoning for other reasons, such as training. One
        that changes the first prompt too, such as thinking_mode, is more than that.

        Args:
            tags: around reasoning in the content; None if it stands apart.
        """
        question, *answers = (message_data(each, str) for each in (_QUESTION, _REASONED, _REASONED_AGAIN))
        answer, again = (self._with_reasoning(each, tags) for each in answers)
        for name in self._template.variables:
            is_telling = "think" in name or "reason" in name
            values = self._template.values(name) if is_telling and name not in _thinking_variables(True) else ()
            for thinking in (True, False) if values else ():
                options = _thinking_variables(thinking)
                first, later = {"messages": [question]}, {"messages": [question, answer, question, again, question]}
                prompts = {value: self._trial(later | options | {name: value}) for value in values}
                kept = [value for value, prompt in prompts.items() if _PROBE_TEXT in prompt]
                dropped = [value for value, prompt in prompts.items() if prompt and _PROBE_TEXT not in prompt]
                if not kept or not dropped:
                    continue
                each = options, *(options | {name: values[0]} for values in (kept, dropped))
                if len({self._trial(first | variables) for variables in each}) == 1:
                    return ReasoningSwitch(name, kept[0], dropped[0], tags)
        return None

    @cached_property
    def _rules(self) -> TemplateRules:
        return TemplateRules(
            lambda messages, tools: self._render_trial(*self._fitted(messages, tools)),
            lambda message: as_text(message, self.syntax),
        )

    def _render_trial(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        form: ToolForm | None = None,
        thinking: bool | None = None,
        begins: bool = True,
    ) -> str:
        """Render a short conversation; see tools.Render."""
        return self._trial(_thinking_variables(thinking) | self._variables(messages, tools, str, form), begins=begins)

    def _trial(self, variables: dict[str, Any], *, begins: bool = True) -> str:
        """Return the output for a short conversation; "" if the template refuses it or fails.

        Args:
            begins: with the beginning of the next answer.

        Raises:
            BadTemplateError: the template exceeds a limit. On a busy machine that says nothing about the template.
        """
        limits = RenderLimits.of(())
        try:
            return _limited(lambda: self._generate(variables, limits.characters, begins=begins), limits)
        except BadTemplateError as error:
            if error.what not in (REFUSES, _FAILS):
                raise
            return ""

    def new_rewritings(self) -> tuple[Rewriting, ...]:
        """Return what was rewritten in conversations and not returned before."""
        new = self._rules.rewritings - self._reported
        self._reported |= new
        return tuple(sorted(new))

    def render(
        self,
        messages: Sequence[Message],
        control: ControlTexts,
        *,
        thinking: bool | None = None,
        tools: Sequence[Tool] = (),
        effort: str | None = None,
        keep_reasoning: bool | None = None,
        variables: str = "{}",
    ) -> list[Part | Media]:
        """Render the prompt for the assistant's next turn.

        Usually the prompt is one part, tokenized as in llama.cpp. If a message contains the text of a control token,
        that text becomes a part which is tokenized as plain text. A conversation that the template does not take is
        rewritten, see llmrun.engine.prompt.conversation.

        Args:
            messages: the conversation.
            control: texts that the tokenizer turns into control tokens.
            thinking: the template's enable_thinking; None leaves it undefined.
            tools: the tools that the model may call.
            effort: the reasoning effort, see EFFORTS; the nearest one that the template knows.
            keep_reasoning: keep the reasoning of turns before the last question, or leave it out, where the template
                has a variable for it; None keeps it.
            variables: more variables of the template, a JSON object.

        Raises:
            BadTemplateError: the template fails, refuses the conversation, or exceeds a limit.
        """
        options = self._options(messages, thinking, effort, keep_reasoning)
        placeholders = Placeholders(collect_texts(messages, tools, variables), control)
        messages = placeholders.with_media(messages)
        limits = RenderLimits.of(messages, tools)

        def rendered(tools: Sequence[Tool], support: ToolSupport | None = None) -> list[Part | Media]:
            fitted, tools = self._fitted(messages, tools, self._rules, support, placeholders.keep)
            data = data_of(variables, placeholders.hide, keys=False) | self._variables(fitted, tools, placeholders.hide)
            return placeholders.parts(_limited(lambda: self._generate(options | data, limits.characters), limits))

        # Some templates fail at one type of parameters, or at one that is missing.
        for change in (None, with_simple_schema):
            try:
                return rendered(tools if change is None else [*map(change, tools)])
            except BadTemplateError as error:
                if not tools or error.what not in (REFUSES, _FAILS):
                    raise
        return rendered(tools, self._support_of_history._replace(tools=False))

    def _options(
        self, messages: Sequence[Message], thinking: bool | None, effort: str | None, keep_reasoning: bool | None
    ) -> dict[str, Any]:
        """Return the template's variables about reasoning, see render()."""
        options = _thinking_variables(thinking)
        if effort is not None and (nearest := self._nearest_effort(effort)) is not None:
            options[str(self._effort_variable)] = nearest
        has_answers = any(message.role == "assistant" for message in messages)  # else the search is not worth its time
        if has_answers and (switch := self._reasoning_switch) is not None:
            options[switch.name] = switch.dropped if keep_reasoning is False else switch.kept
        return options

    def _fitted(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        rules: TemplateRules | None = None,
        support: ToolSupport | None = None,
        keep: Callable[[str], str] = str,
    ) -> tuple[Sequence[Message], Sequence[Tool]]:
        """Return the conversation and the tools as the template takes them.

        Args:
            rules: a trial has none yet.
            keep: is applied to the texts of the syntax of calls.
        """
        has_calls = bool(tools) or any(message.role == "tool" or message.tool_calls for message in messages)
        if not has_calls:
            return (messages if rules is None else fit(messages, rules)), tools
        support = support or (self._support if tools else self._support_of_history)
        if not all(support[1 if tools else 2 :]):
            messages, tools = in_text(messages, tools, support, _map_texts(self.syntax, keep))
            if rules is not None:
                rules.rewritings.add("tools")
        if rules is not None:
            messages = fit(messages, rules)
        return messages, tools

    def _variables(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        hide: Callable[[str], str],
        form: ToolForm | None = None,
    ) -> dict[str, Any]:
        if form is None:
            has_calls = any(message.tool_calls or message.role == "tool" for message in messages)
            form = (self._support if tools else self._support_of_history).form if has_calls else ToolForm()
        data = [message_data(message, hide, form) for message in with_ids(messages, form.ids)]
        if self._needs_lists:
            data = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in data]
        if any(message.reasoning for message in messages):
            tags = self._reasoning_switch.tags if self._reasoning_switch is not None else None
            data = [self._with_reasoning(each, tags) for each in data]
        variables = {"messages": with_responses(data) if form.results_in_calls else data}
        return variables | ({"tools": [tool_data(tool, hide) for tool in tools]} if tools else {})

    def _generate(self, variables: dict[str, Any], max_characters: int, *, begins: bool = True) -> str:
        pieces: list[str] = []
        size = 0
        own = {"bos_token": self._bos, "eos_token": self._eos, "add_generation_prompt": begins}
        for piece in self._template.generate({**dates(), **variables, **own}):
            size += len(piece)
            if size > max_characters:
                raise BadTemplateError("the chat template's output is endless")
            pieces.append(piece)
        return "".join(pieces)


def _thinking_variables(thinking: bool | None) -> dict[str, Any]:
    return {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}


def _with_reasoning_in_content(message: dict[str, Any], tags: ReasoningSyntax) -> dict[str, Any]:
    """Return a message with its reasoning between tags at the beginning of its content."""
    if not message.get("reasoning_content") or not isinstance(message["content"], str | None):
        return message
    return {
        **message,
        "content": tags.opening + message["reasoning_content"] + tags.closing + (message["content"] or ""),
    }


def _with_thinking_part(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its reasoning as the first part of its content."""
    if not message.get("reasoning_content"):
        return message
    content = message["content"]
    rest = [{"type": "text", "text": content}] if isinstance(content, str) and content else content or []
    return {**message, "content": [{"type": "thinking", "thinking": message["reasoning_content"]}, *rest]}


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Apply a function to every text in a tuple of tuples."""
    if type(value) is str:
        return change(value)
    if not isinstance(value, tuple):
        return value
    changed = [_map_texts(each, change) for each in value]
    return type(value)(*changed) if hasattr(value, "_fields") else tuple(changed)


class _OverdueError(BaseException):
    """A timeout. Not an Exception, because Jinja ignores those in constant expressions."""


def _limited(work: Callable[[], _Result], limits: RenderLimits) -> _Result:
    """Run a template's code within the limits, and turn all of its errors into BadTemplateError."""
    try:
        return _in_time(work, limits.seconds)
    except BadTemplateError:
        raise
    except MemoryError:
        raise BadTemplateError("the chat template needs too much memory") from None
    except _OverdueError:
        what = f"the chat template takes longer than {limits.seconds:.3g} seconds"
        raise BadTemplateError(what, hint=OTHER_TEMPLATE) from None
    except Exception as error:  # a template can raise any of Python's
        why = one_line(f"{type(error).__name__}: {error}")
        raise BadTemplateError(_FAILS, why=why, hint=OTHER_TEMPLATE) from error


def _in_time(work: Callable[[], _Result], seconds: float) -> _Result:
    """Run code with a timeout, which takes effect when Python code runs next, perhaps only in this function.

    The limit is this thread's processor time, because a quick template may wait for long on a busy machine.
    """
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        return work()  # signals reach the main thread only, and Windows has no timers
    end, memory, n_ended = time.thread_time() + seconds, _own_bytes(), ALLOCATING.n_ended
    is_running = True

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal memory, n_ended
        remaining = end - time.thread_time()
        if remaining <= 0:
            raise _OverdueError
        now = _own_bytes()
        if ALLOCATING.n_open or ALLOCATING.n_ended != n_ended:  # what another thread takes is not the template's
            memory, n_ended = now, ALLOCATING.n_ended
        if now - memory > MAX_GROWTH_BYTES:
            raise MemoryError
        if is_running:  # else the timer would outlive this handler, and kill the process
            signal.setitimer(signal.ITIMER_REAL, min(max(remaining, _MIN_SECONDS), _POLL_SECONDS))

    handler = signal.signal(signal.SIGALRM, interrupt)
    before = signal.setitimer(signal.ITIMER_REAL, min(seconds, _POLL_SECONDS))
    try:
        return work()
    finally:
        is_running = False
        signal.setitimer(signal.ITIMER_REAL, *before)
        signal.signal(signal.SIGALRM, handler)


def _own_bytes() -> int:
    """Return the memory of the process on Linux, without files such as the weights; elsewhere 0.

    A limit of the system's (RLIMIT_AS) would end allocations of other threads too.
    """
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - every few milliseconds
            _, resident, shared, *_ = map(int, file.read().split())
            return (resident - shared) * 4096
    except (OSError, ValueError):
        return 0
