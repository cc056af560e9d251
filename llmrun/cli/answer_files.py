"""Files that options of an answer name: a grammar, a JSON schema, a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.errors import UsageError

if TYPE_CHECKING:
    from llmrun.grammar import Grammar


def read_constraint(grammar: str | None, json_schema: str | None) -> Grammar | None:
    """Parse --grammar or --json-schema, as far as possible without a model.

    Raises:
        UsageError: both are given, or the file can't be read.
        BadGrammarError: it is invalid; names line and column.
    """
    if grammar is None and json_schema is None:
        return None
    if grammar is not None and json_schema is not None:
        raise UsageError("--grammar and --json-schema can't be used together", hint="give one of them")
    from llmrun.grammar import read_grammar, read_json_schema

    if grammar is not None:
        return read_grammar(_file_text("--grammar", grammar, "a file with a GBNF or Lark grammar"))
    assert json_schema is not None
    if not json_schema.lstrip().startswith(("{", "[", "true", "false")):
        json_schema = _file_text("--json-schema", json_schema, "a JSON schema, or a file with one")
    return read_json_schema(json_schema)


def _file_text(flag: str, path: str, wanted: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")  # Windows editors write a byte order mark
    except (OSError, UnicodeDecodeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"{flag} {path} can't be read", why=why, hint=f"{flag} takes {wanted}") from None


def template_text(template: str | None) -> str | None:
    """Return --template as Jinja text.

    Raises:
        UsageError: the file can't be read.
    """
    if template is None or template == "chatml":
        return template
    return _file_text("--template", template, "chatml, or a file with Jinja text")
