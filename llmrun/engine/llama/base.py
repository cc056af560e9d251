"""What the generation loop needs from whatever computes logits: tokens in, logits out.

Owns the seam; knows nothing of text layout, chat, sampling or scheduling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from llmrun.errors import LlmrunError


class Aborted(Exception):  # noqa: N818 - an answer, not an error
    """A decode call was stopped by the cancel flag; the batch's positions may be half written."""


class DecodeError(LlmrunError):
    """llama.cpp refused or failed a batch."""


class Entry(NamedTuple):
    """One token of a batch: where it stands in its sequence, and whether its logits are wanted."""

    token: int
    position: int
    sequence_id: int
    wants_logits: bool


class Backend(Protocol):
    """Tokens and logits.

    Attributes:
        n_vocab: tokens in the vocabulary, and floats of one row of logits.
        n_ctx: context window of each sequence, in tokens.
        n_batch: most entries of one decode call.
        n_seq_max: sequence ids are 0 .. n_seq_max - 1.
        suppressed: tokens the model's makers say must never be sampled.
    """

    n_vocab: int
    n_ctx: int
    n_batch: int
    n_seq_max: int
    suppressed: tuple[int, ...]

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        """Token ids of text; with special, text of control tokens becomes those tokens."""

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes a token stands for, maybe not whole characters; none for a control token."""

    def is_end(self, token: int) -> bool:
        """Whether the model ends its answer with this token."""

    def decode(self, batch: Sequence[Entry]) -> None:
        """Run the model over a batch and append it to the KV cache.

        Raises:
            Aborted: the cancel flag was set meanwhile.
            DecodeError: llama.cpp could not.
        """

    def logits(self, index: int) -> int:
        """Address of n_vocab floats: the logits of the batch's entry at index. Valid until the next decode."""

    def forget(self, sequence_id: int, start: int) -> bool:
        """Drop a sequence's positions from start on; False if the model's memory can't be cut there."""

    def save(self, sequence_id: int) -> bytearray:
        """A sequence's part of the KV cache, for restore() of the same model and build."""

    def restore(self, sequence_id: int, state: bytes, n_tokens: int) -> bool:
        """Put what save() gave for n_tokens tokens in place of a sequence; False, and an empty one, if it can't be."""

    def drop(self, sequence_id: int, start: int, end: int) -> bool:
        """Drop the positions start to end - 1 of a sequence and move those behind them there; False if it can't be.

        Keys are turned to their new positions. What the tokens behind saw of the dropped ones stays in their values.
        """
