"""What becomes of a row: the line that says its answer or its error, and what that cost.

Pure; must not know files or who answered.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from llmrun.batch.rows import PendingRow, Row, protocol_of
from llmrun.errors import LlmrunError
from llmrun.server.answer_parts import AccumulatedAnswer, Envelope, Part, ResponseFinished, ResponseStarted
from llmrun.server.protocols.openai import error_body, finish_reason


class FinishedRow(NamedTuple):
    """A row that was answered or has failed.

    Attributes:
        row: its number.
        key: of what it asked.
        result: its line, with "error", None where it did not fail.
        prompt_tokens, cached_tokens, completion_tokens: 0 where it failed.
    """

    row: int
    key: str
    result: dict[str, Any]
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def failed(self) -> bool:
        """Whether it has an error in place of an answer."""
        return self.result["error"] is not None


def row_done(todo: PendingRow, parts: Sequence[Part], error: LlmrunError | None) -> FinishedRow:
    """What became of a row.

    Args:
        parts: of its answer, to the last, where there is no error.
    """
    result = result_of(todo.row, parts, error, todo.key)
    if error is not None:
        return FinishedRow(todo.row.number, todo.key, result)
    begun, ended = parts[0], parts[-1]
    assert isinstance(ended, ResponseFinished)
    prompt, cached = (begun.prompt_tokens, begun.cached_tokens) if isinstance(begun, ResponseStarted) else (0, 0)
    return FinishedRow(todo.row.number, todo.key, result, prompt, cached, ended.stats.completion_tokens)


def result_of(row: Row, parts: Sequence[Part], error: LlmrunError | None, key: str) -> dict[str, Any]:
    """A row's line: as OpenAI's batches have it, or the answer with its row's own id."""
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
    writer = protocol_of(row).writer(row.columns["body"], Envelope(f"cmpl-{key}", int(time.time()), _model_name(row)))
    for part in parts:
        writer.feed(part)
    return writer.whole()


def _model_name(row: Row) -> str:
    return str(row.columns["body"].get("model") or "")
