"""The rows of a batch: read from a file, and turned into what is asked of a model.

Owns the forms that a row may have; must not know engines or what becomes of answers. A row is a text, a table's row
that fills a template, a conversation, or a request of OpenAI's batches (`custom_id`, `url`, `body`).
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TextIO

from llmrun.errors import UsageError
from llmrun.protocol.codec import as_dict, load_json
from llmrun.protocol.messages import AnswerRequest, Message
from llmrun.server.answer_parts import CompletionRequest, Envelope, Writer
from llmrun.server.protocols import openai_chat, openai_text
from llmrun.storage import require_regular

_MOST_CHARACTERS = 64 << 20  # of a line
_PLACE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")
_SHARED = 64  # characters that two rows have to begin with for one's prefill to be worth waiting for


class RowProtocol(Protocol):
    """What a module of server.protocols can do for a row."""

    def read(self, body: Mapping[str, Any]) -> CompletionRequest: ...

    def writer(self, body: Mapping[str, Any], envelope: Envelope) -> Writer: ...


_PROTOCOLS: dict[str, RowProtocol] = {"/v1/chat/completions": openai_chat, "/v1/completions": openai_text}
_CHAT = next(iter(_PROTOCOLS))


class Row(NamedTuple):
    """One row of the input: its number, from 1, and its columns, or what is wrong with it."""

    number: int
    columns: Mapping[str, Any]
    error: UsageError | None = None

    @property
    def url(self) -> str:
        """Of OpenAI's batches, which protocol it speaks; "" of every other row."""
        return str(self.columns.get("url", _CHAT)) if "body" in self.columns else ""


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file, by its suffix: .jsonl, .csv, .tsv, .parquet, or lines of text. A broken line is a row, too.

    Raises:
        UsageError: it is not a regular file, can't be read, is none of these, or pyarrow is missing for a Parquet file.
    """
    require_regular(path)
    suffix = path.suffix.lower()
    try:
        if suffix == ".parquet":
            yield from _parquet(path)
            return
        with path.open(encoding="utf-8-sig", newline="" if suffix in {".csv", ".tsv"} else None) as file:
            if suffix in {".csv", ".tsv"}:
                yield from _table(file, "\t" if suffix == ".tsv" else ",")
            else:
                of_line = _json_row if suffix in {".jsonl", ".ndjson"} else _text_row
                yield from (
                    of_line(number, line) if isinstance(line, str) else Row(number, {}, line)
                    for number, line in enumerate(_lines(file), 1)
                    if not isinstance(line, str) or line.strip()
                )
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"{str(path)!r} can't be read", why=why) from None


def _lines(file: TextIO) -> Iterator[str | UsageError]:
    """Yield the lines of a file; a line that is too long is skipped and yields an error."""
    while line := file.readline(_MOST_CHARACTERS):
        if len(line) < _MOST_CHARACTERS or line.endswith("\n"):
            yield line
            continue
        while line and not line.endswith("\n"):
            line = file.readline(_MOST_CHARACTERS)
        yield UsageError("the line is too long", why=f"at most {_MOST_CHARACTERS >> 20} MiB can be read")


def _table(file: TextIO, delimiter: str) -> Iterator[Row]:
    """Yield the rows of a table. A line that is too long gives its row an error."""
    csv.field_size_limit(_MOST_CHARACTERS)
    errors: list[UsageError] = []

    def lines() -> Iterator[str]:
        for line in _lines(file):
            if isinstance(line, UsageError):
                errors.append(line)
            yield line if isinstance(line, str) else '""\n'

    table = csv.DictReader(lines(), delimiter=delimiter, restkey="", restval="")
    for number, columns in enumerate(table, 1):
        yield Row(number, columns, errors.pop() if errors else None)


def _text_row(number: int, line: str) -> Row:
    return Row(number, {"prompt": line.rstrip("\n")})


def _json_row(number: int, line: str) -> Row:
    try:
        found = load_json(line)
    except ValueError as error:
        return Row(number, {}, UsageError("the line is not JSON", why=str(error)))
    if isinstance(found, str):
        return Row(number, {"prompt": found})
    if not isinstance(found, dict):
        return Row(number, {}, UsageError("the line is neither an object nor a text"))
    return Row(number, found)


def _parquet(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        hint = "pip install 'llmrun[parquet]', or make a .jsonl or .csv file of it"
        raise UsageError(f"{str(path)!r} can't be read", why="Parquet needs the package pyarrow", hint=hint) from None
    number = 0
    try:
        for batch in ParquetFile(path).iter_batches():
            for columns in batch.to_pylist():
                number += 1
                yield Row(number, columns)
    except ArrowException as error:
        raise UsageError(f"{str(path)!r} can't be read", why=str(error)) from None


class PendingRow(NamedTuple):
    """A row that has no answer yet, what it asks, and the key of that."""

    row: Row
    asked: CompletionRequest
    key: str


@dataclass(frozen=True, slots=True)
class RowTemplate:
    """How rows are asked; what a row says itself counts first.

    Attributes:
        template: a prompt with names of columns in braces, {{ and }} for braces; None takes the column "prompt".
        system: the system prompt of rows that are no conversations.
        asked: everything but the prompt.
        sampling: fields of SamplingParams.
        raw: prompts are plain text to continue, without a chat template.
        model: what names the model in a row's key.
    """

    template: str | None = None
    system: str | None = None
    asked: AnswerRequest = field(default_factory=AnswerRequest)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    raw: bool = False
    model: str = ""

    def ask(self, row: Row) -> CompletionRequest:
        """What a row asks for.

        Raises:
            UsageError: it can't be understood; says why.
            BadGrammarError: its JSON schema or grammar is broken.
        """
        if row.error is not None:
            raise row.error
        body = row.columns.get("body") if row.url else row.columns
        if not isinstance(body, Mapping):
            raise UsageError("the row's body is not an object")
        if row.url or "messages" in body:
            found = protocol_of(row).read(body)
            if found.n != 1:
                raise UsageError(f"n is {found.n}", why="a row has one answer", hint="give several rows")
        else:
            found = CompletionRequest("", self._prompt(row.columns), {})
        return found._replace(
            request=_with_defaults(found.request, self.asked), sampling={**self.sampling, **found.sampling}
        )

    def _prompt(self, columns: Mapping[str, Any]) -> AnswerRequest:
        if self.template is not None:
            text = filled(self.template, columns)
        elif isinstance(columns.get("prompt"), str):
            text = columns["prompt"]
        else:
            names = ", ".join(map(repr, columns)) or "none"
            raise UsageError(
                "the row has neither a prompt, nor messages, nor a body",
                why=f"its columns are {names}",
                hint='say what to ask with --prompt "... {column} ..."',
            )
        if self.raw:
            return AnswerRequest(prompt="\n\n".join(filter(None, (self.system, text))))
        system = [Message("system", self.system)] if self.system else []
        return AnswerRequest(messages=(*system, Message("user", text)))

    def key(self, asked: CompletionRequest) -> str:
        """Names what a row asks of which model: an answer to another key is none to this row."""
        usual = as_dict(AnswerRequest())
        said = as_dict(replace(asked.request, sampling=AnswerRequest().sampling)).items()
        request = {name: value for name, value in said if value != usual[name]}  # whatever else there may be one day
        sampling = {name: value for name, value in asked.sampling.items() if name != "watermark_key"}  # a secret
        whole = json.dumps([self.model, request, sampling], sort_keys=True, default=str)
        return hashlib.sha256(whole.encode("utf-8", "replace")).hexdigest()[:16]


def filled(template: str, columns: Mapping[str, Any]) -> str:
    """A template with a row's columns in their places.

    Raises:
        UsageError: there is no such column.
    """

    def put(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:
            return match[0][0]
        if name not in columns:
            why = f"the columns are {', '.join(map(repr, columns)) or 'none'}"
            raise UsageError(f"there is no column {name!r}", why=why, hint="{{ and }} are braces")
        value = columns[name]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

    return _PLACE.sub(put, template)


def _with_defaults(request: AnswerRequest, base: AnswerRequest) -> AnswerRequest:
    """A row's request, with what was said for all rows where it says nothing itself."""
    limits = request.limits
    return replace(
        base,
        messages=request.messages,
        prompt=request.prompt,
        limits=replace(
            limits,
            max_tokens=limits.max_tokens if limits.max_tokens is not None else base.limits.max_tokens,
            stop=limits.stop or base.limits.stop,
            ban=limits.ban or base.limits.ban,
        ),
        grammar=request.grammar or base.grammar,
        thinking=base.thinking if request.thinking is None else request.thinking,
        thinking_tokens=base.thinking_tokens if request.thinking_tokens is None else request.thinking_tokens,
        logprobs=request.logprobs,
        tools=request.tools,
        tool_choice=request.tool_choice,
        parallel_calls=request.parallel_calls,
    )


def protocol_of(row: Row) -> RowProtocol:
    """The module of server.protocols that a row speaks. Raises UsageError where there is none."""
    if (row.url or _CHAT) not in _PROTOCOLS:
        raise UsageError(f"{row.url[:80]!r} can't be asked", why=f"a row's url is one of {', '.join(_PROTOCOLS)}")
    return _PROTOCOLS[row.url or _CHAT]


def text_of(asked: CompletionRequest) -> str:
    """All that is asked, as one text: rows with equal beginnings have equal first tokens."""
    request = asked.request
    return request.prompt if request.prompt is not None else "\0".join(message.content for message in request.messages)


def in_order(texts: Mapping[int, str]) -> list[int]:
    """The order in which rows are asked: those that share a beginning together, the longest of all such groups first.

    The first of a group is prefilled alone and the others go on from there; what takes longest must not be left for the
    end, when fewer and fewer run beside it.

    Args:
        texts: number of a row -> its text.
    """
    groups: list[list[int]] = []
    before = ""
    for number in sorted(texts, key=lambda each: (texts[each], each)):
        text = texts[number]
        if not groups or text[:_SHARED] != before[:_SHARED]:
            groups.append([])
        groups[-1].append(number)
        before = text
    groups.sort(key=lambda group: (-max(len(texts[number]) for number in group), group[0]))
    return [number for group in groups for number in group]
