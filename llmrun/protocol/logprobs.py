"""Log-probabilities of tokens as plain data, in the shape that OpenAI gave them and every client knows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from llmrun.protocol.arguments import MOST_TOP_LOGPROBS as MOST_TOP_LOGPROBS
from llmrun.protocol.messages import TokenLogprob


def logprob_entries(tokens: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """How likely tokens were, an object for each."""
    return [
        {
            "token": token.text,
            "logprob": token.logprob,
            "bytes": list(token.bytes),
            "top_logprobs": [
                {"token": text, "logprob": logprob, "bytes": list(data)} for text, data, logprob in token.top
            ],
        }
        for token in tokens
    ]
