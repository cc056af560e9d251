"""Types of the arguments of the Python API: one table by name, for functions and for the records made from them.

Must not know the purpose of a value. Those of sampling parameters stand in their table, params.PARAMETERS; single
fields of a request come from theirs, messages.REQUEST_FIELDS.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from numbers import Real
from typing import Any, Literal, ParamSpec, TypeVar, get_args

from llmrun.errors import TEXT, UsageError, ValueKind, did_you_mean, require

MOST_TOKENS = 2**31 - 1
"""Maximum of any limit."""
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORTS: tuple[str, ...] = get_args(Effort)
"""Levels of reasoning effort, as OpenAI's and other protocols have them."""
MOST_TOP_LOGPROBS = 20
"""Maximum number of most likely tokens reported in the place of one."""

_LARGEST = 2**63
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -_LARGEST <= value < _LARGEST


def _is_number(value: Any) -> bool:
    return (isinstance(value, Real) and not isinstance(value, (bool, int))) or _is_whole(value)


def _are_biases(value: Any) -> bool:
    return _is_list(value) and all(
        _is_list(pair) and len(pair) == 2 and _is_token_or_text(pair[0]) and _is_number(pair[1]) for pair in value
    )


def _is_token_or_text(value: Any) -> bool:
    return _is_whole(value) or TEXT.fits(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _are_several(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, bytearray, Mapping))


def optional(kind: ValueKind) -> ValueKind:
    return ValueKind(f"{kind.words}, or None", lambda value: value is None or kind.fits(value))


def whole_number(low: int, high: int) -> ValueKind:
    words = f"a whole number between {low:,} and {high:,}"
    return ValueKind(words, lambda value: _is_whole(value) and low <= value <= high)


def one_of(*known: str) -> ValueKind:
    return ValueKind(f"one of {', '.join(map(repr, known))}", lambda value: isinstance(value, str) and value in known)


def _is_made(name: str, value: Any) -> bool:
    return any(kind.__name__ == name for kind in type(value).__mro__)


def _made(name: str, words: str = "") -> ValueKind:
    """Return the kind of a class, by its name: nothing has to be imported for that."""
    return ValueKind(words or f"an instance of {name}", lambda value: _is_made(name, value))


def _list_of(kind: ValueKind, words: str) -> ValueKind:
    return ValueKind(words, lambda value: _is_list(value) and all(map(kind.fits, value)))


NUMBER = ValueKind("a number", _is_number)
TEXTS = _list_of(TEXT, "a list of texts")
BIASES = ValueKind("pairs of a token id, or a text, and a number", _are_biases)
_WHOLE = ValueKind("a whole number", _is_whole)
SWITCH = ValueKind("True or False", lambda value: isinstance(value, bool))
_FUNCTION = ValueKind("a function", callable)
_PATH = ValueKind("a text or a path", lambda value: isinstance(value, (str, os.PathLike)))
_VALUES = ValueKind("a dict", lambda value: isinstance(value, Mapping))

KINDS: dict[str, ValueKind] = {
    # load()
    "name": _PATH,
    "n_ctx": optional(_WHOLE),
    "threads": optional(_WHOLE),
    "gpu_layers": optional(_WHOLE),
    "parallel": _WHOLE,
    "answers": _WHOLE,  # decode_together()
    "speculate": ValueKind("'auto', 'off' or a whole number", lambda value: isinstance(value, str) or _is_whole(value)),
    "draft": optional(_PATH),
    "lora": TEXTS,
    "pull": SWITCH,
    "on_pull": _FUNCTION,
    "on_progress": _FUNCTION,
    # answer(), and AnswerRequest's that are no plain values
    "asked": _list_of(_made("AnswerRequest"), "AnswerRequests"),
    "messages": ValueKind(
        "a text, a message or a list of messages",
        lambda value: isinstance(value, (str, Mapping)) or _are_several(value) or _is_made("Message", value),
    ),
    "prompt": TEXT,
    "prompt_tokens": _list_of(ValueKind("", _is_token_or_text), "a list of token ids, and of texts between them"),
    "suffix": optional(TEXT),
    "schema": ValueKind(
        "a dict or a class with model_json_schema()",
        lambda value: (
            value is None or isinstance(value, Mapping) or callable(getattr(value, "model_json_schema", None))
        ),
    ),
    "sampling": optional(_made("SamplingParams")),
    "limits": _made("Limits"),
    "grammar": optional(_made("Grammar", "a Grammar, as llmrun.read_grammar() gives it")),
    "tools": _list_of(_made("Tool"), "a list of Tools"),
    "speculation": optional(_made("Speculation")),
    "adapters": optional(_list_of(_made("AdapterScale"), "a list of AdapterScales")),
    # Limits
    "max_tokens": optional(_WHOLE),
    "stop": TEXTS,
    "ban": TEXTS,
    "ignores_end": SWITCH,
    "flags": optional(_VALUES),
    "session": optional(_VALUES),
    # vectors
    "texts": ValueKind("a text or a list of texts", lambda value: isinstance(value, str) or _are_several(value)),
    "options": _made("EmbedOptions"),
    "role": optional(one_of("query", "document")),
    "pooling": optional(TEXT),
    "dimensions": optional(_WHOLE),
    "normalize": SWITCH,
    "truncate": SWITCH,
    "query": TEXT,
    "documents": ValueKind("a list of texts", _are_several),
    # tokens, and questions about an answer
    "text": TEXT,
    "special": SWITCH,
    "tokens": _list_of(whole_number(0, MOST_TOKENS), "a list of token ids"),
    "system": optional(TEXT),
    "stream": SWITCH,
    "last": whole_number(1, MOST_TOKENS),
    "candidates": whole_number(1, MOST_TOKENS),
    "prompt_only": SWITCH,
    # beams()
    "search": _made("SearchBeams"),
    "on_step": _FUNCTION,
    "beams": _WHOLE,
    "length_penalty": NUMBER,
}

# Command-line names in messages -> Python names.
FLAGS: dict[str, str] = {
    "--ctx": "n_ctx",
    "--threads": "threads",
    "--gpu-layers": "gpu_layers",
    "--parallel": "parallel",
    "--speculate": "speculate",
    "--draft": "draft",
    "--lora": "lora",
    "--max-tokens": "max_tokens",
    "--template": "template",
    "--pooling": "pooling",
    "--image": "media",
    "--audio": "media",
    "--watermark-key": "watermark_key",
    "--beams": "beams",
    "--length-penalty": "length_penalty",
    "--early-stopping": "early_stopping",
    "--raw": "generate()",
}
_FLAG = re.compile(r"(?<![\w-])(invalid )?(--[a-z]+(?:-[a-z]+)*)( (?=[0-9.]+\b|[A-Z]+\b|chatml\b))?")
_WORD = r"('[^']*'|[^\s,;']+)"
_RUN = re.compile(rf"llmrun run {_WORD}((?: --[a-z-]+ {_WORD})+)")


def in_python(text: str) -> str:
    """Name the arguments in a message as Python programs write them: "n_ctx=512" instead of "--ctx 512"."""
    return _FLAG.sub(_named, _RUN.sub(_as_load, text))


def _named(found: re.Match[str]) -> str:
    before, flag, space = (group or "" for group in found.groups())
    if flag not in FLAGS:
        return found[0]
    return before + FLAGS[flag] + (" " if before and space else "=" if space else "")


def _as_load(found: re.Match[str]) -> str:
    import shlex

    name, *words = shlex.split(found[0])[2:]
    arguments = [repr(name)]
    for flag, value in zip(words[::2], words[1::2], strict=True):
        if FLAGS.get(flag) not in KINDS:
            return found[0]
        written = value if value.isdigit() else repr(value)
        arguments.append(f"{FLAGS[flag]}={[value] if flag == '--lora' else written}")
    return f"load({', '.join(arguments)})"


def check_fields(record: Any) -> None:
    """Check the fields of a dataclass that have no default, or another value.

    Raises:
        UsageError: one is of the wrong kind.
    """
    for field in fields(record):
        value = getattr(record, field.name)
        if value is not field.default and field.name in KINDS:
            require(field.name, value, KINDS[field.name])


def refuse_unknown(given: Iterable[str], known: Iterable[str]) -> None:
    """Raise UsageError for an unknown argument, with the name that was probably meant."""
    known = list(known)
    for name in given:
        if name not in known:
            raise UsageError(f"there is no argument {name!r}", hint=did_you_mean(name, known))


def checked(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Check the arguments of a function of the Python API before it does anything."""

    @functools.wraps(function)
    def wrapper(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        signature = _signature(function)
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            if name != "self" and signature.parameters[name].kind is not inspect.Parameter.VAR_KEYWORD:
                require(name, value, KINDS[name])
        return function(*args, **kwargs)

    return wrapper


_signature = functools.cache(inspect.signature)
