"""Modelfiles of Ollama: their text, and the layers that a model in Ollama's store has of one.

Both become a Modelfile, whose values are checked: what can't be used is named in its notes. Must not know where models
are found.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from llmrun.errors import LlmrunError, UsageError
from llmrun.models.store.installed import Layer
from llmrun.protocol.codec import load_json
from llmrun.protocol.messages import AnswerRequest, Message
from llmrun.protocol.params import MOST_TOKENS, PARAMETERS, check_limits, check_parameter

_INSTRUCTIONS = frozenset(
    {"FROM", "PARAMETER", "TEMPLATE", "SYSTEM", "ADAPTER", "LICENSE", "MESSAGE", "REQUIRES", "RENDERER", "PARSER"}
    | {"DRAFT"}
)
_OF_TWO_WORDS = frozenset({"PARAMETER", "MESSAGE"})
_ROLES = ("system", "user", "assistant")
_FENCE = '"""'
_ACTION = re.compile(r"\{\{(-?)\s*(if \.System|if \.Prompt|end|\.System|\.Prompt|\.Response)\s*(-?)\}\}")
_JINJA = {
    "if .System": "{% if turn.system %}",
    "if .Prompt": "{% if message.content %}",
    "end": "{% endif %}",
    ".System": "{{ turn.system }}",
    ".Prompt": "{{ message.content }}",
}
_LIMITS = {"num_ctx": "n_ctx", "num_predict": "max_tokens"}
_MAY_BE_NEGATIVE = frozenset({*_LIMITS, "seed"})  # -1 is Ollama's default
_LARGEST_LAYER = 1 << 20
_OWN_TEMPLATE = "the chat template of the model's file is used"


class Instruction(NamedTuple):
    """One instruction of a Modelfile."""

    name: str  # in capitals
    value: str
    key: str = ""  # of a PARAMETER its name, of a MESSAGE its role


@dataclass(frozen=True, slots=True)
class Modelfile:
    """Settings and files that a Modelfile adds to a model's weights."""

    model: str = ""  # file or name of the weights; "" in Ollama's store, which has them
    adapters: tuple[Path, ...] = ()
    projector: Path | None = None
    system: str = ""
    template: str = ""  # of the chat, in Jinja; "" for that of the model's file
    messages: tuple[Message, ...] = ()  # example turns before each conversation
    sampling: Mapping[str, Any] = field(default_factory=dict)  # fields of SamplingParams
    n_ctx: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # what is not used, and why

    def complete(self, request: AnswerRequest) -> AnswerRequest:
        """Return a request with the template, limits, system prompt and example turns that it leaves open."""
        limits = request.limits
        limits = replace(limits, max_tokens=limits.max_tokens or self.max_tokens, stop=limits.stop or self.stop)
        if not request.messages:
            return replace(request, limits=limits)
        first, rest = request.messages[:1], request.messages[1:]
        if first[0].role != "system":
            first, rest = (Message("system", self.system),) if self.system else (), request.messages
        template = request.template or self.template or None
        return replace(request, limits=limits, template=template, messages=(*first, *self.messages, *rest))


NO_MODELFILE = Modelfile()


# ---- text


def read_instructions(text: str) -> list[Instruction]:
    """Return the instructions of a Modelfile, parsed as Ollama does.

    Raises:
        UsageError: a line is no instruction, or a text has no end.
    """
    found, lines = [], text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    number = 0
    while number < len(lines):
        words = lines[number].split(None, 1)
        number += 1
        if not words or words[0].startswith("#"):
            continue
        name, key = words[0].upper(), ""
        begun, words = number, words[1:]
        if name in _OF_TWO_WORDS and words:
            key, *words = words[0].split(None, 1)
        if name not in _INSTRUCTIONS or not words:
            hint = "each line begins with FROM, SYSTEM, PARAMETER, TEMPLATE or ADAPTER"
            raise UsageError("this is not a Modelfile", why=f"line {number}: {lines[begun - 1].strip():.60}", hint=hint)
        value = words[0]
        while (quote := _open_quote(value.strip())) and number < len(lines):
            value += f"\n{lines[number]}"
            number += 1
        if quote:
            raise UsageError(f"the text of line {begun} has no end", why=f"{quote} is missing")
        found.append(Instruction(name, _unquoted(value.strip()), key))
    return found


def _quote(value: str) -> str:
    """Return the quotes that a value begins with; "" for none."""
    return next((quote for quote in (_FENCE, '"') if value.startswith(quote)), "")


def _open_quote(value: str) -> str:
    """Return the quotes that a value begins but does not end with; "" for a whole value."""
    quote = _quote(value)
    return "" if len(value) >= 2 * len(quote) and value.endswith(quote) else quote


def _unquoted(value: str) -> str:
    """Return a whole value without the quotes around it."""
    n_quotes = len(_quote(value))
    return value[n_quotes : len(value) - n_quotes]


def as_modelfile(instructions: Sequence[Instruction], folder: Path) -> Modelfile:
    """Return the settings of a Modelfile.

    Args:
        folder: that of the Modelfile, for the files that it names.

    Raises:
        UsageError: it has no FROM, or a parameter's value is invalid.
    """
    values: dict[str, list[Instruction]] = {}
    for each in instructions:
        values.setdefault(each.name, []).append(each)
    last = {name: found[-1].value for name, found in values.items()}
    weights = [(each.value, _file(each.value, folder)) for each in values.get("FROM", ())]
    projectors = [path for _, path in weights if _is_projector(path)]
    models = [_model(value, path) for value, path in weights if path not in projectors]
    if not models:
        raise UsageError("the Modelfile has no FROM", hint="FROM smollm2, or FROM ./file.gguf")
    parameters = _Parameters()
    for each in values.get("PARAMETER", ()):
        parameters.add(each.key, each.value)
    replaced = [f"{name} {last[name]}" for name in ("RENDERER", "PARSER") if name in last]
    template, notes = _template("" if replaced else last.get("TEMPLATE", ""))
    if replaced:
        notes = [f"{' and '.join(replaced)}: not used, {_OWN_TEMPLATE}"]
    if "DRAFT" in last:
        notes.append(f"DRAFT is left out: --draft {_file(last['DRAFT'], folder)} drafts with it")
    for each in values.get("MESSAGE", ()):
        if each.key.lower() not in _ROLES:
            raise UsageError(f"invalid MESSAGE {each.key}", why="must be of the system, the user or the assistant")
    system, messages = _conversation(
        last.get("SYSTEM", ""), [(each.key.lower(), each.value) for each in values.get("MESSAGE", ())]
    )
    return Modelfile(
        model=models[-1],
        adapters=tuple(_file(each.value, folder) for each in values.get("ADAPTER", ())),
        projector=projectors[-1] if projectors else None,
        system=system,
        template=template,
        messages=messages,
        **parameters.fields,
        notes=(*parameters.notes, *notes),
    )


def _file(value: str, folder: Path) -> Path:
    return (folder / Path(value).expanduser()).absolute()


def _model(value: str, path: Path) -> str:
    """Return a model's file, or its name."""
    is_path = value.startswith(("/", "./", "../", "~")) or value.lower().endswith(".gguf")
    return str(path) if is_path or path.is_file() else value


def _is_projector(path: Path) -> bool:
    try:
        from llmrun.gguf.reader import read_part  # completion knows names of models, and reads none

        return path.is_file() and read_part(path).architecture == "clip"
    except LlmrunError:
        return False


# ---- layers


def from_layers(layers: Iterable[Layer]) -> Modelfile:
    """Return the settings in the layers of a model in Ollama's store; invalid ones become notes."""
    files: dict[str, list[Path]] = {}
    for kind, path in layers:
        files.setdefault(kind, []).append(path)
    texts = {kind: _text(found[-1]) for kind, found in files.items() if kind in _TEXTS}
    notes = [f"the {kind} of Ollama's store can't be read: {files[kind][-1]}" for kind in texts if texts[kind] is None]
    notes += [f"Ollama's layer {kind!r} is not used" for kind in files if kind not in _KNOWN]
    if "draft" in files:
        notes.append(f"Ollama's draft model is not used: --draft {files['draft'][-1]} drafts with it")
    if len(files.get("projector", ())) > 1:
        notes.append(f"of {len(files['projector'])} projectors in Ollama's store only the last one is used")
    parameters = _Parameters(is_strict=False)
    for name, value in _parsed(texts.get("params"), dict).items():
        parameters.add(name, value)
    template, of_template = _template(texts.get("template") or texts.get("prompt") or "")
    said = [
        (each["role"], each["content"])
        for each in _parsed(texts.get("messages"), list)
        if isinstance(each, dict) and isinstance(each.get("role"), str) and isinstance(each.get("content"), str)
    ]
    system, messages = _conversation(texts.get("system") or "", said)
    return Modelfile(
        adapters=tuple(files.get("adapter", ())),
        projector=files.get("projector", [None])[-1],
        system=system,
        template=template,
        messages=messages,
        **parameters.fields,
        notes=(*notes, *parameters.notes, *of_template),
    )


_TEXTS = ("system", "template", "prompt", "params", "messages")
_KNOWN = frozenset({*_TEXTS, "adapter", "projector", "draft", "license"})


def _text(path: Path) -> str | None:
    """Return a layer's text; None if it can't be read."""
    try:
        if not path.is_file() or path.stat().st_size > _LARGEST_LAYER:
            return None
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def _parsed(text: str | None, kind: type[Any]) -> Any:
    """Return the JSON object or list in a text; an empty one if it has none."""
    try:
        value = load_json(text or "")
    except ValueError:
        return kind()
    return value if isinstance(value, kind) else kind()


# ---- what both have


class _Parameters:
    """Collects parameters as the fields of a Modelfile, and notes about the others.

    Args:
        is_strict: raise UsageError for an invalid value; else it becomes a note.
    """

    def __init__(self, *, is_strict: bool = True) -> None:
        self._is_strict = is_strict
        self._sampling: dict[str, Any] = {}
        self._limits: dict[str, int] = {}
        self._stop: list[str] = []
        self._unknown: list[str] = []
        self._notes: list[str] = []

    @property
    def fields(self) -> dict[str, Any]:
        return {"sampling": self._sampling, "stop": tuple(self._stop), **self._limits}

    @property
    def notes(self) -> list[str]:
        verb = "is" if len(self._unknown) == 1 else "are"
        unknown = [f"PARAMETER {', '.join(self._unknown)} {verb} left out: llmrun has no such setting"]
        return [*self._notes, *(unknown if self._unknown else ())]

    def add(self, name: str, value: object) -> None:
        try:
            self._add(name, value)
        except UsageError as error:
            if self._is_strict:
                raise
            self._notes.append(f"PARAMETER {name} is left out: {error}")

    def _add(self, name: str, value: object) -> None:
        row = PARAMETERS.get(name)
        if name == "stop":
            texts = [str(each) for each in value] if isinstance(value, list) else [str(value)]
            check_limits(None, [*self._stop, *texts], ())
            self._stop += texts
            return
        if name not in _LIMITS and (row is None or row.bounds is None or not row.in_preset):
            self._unknown.append(name)
            return
        number = _number(value)
        if number is None:
            raise UsageError(f"invalid PARAMETER {name} {value}", why="must be a number")
        if number < 0 and name in _MAY_BE_NEGATIVE:
            self._notes.append(f"PARAMETER {name} {value} is left out: the default is used")
        elif name in _LIMITS:
            if not 1 <= number <= MOST_TOKENS:
                raise UsageError(f"invalid PARAMETER {name} {value}", why=f"must be between 1 and {MOST_TOKENS}")
            self._limits[_LIMITS[name]] = int(number)
        else:
            self._sampling[name] = check_parameter(name, number, f"PARAMETER {name}")


def _number(value: object) -> int | float | None:
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            pass
        try:
            return float(value)
        except ValueError:
            return None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _template(text: str) -> tuple[str, list[str]]:
    """Return a chat template in Jinja, "" for the model's own, and notes."""
    template = as_jinja(text) if text else ""
    return template, [f"TEMPLATE is left out: {_OWN_TEMPLATE}"] if text and not template else []


def _conversation(system: str, said: Sequence[tuple[str, str]]) -> tuple[str, tuple[Message, ...]]:
    """Return the system prompt and the example turns; a message of the system is a part of its prompt."""
    parts = [system, *(text for role, text in said if role == "system")]
    turns = tuple(Message(role, text) for role, text in said if role in _ROLES[1:])
    return "\n\n".join(filter(None, parts)), turns


def as_jinja(template: str) -> str:
    """Return a chat template in Jinja for one of Ollama's with .System, .Prompt and .Response; "" for any other."""
    parts = _ACTION.split(template)
    texts, actions = parts[::4], list(zip(parts[1::4], parts[2::4], parts[3::4], strict=True))
    if any("{{" in text or "}}" in text for text in texts):
        return ""
    for number, (before, _, after) in enumerate(actions):
        if before:
            texts[number] = texts[number].rstrip()
        if after:
            texts[number + 1] = texts[number + 1].lstrip()
    question = [_literal(texts[0])]
    answer: list[str] = []
    depth = 0
    side = question
    for (_, action, _), text in zip(actions, texts[1:], strict=True):
        depth += action.startswith("if") - (action == "end")
        if action == ".Response":
            if depth or side is answer:
                return ""
            side = answer
        elif side is answer:
            return ""
        else:
            side.append(_JINJA[action])
        side.append(_literal(text))
    if depth or not any(action == ".Prompt" for _, action, _ in actions):
        return ""
    return (
        "{% set turn = namespace(system='') %}{% for message in messages %}"
        "{% if message.role == 'system' %}{% set turn.system = message.content %}"
        "{% elif message.role == 'user' %}" + "".join(question) + "{% set turn.system = '' %}"
        "{% else %}{{ message.content }}" + "".join(answer) + "{% endif %}{% endfor %}"
    )


def _literal(text: str) -> str:
    """Return a text as an expression, which no whitespace control changes."""
    return f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}" if text else ""
