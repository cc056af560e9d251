"""What the generation loop needs from whatever computes logits: tokens in, logits out.

Owns the seam; knows nothing of text layout, chat, sampling or scheduling.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from llmrun.errors import LlmrunError
from llmrun.protocol.adapters import AdapterScale

ALLOCATING = threading.Lock()
"""Held while a KV cache grows, and while a chat template runs: the cap on its memory is the whole process's."""


class Aborted(Exception):  # noqa: N818 - an answer, not an error
    """A decode call was stopped by the cancel flag; the batch's positions may be half written."""


class CacheFull(Exception):  # noqa: N818 - an answer, not an error
    """The KV cache has no cells for this batch and can't grow: evict or preempt. Nothing was written."""


class DecodeError(LlmrunError):
    """llama.cpp refused or failed a batch."""


class Entry(NamedTuple):
    """One token of a batch: where it stands in its sequence, and whether its logits are wanted."""

    token: int
    position: int
    sequence_id: int
    wants_logits: bool


class ImageSpan(NamedTuple):
    """Where a picture stands: the indexes of its first token and of the one behind it, and the positions it takes."""

    start: int
    end: int
    n_positions: int

    @property
    def saved(self) -> int:
        """How many positions fewer than tokens."""
        return self.end - self.start - self.n_positions


class EmbeddedInput(Protocol):
    """Part of a picture, which goes through the model in a decode call of its own: vectors in place of tokens.

    Attributes:
        n_tokens: in place of how many.
        span: of the whole picture.
        sequence_id: of its sequence.
        causal: whether each position sees only those before it.
    """

    @property
    def n_tokens(self) -> int: ...

    @property
    def span(self) -> ImageSpan: ...

    @property
    def sequence_id(self) -> int: ...

    @property
    def causal(self) -> bool: ...

    def positions(self, first: int) -> Sequence[int]:
        """Of its tokens, if the picture begins at position first; with M-RoPE one dimension after another."""

    def address(self) -> int:
        """Of its vectors, floats; computed where nobody has asked for them before.

        Raises:
            LlmrunError: they can't be.
        """


class Vocabulary(Protocol):
    """The tokens of one model: built once, read-only, safe from any thread.

    Attributes:
        n_tokens: how many there are, and floats of one row of logits.
        suppressed: tokens the model's makers say must never be sampled.
        control_texts: texts that tokenize(special=True) turns into control tokens.
        bos_text: of the begin-of-sequence token, "" where there is none.
        eos_text: the same for the end-of-sequence token.
    """

    @property
    def n_tokens(self) -> int: ...

    @property
    def suppressed(self) -> tuple[int, ...]: ...

    @property
    def control_texts(self) -> tuple[str, ...]: ...

    @property
    def bos_text(self) -> str: ...

    @property
    def eos_text(self) -> str: ...

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        """Token ids of text, without a begin-of-sequence token; with special, text of control tokens becomes those."""

    def with_bos(self, tokens: list[int]) -> list[int]:
        """The prompt's tokens with exactly one begin-of-sequence token, where the model wants one."""

    def piece(self, token: int) -> bytes:
        """The UTF-8 bytes a token stands for, maybe not whole characters; none for a control token."""

    def control_piece(self, token: int) -> bytes:
        """The same, but a control token has its text too: for those that a request shows."""

    def is_end(self, token: int) -> bool:
        """Whether the model ends its answer with this token."""


class Context(Protocol):
    """Tokens and logits of one model, and the KV cache between them.

    Attributes:
        vocabulary: the model's.
        n_ctx: context window of each sequence, in tokens.
        n_batch: most entries of one decode call.
        n_seq_max: most sequences of one decode call.
        n_parked: sequence ids are 0 .. n_seq_max + n_parked - 1: more can be kept than run.
        n_cells: of the KV cache in all, when it has grown to the end.
        shares: whether a sequence can begin with another one's tokens, and all together have n_cells; otherwise each
            has n_ctx of its own.
        unified: whether sequences share one pool of cells now; otherwise each has a stream of them, and a batch goes
            through the model at once only where the sequences in it are neighbours and have as many tokens each.
        n_outputs: most entries of one decode call whose logits are wanted.
        cuts: whether forget() can drop the last positions of any sequence.
    """

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def n_ctx(self) -> int: ...

    @property
    def n_batch(self) -> int: ...

    @property
    def n_seq_max(self) -> int: ...

    @property
    def n_parked(self) -> int: ...

    @property
    def n_cells(self) -> int: ...

    @property
    def shares(self) -> bool: ...

    @property
    def unified(self) -> bool: ...

    @property
    def n_outputs(self) -> int: ...

    @property
    def cuts(self) -> bool: ...

    def adapt(self, adapters: tuple[AdapterScale, ...]) -> None:
        """Choose the LoRA adapters that the next batches are computed with, as adapters.applied() orders them."""

    def decode(self, batch: Sequence[Entry] | EmbeddedInput) -> None:
        """Run the model over a batch, or over part of a picture, and append it to the KV cache.

        Raises:
            Aborted: the cancel flag was set meanwhile.
            CacheFull: the KV cache is full.
            DecodeError: llama.cpp could not.
        """

    def logits(self, index: int) -> int:
        """Address of n_tokens floats: the logits of the batch's entry at index. Valid until the next decode."""

    def forget(self, sequence_id: int, start: int) -> bool:
        """Drop a sequence's positions from start on; False if the model's memory can't go on from there.

        A recurrent state can't be cut, nor a sliding window that has passed. What is cut off at 0 always goes.
        """

    def drop(self, sequence_id: int, start: int, end: int) -> bool:
        """Drop the positions start to end - 1 of a sequence and move those behind them there; False if it can't be.

        Keys are turned to their new positions. What the tokens behind saw of the dropped ones stays in their values.
        """

    def copy(self, source: int, target: int, length: int) -> bool:
        """Let an empty sequence begin with another one's first positions; False if it can't be, and it stays empty.

        Nothing is computed. Where the cache is unified the cells are shared, else they are copied.
        """

    def choose_kv_layout(self, longest: int) -> bool:
        """Give each sequence a stream of its own, or all of them one pool, for some that become so long.

        Streams are faster, while every sequence fits into one. Some that grow longer move into a pool by themselves.

        Returns:
            Whether cells that were shared no longer are.
        """

    def state(self, sequence_id: int) -> bytearray:
        """A sequence's part of the KV cache, for set_state() of the same model and build."""

    def set_state(self, sequence_id: int, state: bytes | bytearray, n_tokens: int) -> bool:
        """Put what state() gave for n_tokens tokens in place of a sequence; False, and an empty one, if it can't be."""
