"""The result of a row: its line in the file of answers, and its tokens. Pure; must not know files or engines."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from llmrun.batch.rows import PendingRow, Row, protocol_of
from llmrun.errors import LlmrunError
from llmrun.protocol.answer import ResponseAccumulator
from llmrun.server.answer import Envelope
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
    own = {name: row.columns[name] for name in ("id", "custom_id") if name in row.columns}
    if error is not None:
        return {**own, "answer": None, "error": {"code": error.code, "message": str(error), "hint": error.hint}}
    thoughts = {"thoughts": answer.reasoning} if answer.reasoning else {}
    return {
        **own,
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
    return writer.whole()
