"""The result of a row: its line in the file of answers, and its tokens. Pure; must not know files or engines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from llmrun.batch.rows import PendingRow, Row, protocol_of
from llmrun.errors import LlmrunError
from llmrun.server.answer_parts import AccumulatedAnswer, Envelope, Part, ResponseFinished, ResponseStarted
from llmrun.server.protocols.openai import error_body, finish_reason


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


def row_done(todo: PendingRow, parts: Sequence[Part], error: LlmrunError | None) -> FinishedRow:
    """Return the result of a row: all parts of its answer, or an error."""
    result = result_of(todo.row, parts, error, todo.key)
    if error is not None:
        return FinishedRow(todo.row.number, todo.key, result)
    started, finished = parts[0], parts[-1]
    assert isinstance(finished, ResponseFinished)
    prompt, cached = (started.prompt_tokens, started.cached_tokens) if isinstance(started, ResponseStarted) else (0, 0)
    return FinishedRow(todo.row.number, todo.key, result, prompt, cached, finished.stats.completion_tokens)


def result_of(row: Row, parts: Sequence[Part], error: LlmrunError | None, key: str) -> dict[str, Any]:
    """Return the line of a row: in the format of OpenAI's batches, or the answer with the row's own id."""
    if row.url:
        answered = {"status_code": 200, "request_id": key, "body": _body(row, parts, key)} if error is None else None
        failed = error_body(error, error.http_status)["error"] if error is not None else None
        return {
            "id": f"batch_req_{key}",
            "custom_id": row.columns.get("custom_id"),
            "response": answered,
            "error": failed,
        }
    own = {name: row.columns[name] for name in ("id", "custom_id") if name in row.columns}
    if error is not None:
        return {**own, "answer": None, "error": {"code": error.code, "message": str(error), "hint": error.hint}}
    collected = AccumulatedAnswer()
    for part in parts:
        collected.add(part)
    stats = collected.stats
    thoughts = {"thoughts": collected.reasoning} if collected.reasoning else {}
    return {
        **own,
        "answer": collected.text,
        **thoughts,
        "finish_reason": finish_reason(collected),
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.completion_tokens,
        "error": None,
    }


def _body(row: Row, parts: Sequence[Part], key: str) -> dict[str, Any]:
    model = str(row.columns["body"].get("model") or "")
    writer = protocol_of(row).writer(row.columns["body"], Envelope(f"cmpl-{key}", int(time.time()), model))
    for part in parts:
        writer.feed(part)
    return writer.whole()
