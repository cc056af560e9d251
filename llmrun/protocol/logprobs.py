"""Log-probabilities of tokens as JSON data, in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from llmrun.protocol.arguments import MOST_TOP_LOGPROBS as MOST_TOP_LOGPROBS
from llmrun.protocol.messages import TokenLogprob


def logprob_entries(tokens: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """Return one object for each token; what was drafted in its place is llmrun's own field."""
    return [
        {
            "token": token.text,
            "logprob": token.logprob,
            "bytes": list(token.bytes),
            "top_logprobs": [
                {"token": text, "logprob": logprob, "bytes": list(data)} for text, data, logprob in token.top
            ],
            **({"draft": token.draft._asdict()} if token.draft is not None else {}),
        }
        for token in tokens
    ]
