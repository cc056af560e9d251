"""Ollama's Modelfiles, read as presets. Pure, except that files beside a Modelfile are looked for."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llmrun.cli import settings_file
from llmrun.errors import UsageError
from llmrun.protocol.params import PARAMETERS

_INSTRUCTIONS = ("FROM", "PARAMETER", "TEMPLATE", "SYSTEM", "ADAPTER", "LICENSE", "MESSAGE", "REQUIRES")
_FENCE = '"""'
_ACTION = re.compile(r"\{\{(-?)\s*(if \.System|if \.Prompt|end|\.System|\.Prompt|\.Response)\s*(-?)\}\}")
_JINJA = {
    "if .System": "{% if turn.system %}",
    "if .Prompt": "{% if message.content %}",
    "end": "{% endif %}",
    ".System": "{{ turn.system }}",
    ".Prompt": "{{ message.content }}",
}
_NAMES = {"num_ctx": "ctx", "num_predict": "max-tokens"}


class Instruction(NamedTuple):
    """One instruction of a Modelfile."""

    name: str  # in capitals
    value: str


class ImportedPreset(NamedTuple):
    """A preset made of a Modelfile."""

    values: dict[str, Any]  # by key, as settings_file.NAMED
    template: str  # of the chat, in Jinja; "" for the model's own
    notes: tuple[str, ...]  # what was left out, and why


def read_modelfile(text: str) -> list[Instruction]:
    """Return the instructions of a Modelfile.

    Raises:
        UsageError: a line is no instruction, or a text has no end.
    """
    found, lines = [], text.replace("\r\n", "\n").split("\n")
    number = 0
    while number < len(lines):
        line = lines[number].strip()
        number += 1
        name, _, value = line.partition(" ")
        if not line or line.startswith("#"):
            continue
        if name.upper() not in _INSTRUCTIONS or not value.strip():
            hint = "each line begins with FROM, SYSTEM, PARAMETER, TEMPLATE or ADAPTER"
            raise UsageError("this is not a Modelfile", why=f"line {number}: {line:.60}", hint=hint)
        begun = number
        while value.count(_FENCE) == 1:
            if number == len(lines):
                raise UsageError(f"the text of line {begun} has no end", why=f"{_FENCE} is missing")
            value += f"\n{lines[number]}"
            number += 1
        found.append(Instruction(name.upper(), _unquoted(value.strip())))
    return found


def _unquoted(value: str) -> str:
    """Return a value without the quotes around it."""
    for quote in (_FENCE, '"'):
        if len(value) >= 2 * len(quote) and value.startswith(quote) and value.endswith(quote):
            return value[len(quote) : -len(quote)]
    return value


def as_preset(instructions: Sequence[Instruction], folder: Path) -> ImportedPreset:
    """Return the preset of a Modelfile.

    Args:
        folder: that of the Modelfile, for the files that it names.

    Raises:
        UsageError: it has no FROM, or a parameter's value is invalid.
    """
    values: dict[str, Any] = {}
    notes: list[str] = []
    template = ""
    for name, value in instructions:
        if name == "FROM":
            values["model"] = _model(value, folder)
        elif name == "SYSTEM":
            values["system"] = value
        elif name == "ADAPTER":
            values.setdefault("lora", []).append(str(_file(value, folder)))
        elif name == "PARAMETER":
            _add_parameter(values, notes, *value.partition(" ")[::2])
        elif name == "TEMPLATE":
            template = as_jinja(value)
            if not template:
                notes.append("TEMPLATE is left out: the chat template of the model's file is used")
        elif name == "MESSAGE":
            notes.append(f"MESSAGE is left out: {value:.40}")
    if "model" not in values:
        raise UsageError("the Modelfile has no FROM", hint="FROM smollm2, or FROM ./file.gguf")
    return ImportedPreset(values, template, tuple(notes))


def _file(value: str, folder: Path) -> Path:
    return (folder / Path(value).expanduser()).absolute()


def _model(value: str, folder: Path) -> str:
    """Return a model's file, or its name."""
    path = _file(value, folder)
    is_path = value.startswith(("/", "./", "../", "~")) or value.lower().endswith(".gguf")
    return str(path) if is_path or path.is_file() else value


def _add_parameter(values: dict[str, Any], notes: list[str], name: str, text: str) -> None:
    """Add a PARAMETER to the values of a preset, or a note if it has no meaning here."""
    text = _unquoted(text.strip())
    row = PARAMETERS.get(name)
    key = _NAMES.get(name) or (row.flag.lstrip("-") if row else "")
    if name == "stop":
        values.setdefault("stop", []).append(text)
    elif key not in settings_file.NAMED:
        notes.append(f"PARAMETER {name} is left out: presets have no such setting")
    elif name in ("num_ctx", "num_predict", "repeat_last_n", "seed") and text.startswith("-"):
        notes.append(f"PARAMETER {name} {text} is left out: the default is used")
    else:
        values[key] = settings_file.parse(f"{settings_file.PRESETS}x.{key}", text, f"PARAMETER {name}")


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
