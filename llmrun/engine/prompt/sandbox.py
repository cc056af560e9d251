"""The sandboxed Jinja environment of chat templates: the functions and filters that templates expect, with limits.

Must not know conversations. A template is untrusted: operations that can't be interrupted are bounded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

from llmrun.engine.llama.library import import_submodule
from llmrun.errors import BadTemplateError

MAX_BITS = 64 * 1024  # Of an integer: arithmetic with longer ones can take hours and can't be interrupted
MAX_SIZE = 1 << 26  # of a text or list that a template makes in one step
MAX_WIDTH = 1 << 16  # of an indent, a line or a column
_WIDE_FORMAT = re.compile(r"[%{][^%{}]*[1-9]\d{7}")
MAX_DATE_CHARACTERS = 1024  # Of a date format: strftime can't be interrupted
REFUSES = "the chat template refuses this conversation"
OTHER_TEMPLATE = "choose another template with --template"


def make_environment() -> Any:
    """Return the environment that compiles chat templates; its limits of time and memory are the caller's."""
    runtime, extensions = import_submodule("jinja2", "runtime"), import_submodule("jinja2", "ext")
    environment = _sandbox(import_submodule("jinja2", "sandbox"))(
        undefined=_lenient(runtime),
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[extensions.loopcontrols, _generation_tag(extensions)],
    )
    environment.filters["tojson"] = _to_json
    for name in ("batch", "center", "format", "indent", "slice", "tojson", "truncate", "wordwrap"):
        environment.filters[name] = _checked(environment.filters[name], _check_widths)
    environment.filters["replace"] = _checked(
        environment.filters["replace"], lambda context, *args, **kwargs: _check_replacement(*args, **kwargs)
    )
    environment.filters["join"] = _checked_join(environment.filters["join"])
    environment.filters["safe"] = str  # nothing is escaped here; Jinja's would make what is added to it escaped
    environment.filters["round"] = _limited_round(environment.filters["round"])
    # Some templates test "tools is not none", others loop over undefined tools: undefined has to satisfy both.
    environment.tests["none"] = lambda value: value is None or isinstance(value, runtime.Undefined)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["functions"] = ""  # an older name of an empty list of tools, as in llama.cpp
    del environment.globals["lipsum"]  # generates unlimited text
    return environment


def _lenient(runtime: Any) -> Any:
    """Return Jinja's class of undefined values, which adds up as an empty text, as in llama.cpp.

    Templates add descriptions of parameters, which many tools don't have.
    """

    class Undefined(runtime.Undefined):  # type: ignore[misc]  # imported lazily
        def __add__(self, other: Any) -> Any:
            return other if isinstance(other, str) else super().__add__(other)

        def __radd__(self, other: Any) -> Any:
            return other if isinstance(other, str) else super().__radd__(other)

    return Undefined


def dates() -> dict[str, str]:
    """Return the variables that older templates have for today's date, as in llama.cpp."""
    return {"date_string": _strftime_now("%d %b %Y"), "datetime": _strftime_now("%b %d %Y")}


class CompiledTemplate:
    """A compiled chat template; it is parsed once, which takes most of the time of a short prompt."""

    def __init__(self, source: str) -> None:
        """Compile a template; Jinja's errors, and limits of time and memory, are the caller's."""
        environment = make_environment()
        self._tree = environment.parse(source)
        self._read: set[str] = set()
        environment.code_generator_class = _noting(import_submodule("jinja2", "compiler"), self._read)
        self.generate: Callable[[dict[str, Any]], Iterator[str]] = environment.from_string(self._tree).generate

    @property
    def variables(self) -> list[str]:
        """The variables that it reads without setting them."""
        return sorted(self._read)

    def values(self, name: str) -> tuple[Any, ...]:
        """Return the values of a variable that make a difference: the texts it is compared with, or booleans."""
        compared = self._tree.find_all(import_submodule("jinja2", "nodes").Compare)
        operands = (operand for node in compared if getattr(node.expr, "name", "") == name for operand in node.ops)
        values = (getattr(operand.expr, "value", None) for operand in operands if operand.op == "eq")
        return (*dict.fromkeys(value for value in values if isinstance(value, str)),) or (True, False)


def _noting(compiler: Any, read: set[str]) -> Any:
    """Return Jinja's code generator that also notes the variables read, as jinja2.meta does without making code."""

    class Generator(compiler.CodeGenerator):  # type: ignore[misc]  # imported lazily
        def enter_frame(self, frame: Any) -> None:
            super().enter_frame(frame)
            resolved = {name for action, name in frame.symbols.loads.values() if action == "resolve"}
            read.update(resolved - self.environment.globals.keys())

    return Generator


def _sandbox(sandbox: Any) -> Any:
    """Return Jinja's sandbox class with a limit for numbers."""

    class Sandbox(sandbox.SandboxedEnvironment):  # type: ignore[misc]  # imported lazily
        intercepted_binops = frozenset(["**", "*", "//", "%", "/", "+"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            bits = [value.bit_length() for value in (left, right) if isinstance(value, int)]
            if operator == "**" and len(bits) == 2:
                bits.append(bits[0] * max(right, 0))
            if any(size > MAX_BITS for size in bits):
                raise BadTemplateError("the chat template uses too large numbers")
            sizes = [len(value) for value in (left, right) if isinstance(value, (str, list, tuple))]
            repeats = [value for value in (left, right) if isinstance(value, int)]
            if sizes and (sum(sizes) if operator == "+" else sizes[0] * max([1, *repeats])) > MAX_SIZE:
                raise _too_long()
            if operator == "%" and isinstance(left, str):
                _check_widths(left)
            return self.binop_table[operator](left, right)

        def is_safe_attribute(self, obj: Any, attribute: str, value: Any) -> bool:
            makes_long = attribute == "translate" and isinstance(obj, str)
            return not makes_long and super().is_safe_attribute(obj, attribute, value)

        def wrap_str_format(self, value: Any) -> Any:
            wrapped = super().wrap_str_format(value)
            if wrapped is not None:
                _check_widths(value.__self__)
                wrapped = _checked(wrapped, _check_widths)
            return wrapped

        def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
            text = getattr(function, "__self__", None)
            if isinstance(text, str):
                _check_widths(text, *args, **kwargs)
                if getattr(function, "__name__", "") == "replace":
                    _check_replacement(text, *args)
            return super().call(context, function, *args, **kwargs)

    return Sandbox


def _checked(original: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """Return a function whose arguments are checked first."""

    @wraps(original)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return original(*args, **kwargs)

    return checked


def _check_replacement(text: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> None:
    """Raise if a text with replacements is too long; names are those of Jinja's filter."""
    if len(str(new)) * (str(text).count(str(old)) + 1) > MAX_SIZE:
        raise _too_long()


def _checked_join(original: Callable[..., Any]) -> Callable[..., Any]:
    """Limit the length of what Jinja's filter returns."""

    @wraps(original)
    def checked(context: Any, value: Any, d: Any = "", attribute: Any = None) -> Any:  # names are Jinja's
        value = [*value]
        if len(value) * (len(str(d)) + 1) > MAX_SIZE:
            raise _too_long()
        return original(context, value, d, attribute)

    return checked


def _check_widths(*values: Any, **named: Any) -> None:
    """Raise if a number, or a number in a text's format, is a width of many megabytes."""
    for value in (*values, *named.values()):
        is_wide = _WIDE_FORMAT.search(value) if isinstance(value, str) else isinstance(value, int) and value > MAX_WIDTH
        if is_wide:
            raise _too_long()


def _too_long() -> BadTemplateError:
    return BadTemplateError("the chat template makes too long texts")


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
    if isinstance(value, Iterator):  # of a filter such as map
        value = [*value]
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise BadTemplateError(REFUSES, why=one_line(message))


def _strftime_now(layout: str) -> str:
    if len(layout) > MAX_DATE_CHARACTERS:
        raise BadTemplateError("the chat template uses too long a date format")
    return datetime.now().strftime(layout)


def one_line(text: object) -> str:
    return " ".join(str(text).split())[:500]
