"""The rows of a batch: read from a file, translated to requests, and their results as lines of the file of answers.

A row is a text, a table's row that fills a template, a conversation, or a request in the format of OpenAI's batches
(`custom_id`, `url`, `body`)."""

from __future__ import annotations

import csv
import hashlib
import json
import re
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TextIO

from llmrun.errors import LlmrunError, UsageError, brief
from llmrun.protocol.answer import ResponseAccumulator
from llmrun.protocol.codec import as_dict, load_json
from llmrun.protocol.messages import AnswerRequest, Message, with_defaults
from llmrun.server.answer import AnswerWriter, CompletionRequest, Envelope
from llmrun.server.protocols import openai_chat, openai_text
from llmrun.server.protocols.openai import error_body, finish_reason
from llmrun.storage import require_regular

DELIMITERS = {".csv": ",", ".tsv": "\t"}

_MOST_CHARACTERS = 64 << 20  # of a line
_PLACE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")
_SHARED = 64  # length of a common prefix that is worth one row's wait for another row's prefill


class RowProtocol(Protocol):
    """A module of server.protocols."""

    def read(self, body: Mapping[str, Any]) -> CompletionRequest: ...

    def writer(self, body: Mapping[str, Any], envelope: Envelope) -> AnswerWriter: ...


_PROTOCOLS: dict[str, RowProtocol] = {"/v1/chat/completions": openai_chat, "/v1/completions": openai_text}
_CHAT = next(iter(_PROTOCOLS))


class Row(NamedTuple):
    """One row of the input."""

    number: int  # from 1
    columns: Mapping[str, Any]
    error: UsageError | None = None

    @property
    def url(self) -> str:
        """The path of the protocol of a row in OpenAI's format; "" for all others."""
        return str(self.columns.get("url", _CHAT)) if "body" in self.columns else ""


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file by its suffix: .jsonl, .csv, .tsv, .parquet, or lines of text. An invalid line is a row.

    Raises:
        UsageError: it is not a regular file, can't be read, or pyarrow is missing for a Parquet file.
    """
    require_regular(path)
    suffix = path.suffix.lower()
    try:
        if suffix == ".parquet":
            yield from _parquet(path)
            return
        with path.open(encoding="utf-8-sig", newline="" if suffix in DELIMITERS else None) as file:
            if suffix in DELIMITERS:
                yield from _table(file, DELIMITERS[suffix])
            else:
                of_line = _json_row if suffix in {".jsonl", ".ndjson"} else _text_row
                yield from (
                    of_line(number, line) if isinstance(line, str) else Row(number, {}, line)
                    for number, line in enumerate(_lines(file), 1)
                    if not isinstance(line, str) or line.strip()
                )
    except UnicodeDecodeError:
        target = shlex.quote(str(path.with_name(f"utf8-{path.name}")))
        hint = f"save it as UTF-8, e.g. with iconv -f WINDOWS-1252 -t UTF-8 {shlex.quote(str(path))} > {target}"
        raise UsageError(f"{str(path)!r} can't be read", why="it is not UTF-8 text", hint=hint) from None
    except (OSError, csv.Error) as error:
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
        parsed = load_json(line)
    except ValueError as error:
        return Row(number, {}, UsageError("the line is not JSON", why=str(error)))
    if isinstance(parsed, str):
        return Row(number, {"prompt": parsed})
    if not isinstance(parsed, dict):
        return Row(number, {}, UsageError("the line is neither an object nor a text"))
    return Row(number, parsed)


def _parquet(path: Path) -> Iterator[Row]:
    require_pyarrow(f"{str(path)!r} can't be read")
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        for batch in ParquetFile(path).iter_batches():
            for columns in batch.to_pylist():
                number += 1
                yield Row(number, columns)
    except ArrowException as error:
        raise UsageError(f"{str(path)!r} can't be read", why=str(error)) from None


def require_pyarrow(refusal: str) -> None:
    """Raise UsageError with this refusal if Parquet files are unknown here."""
    if find_spec("pyarrow") is None:
        hint = "pip install 'llmrun[parquet]', or use a .jsonl or .csv file"
        raise UsageError(refusal, why="Parquet needs the package pyarrow", hint=hint)


class PendingRow(NamedTuple):
    """A row without an answer."""

    row: Row
    completion: CompletionRequest
    key: str  # of the request and the model


@dataclass(frozen=True, slots=True)
class RowTemplate:
    """The defaults of all rows; a row's own fields override them."""

    template: str | None = None  # prompt with columns in braces, {{ and }} for braces; None: the column "prompt"
    system: str | None = None  # system prompt of rows that are not conversations
    asked: AnswerRequest = field(default_factory=AnswerRequest)  # everything but the prompt
    sampling: Mapping[str, Any] = field(default_factory=dict)  # fields of SamplingParams
    raw: bool = False  # prompts are plain text to continue, without a chat template
    model: str = ""  # identity of the model in keys

    def request(self, row: Row) -> CompletionRequest:
        """Return the request of a row.

        Raises:
            UsageError: the row is invalid.
            BadGrammarError: its JSON schema or grammar is invalid.
        """
        if row.error is not None:
            raise row.error
        body = row.columns.get("body") if row.url else row.columns
        if not isinstance(body, Mapping):
            raise UsageError("the row's body is not an object")
        if row.url or "messages" in body:
            completion = protocol_of(row).read(body)
            if completion.n_choices != 1:
                raise UsageError(
                    f"the row asks for {completion.n_choices} answers", why="a row has one", hint="give several rows"
                )
        else:
            completion = CompletionRequest("", self._prompt(row.columns), {})
        return completion._replace(
            request=with_defaults(completion.request, self.asked), sampling={**self.sampling, **completion.sampling}
        )

    def _prompt(self, columns: Mapping[str, Any]) -> AnswerRequest:
        if self.template is not None:
            text = filled(self.template, columns)
        elif isinstance(columns.get("prompt"), str):
            text = columns["prompt"]
        elif "prompt" in columns:
            raise UsageError("the row's prompt is not a text", why=f"it is {brief(columns['prompt'])}")
        else:
            names = ", ".join(map(repr, columns)) or "none"
            raise UsageError(
                "the row has neither a prompt, nor messages, nor a body",
                why=f"its columns are {names}",
                hint='write a prompt with --prompt "... {column} ..."',
            )
        if self.raw:
            return AnswerRequest(prompt="\n\n".join(filter(None, (self.system, text))))
        system = [Message("system", self.system)] if self.system else []
        return AnswerRequest(messages=(*system, Message("user", text)))

    def key(self, completion: CompletionRequest) -> str:
        """Return a hash of the request and the model: only an answer with the same key counts for the row."""
        defaults = as_dict(AnswerRequest())
        fields = as_dict(replace(completion.request, sampling=AnswerRequest().sampling)).items()
        request = {name: value for name, value in fields if value != defaults[name]}  # new fields keep old keys
        sampling = {name: value for name, value in completion.sampling.items() if name != "watermark_key"}  # a secret
        whole = json.dumps([self.model, request, sampling], sort_keys=True, default=str)
        return hashlib.sha256(whole.encode("utf-8", "replace")).hexdigest()[:16]


def filled(template: str, columns: Mapping[str, Any]) -> str:
    """Fill a template with a row's columns.

    Raises:
        UsageError: a column is missing.
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


def protocol_of(row: Row) -> RowProtocol:
    """Return the protocol of a row. Raise UsageError for an unknown one."""
    if (row.url or _CHAT) not in _PROTOCOLS:
        raise UsageError(f"invalid url {row.url[:80]!r}", why=f"a row's url is one of {', '.join(_PROTOCOLS)}")
    return _PROTOCOLS[row.url or _CHAT]


def text_of(completion: CompletionRequest) -> str:
    """Return the whole prompt as one text; texts with a common prefix have common first tokens."""
    request = completion.request
    return request.prompt if request.prompt is not None else "\0".join(message.content for message in request.messages)


def in_order(texts: Mapping[int, str]) -> list[int]:
    """Return the order of the rows: grouped by common prefix, and the group with the longest row first.

    The first row of a group is prefilled alone, and the others reuse its prefix. The longest rows must not come last,
    when only few rows are left to run in parallel.

    Args:
        texts: number of a row -> its text.
    """
    groups: list[list[int]] = []
    before = ""
    for number in sorted(texts, key=lambda row: (texts[row], row)):
        text = texts[number]
        if not groups or text[:_SHARED] != before[:_SHARED]:
            groups.append([])
        groups[-1].append(number)
        before = text
    groups.sort(key=lambda group: (-max(len(texts[number]) for number in group), group[0]))
    return [number for group in groups for number in group]


class FinishedRow(NamedTuple):
    """A row with an answer or an error."""

    row: int  # number
    key: str  # of the request
    result: dict[str, Any]  # the line; its "error" is None unless the row failed
    prompt_tokens: int = 0  # these are 0 if it failed
    cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def failed(self) -> bool:
        return self.result["error"] is not None


def row_done(todo: PendingRow, answer: ResponseAccumulator, error: LlmrunError | None) -> FinishedRow:
    """Return the result of a row: its answer, or an error."""
    result = result_of(todo.row, answer, error, todo.key)
    if error is not None:
        return FinishedRow(todo.row.number, todo.key, result)
    prompt, cached = (answer.started.prompt_tokens, answer.started.reused_tokens) if answer.started else (0, 0)
    return FinishedRow(todo.row.number, todo.key, result, prompt, cached, answer.stats.completion_tokens)


def result_of(row: Row, answer: ResponseAccumulator, error: LlmrunError | None, key: str) -> dict[str, Any]:
    """Return the line of a row: in the format of OpenAI's batches, or the answer with the row's own id."""
    if row.url:
        answered = {"status_code": 200, "request_id": key, "body": _body(row, answer, key)} if error is None else None
        failed = error_body(error, error.http_status)["error"] if error is not None else None
        return {
            "id": f"batch_req_{key}",
            "custom_id": row.columns.get("custom_id"),
            "response": answered,
            "error": failed,
        }
    ids = {name: row.columns[name] for name in ("id", "custom_id") if name in row.columns}
    if error is not None:
        return {**ids, "answer": None, "error": {"code": error.code, "message": str(error), "hint": error.hint}}
    thoughts = {"thoughts": answer.reasoning} if answer.reasoning else {}
    return {
        **ids,
        "answer": answer.text,
        **thoughts,
        "finish_reason": finish_reason(answer),
        "prompt_tokens": answer.stats.prompt_tokens,
        "completion_tokens": answer.stats.completion_tokens,
        "error": None,
    }


def _body(row: Row, answer: ResponseAccumulator, key: str) -> dict[str, Any]:
    model = str(row.columns["body"].get("model") or "")
    writer = protocol_of(row).writer(row.columns["body"], Envelope(f"cmpl-{key}", int(time.time()), model))
    writer.answers[0] = answer
    body: dict[str, Any] = writer.whole()
    return body
