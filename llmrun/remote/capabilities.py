"""What a far server tells of its model besides answers: how long its context window is, what it sees, its tokens.

Owns what servers have beyond OpenAI's protocol, and the estimate where one has nothing; must not know answers. Nothing
here is needed: where a server does not tell, nobody knows, and that is no error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from math import ceil
from typing import Any, NamedTuple
from urllib.parse import quote

from llmrun.errors import LlmrunError
from llmrun.protocol.messages import Message, Tool
from llmrun.protocol.questions import TokenCount
from llmrun.remote.server import ServedModel, Server
from llmrun.remote.transport import ask

_WITH_PROPERTIES = frozenset({"llamacpp", "llmrun"})
_WITH_TOKENIZER = frozenset({"llamacpp", "llmrun", "vllm"})
_SECONDS = 5.0  # of silence: a server that still loads the model tells later
_TEMPLATE_TOKENS = 8  # that a chat template writes around a message, about
_TOKENS_A_BYTE = 0.3  # of most texts, until the server has counted some
_WORTH_LEARNING = 1000  # bytes: of fewer, most tokens are the template's


class Capabilities(NamedTuple):
    """What is known of a far model.

    Attributes:
        n_ctx: its context window in tokens; 0 is unknown.
        sees: whether it may look at pictures: only a server that says so can't.
    """

    n_ctx: int
    sees: bool


def facts_of(server: Server, model: ServedModel) -> Capabilities:
    """What a server tells of one of its models."""
    found: dict[str, Any] = {}
    if model.owner in _WITH_PROPERTIES:
        with suppress(LlmrunError):
            found = ask(server, f"{_root(server)}/props?model={quote(model.name, safe='')}", seconds=_SECONDS)
    settings, modalities = found.get("default_generation_settings"), found.get("modalities")
    n_ctx = settings.get("n_ctx") if isinstance(settings, dict) else None
    return Capabilities(
        n_ctx=model.n_ctx or (n_ctx if isinstance(n_ctx, int) and n_ctx > 0 else 0),
        sees=not isinstance(modalities, dict) or modalities.get("vision") is not False,
    )


class TokenCounter:
    """Tokens of conversations: the server's own count where it has one, else an estimate that its answers correct."""

    def __init__(self, server: Server, model: ServedModel) -> None:
        self._server, self._model = server, model
        self._has_tokenizer = model.owner in _WITH_TOKENIZER
        self._tokens_a_byte = _TOKENS_A_BYTE
        self._counted: dict[str, int] = {}

    def count(self, messages: Iterable[Message], tools: Sequence[Tool] = ()) -> TokenCount:
        """About how many tokens a conversation has."""
        each = tuple(self._tokens("".join(message.texts)) for message in messages)
        offered = sum(self._tokens("".join(tool)) for tool in tools)
        return TokenCount(each, sum(each) + offered + _TEMPLATE_TOKENS * (len(each) + 1))

    def learn(self, messages: Sequence[Message], prompt_tokens: int) -> None:
        """Take in what the server has counted."""
        n_bytes = sum(len(text.encode()) for message in messages for text in message.texts)
        written = prompt_tokens - _TEMPLATE_TOKENS * (len(messages) + 1)
        if n_bytes >= _WORTH_LEARNING and written > 0:
            self._tokens_a_byte = written / n_bytes

    def _tokens(self, text: str) -> int:
        if self._has_tokenizer and text not in self._counted:
            try:
                self._counted[text] = self._tokenized(text)
            except (LlmrunError, KeyError, TypeError):
                self._has_tokenizer = False
        return self._counted[text] if self._has_tokenizer else ceil(len(text.encode()) * self._tokens_a_byte)

    def _tokenized(self, text: str) -> int:
        body = {"model": self._model.name, "content": text, "prompt": text, "add_special_tokens": False}
        return len(ask(self._server, f"{_root(self._server)}/tokenize", body)["tokens"])


def _root(server: Server) -> str:
    """Where a server has what is not OpenAI's."""
    return server.url.removesuffix("/v1")
