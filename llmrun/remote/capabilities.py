"""The capabilities of a remote model: its context window, the files it reads, and token counts.

Knows the endpoints that servers have beyond OpenAI's protocol, and the estimates without them; must not know answers. A
server that reports nothing is not an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from math import ceil
from typing import Any, NamedTuple
from urllib.parse import quote

from llmrun.errors import LlmrunError
from llmrun.protocol.media import Modality
from llmrun.protocol.messages import Message, Tool
from llmrun.protocol.questions import TokenCount
from llmrun.remote.server import ServedModel, Server
from llmrun.remote.transport import ask

_WITH_PROPERTIES = frozenset({"llamacpp", "llmrun"})
_WITH_TOKENIZER = frozenset({"llamacpp", "llmrun", "vllm"})
_MODALITY_NAMES: dict[Modality, str] = {"image": "vision", "audio": "audio"}  # in properties
_SECONDS = 5.0  # a server that still loads the model answers later
_TEMPLATE_TOKENS = 8  # approximately, of the chat template around a message
_TOKENS_A_BYTE = 0.3  # of most texts, until the server has counted one
_MAX_COUNTED = 4096  # texts
_WORTH_LEARNING = 1000  # bytes: in shorter texts, most tokens are the template's


class Capabilities(NamedTuple):
    """The reported capabilities of a remote model."""

    n_ctx: int  # context window in tokens; 0 if unknown
    modalities: frozenset[Modality]  # all but those that the server says the model does not read
    thinks: bool = False  # the server says that the model can reason before the answer


def facts_of(server: Server, model: ServedModel) -> Capabilities:
    """Return the capabilities that a server reports for one of its models."""
    found: dict[str, Any] = {}
    if model.owner in _WITH_PROPERTIES:
        with suppress(LlmrunError):
            found = ask(server, f"{_root(server)}/props?model={quote(model.name, safe='')}", seconds=_SECONDS)
    settings, modalities = found.get("default_generation_settings"), found.get("modalities")
    n_ctx = settings.get("n_ctx") if isinstance(settings, dict) else None
    return Capabilities(
        n_ctx=model.n_ctx or (n_ctx if isinstance(n_ctx, int) and n_ctx > 0 else 0),
        modalities=frozenset(
            kind
            for kind, name in _MODALITY_NAMES.items()
            if not isinstance(modalities, dict) or modalities.get(name) is not False
        ),
        thinks=found.get("reasoning") is True,
    )


class TokenCounter:
    """Token counts of conversations: the server's own if it has a tokenizer, else estimates corrected by its
    answers."""

    def __init__(self, server: Server, model: ServedModel) -> None:
        self._server, self._model = server, model
        self._has_tokenizer = model.owner in _WITH_TOKENIZER
        self._tokens_a_byte = _TOKENS_A_BYTE
        self._counted: dict[str, int] = {}

    def count(self, messages: Iterable[Message], tools: Sequence[Tool] = ()) -> TokenCount:
        """Return the token counts of a conversation, approximately."""
        each = tuple(self._tokens("".join(message.texts)) for message in messages)
        offered = sum(self._tokens("".join(tool)) for tool in tools)
        return TokenCount(each, sum(each) + offered + _TEMPLATE_TOKENS * (len(each) + 1))

    def learn(self, messages: Sequence[Message], prompt_tokens: int) -> None:
        """Correct the estimate by a count of the server."""
        n_bytes = sum(len(text.encode()) for message in messages for text in message.texts)
        written = prompt_tokens - _TEMPLATE_TOKENS * (len(messages) + 1)
        if n_bytes >= _WORTH_LEARNING and written > 0:
            self._tokens_a_byte = written / n_bytes

    def _tokens(self, text: str) -> int:
        if self._has_tokenizer and text not in self._counted:
            body = {"model": self._model.name, "content": text, "prompt": text, "add_special_tokens": False}
            try:
                while len(self._counted) >= _MAX_COUNTED:
                    del self._counted[next(iter(self._counted))]
                self._counted[text] = len(ask(self._server, f"{_root(self._server)}/tokenize", body)["tokens"])
            except (LlmrunError, KeyError, TypeError):
                self._has_tokenizer = False
        return self._counted[text] if self._has_tokenizer else ceil(len(text.encode()) * self._tokens_a_byte)


def _root(server: Server) -> str:
    """Return the base address of endpoints that are not OpenAI's."""
    return server.url.removesuffix("/v1")
