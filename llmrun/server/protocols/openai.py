"""What all of OpenAI's protocols have in common: errors, usage, why an answer ended, and how its tokens were chosen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from llmrun.errors import LlmrunError
from llmrun.protocol.messages import Stats, TokenLogprob

_CODES = {"context-overflow": "context_length_exceeded", "model-not-found": "model_not_found"}
"""Those that clients know under another name than ours."""
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}

FINISH_REASONS = {"length": "length", "tool_calls": "tool_calls"}
"""Why an answer ended, in OpenAI's words; everything else is "stop"."""


def error_body(error: LlmrunError, status: int) -> dict[str, Any]:
    """An error as OpenAI's clients expect it."""
    message = f"{error}; {error.hint}" if error.hint else str(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": _CODES.get(error.code, error.code)}}


def usage(prompt_tokens: int, cached_tokens: int, answers: Iterable[Stats]) -> dict[str, Any]:
    """What a request cost. The prompt counts once, however many answers there were."""
    completion = sum(stats.completion_tokens for stats in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def logprobs(tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
    """How likely tokens were."""
    return {
        "content": [
            {
                "token": token.text,
                "logprob": token.logprob,
                "bytes": list(token.bytes),
                "top_logprobs": [
                    {"token": text, "logprob": logprob, "bytes": list(data)} for text, data, logprob in token.top
                ],
            }
            for token in tokens
        ],
        "refusal": None,
    }
