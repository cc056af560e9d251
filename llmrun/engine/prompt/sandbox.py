"""The sandboxed Jinja environment of chat templates: the functions and filters that templates expect, with limits.

Must not know conversations. A template is untrusted: operations that can't be interrupted are bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, NoReturn

from llmrun.engine.llama.submodules import import_submodule
from llmrun.errors import BadTemplateError

MAX_BITS = 64 * 1024  # Of an integer: arithmetic with longer ones can take hours and can't be interrupted
MAX_SIZE = 1 << 28  # of a text or list that a template makes
MAX_DATE_CHARACTERS = 1024  # Of a date format: strftime can't be interrupted
REFUSES = "the chat template refuses this conversation"


def make_environment() -> Any:
    """Return the environment that compiles chat templates; its limits of time and memory are the caller's."""
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

    class Sandbox(sandbox.SandboxedEnvironment):  # type: ignore[misc]  # imported lazily
        intercepted_binops = frozenset(["**", "*", "//", "%", "/", "+"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            bits = [value.bit_length() for value in (left, right) if isinstance(value, int)]
            if operator == "**" and len(bits) == 2:
                bits.append(bits[0] * max(right, 0))
            if any(size > MAX_BITS for size in bits):
                raise BadTemplateError("the chat template uses too large numbers")
            result = self.binop_table[operator](left, right)
            if isinstance(result, (str, list, tuple)) and len(result) > MAX_SIZE:
                raise BadTemplateError("the chat template makes too long texts")
            return result

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
