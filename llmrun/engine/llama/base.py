"""The interface between the generation loop and the model: tokens in, logits out.

Must not know text layout, chat, sampling or scheduling.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from llmrun import _native
from llmrun.errors import LlmrunError, UsageError
from llmrun.protocol.adapters import AdapterScale
from llmrun.protocol.jobs.text import VocabularyPiece
from llmrun.protocol.media import Modality

PIECE_TOKENS = 16_384
"""Tokens of a long prompt that are handled in one call of C, which holds the interpreter's lock for up to 0.3 ms."""

MAX_SECONDS = 3600
"""Of an audio file: a second takes up to 100 kB while it is decoded."""
MIN_SECONDS = 0.1
"""Of an audio file: less than a window of some encoders makes libmtmd abort."""


class Allocations:
    """A record of the blocks in which the thread that computes allocates much.

    The memory limit of a chat template counts the whole process, and leaves out what such blocks take. None of them
    waits for a template: running answers would wait, too.

    Attributes:
        n_open: blocks that have not ended.
        n_ended: blocks that have.
    """

    def __init__(self) -> None:
        self.n_open = self.n_ended = 0

    def __enter__(self) -> None:
        self.n_open += 1

    def __exit__(self, *failure: object) -> None:
        self.n_open, self.n_ended = self.n_open - 1, self.n_ended + 1


ALLOCATING = Allocations()


_Result = TypeVar("_Result")


def all_of(pieces: Generator[object, None, _Result]) -> _Result:
    """Do all pieces of a work at once, and return its result."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: _Result = end.value
            return result


class Aborted(Exception):  # noqa: N818 - an answer, not an error
    """A decode call stopped by the cancel flag; the batch's positions may be partly written."""


class CacheFull(Exception):  # noqa: N818 - an answer, not an error
    """A KV cache without cells for this batch: evict or preempt. Nothing was written."""


class DecodeError(LlmrunError):
    """A batch that llama.cpp refused or failed to compute."""


class Entry(NamedTuple):
    """One token of a batch."""

    token: int
    position: int
    sequence_id: int
    wants_logits: bool


class CheckedFile(NamedTuple):
    """A file that may be decoded."""

    modality: Modality
    data: bytes
    width: int = 0  # pixels of an image, as it is shown
    height: int = 0
    orientation: int = 1  # of its pixels in the file, as Exif numbers it


def check_seconds(seconds: float, name: str) -> None:
    """Raise UsageError for audio that is too long or too short."""
    if seconds > MAX_SECONDS:
        why = f"it takes {seconds:,.0f} seconds, the maximum is {MAX_SECONDS:,}"
        raise UsageError(f"{name} is too long", why=why, hint=f"ffmpeg -i FILE -t {MAX_SECONDS} PART.flac cuts it")
    if seconds < MIN_SECONDS:
        raise UsageError(f"{name} is too short", why=f"it takes less than {MIN_SECONDS} seconds")


def check_tokens(tokens: Iterable[int], n_vocab: int) -> None:
    """Raise UsageError for a token that the vocabulary lacks."""
    invalid = next((token for token in tokens if not 0 <= token < n_vocab), None)
    if invalid is not None:
        raise UsageError(f"there is no token {invalid}", why=f"the vocabulary has {n_vocab:,}")


class MediaSpan(NamedTuple):
    """The token indexes [start, end) of an image or audio in its sequence, and the number of positions it takes."""

    start: int
    end: int
    n_positions: int

    @property
    def saved(self) -> int:
        return self.end - self.start - self.n_positions


class EmbeddedInput(Protocol):
    """Part of an image or audio, decoded in a call of its own: embedding vectors instead of tokens.

    Attributes:
        n_tokens: number of vectors.
        span: the whole chunk's.
        causal: each position attends only to those before it.
        encoded: share of the chunk's vectors that is computed, as far as it is known; safe from any thread.
    """

    @property
    def n_tokens(self) -> int: ...

    @property
    def span(self) -> MediaSpan: ...

    @property
    def sequence_id(self) -> int: ...

    @property
    def causal(self) -> bool: ...

    @property
    def encoded(self) -> float: ...

    def positions(self, first: int) -> Sequence[int]:
        """Return the tokens' positions if the chunk begins at position `first`; with M-RoPE dimension by dimension."""

    def address(self) -> int:
        """Return the address of the vectors, floats; the first call computes them.

        Raises:
            LlmrunError: encoding it failed.
        """


class Vocabulary(Protocol):
    """The tokens of one model: built once, read-only, safe from any thread."""

    n_tokens: int  # size of the vocabulary, and floats of one row of logits
    suppressed: tuple[int, ...]  # tokens that must never be sampled, according to the model file
    bos_text: str  # text of the begin-of-sequence token, "" without one
    eos_text: str  # text of the end-of-sequence token, "" without one
    fill_in: tuple[int, int, int] | None  # tokens before a prefix, a suffix, and the middle to fill in

    @property
    def control_texts(self) -> tuple[str, ...]:
        """The texts that tokenize(special=True) turns into control tokens."""

    @property
    def shown_control_texts(self) -> tuple[str, ...]:
        """Texts of further ones, whose pieces are shown in an answer."""

    def tokenize(self, text: str, *, special: bool, begins: bool = True) -> list[int]:
        """Return the token ids of a text, without a begin-of-sequence token.

        Args:
            special: turn the texts of control tokens into control tokens.
            begins: the text begins a prompt, so that some models get a space in front of it.
        """

    def token_pieces(self, text: str, *, special: bool, begins: bool = True) -> Iterator[list[int]]:
        """Yield what tokenize() returns, in pieces: a long text takes little memory at a time."""

    def with_bos(self, tokens: list[int]) -> list[int]:
        """Return a prompt's tokens with exactly one begin-of-sequence token, if the model uses one."""

    def piece(self, token: int) -> bytes:
        """Return a token's UTF-8 bytes, possibly not whole characters; b"" for a control token."""

    def control_piece(self, token: int) -> bytes:
        """Return a token's UTF-8 bytes, for a control token its text."""

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end an answer (EOS, EOT, ...)."""

    def is_end(self, token: int) -> bool:
        """Return whether this token ends an answer."""


def vocabulary_pieces(vocabulary: Vocabulary, tokens: Iterable[int]) -> tuple[VocabularyPiece, ...]:
    """Return the pieces of tokens, each once, in the order of first occurrence."""
    return tuple(_piece(vocabulary, token) for token in dict.fromkeys(tokens))


def _piece(vocabulary: Vocabulary, token: int) -> VocabularyPiece:
    text = vocabulary.piece(token)
    return VocabularyPiece(token, (text or vocabulary.control_piece(token)).hex(), is_control=not text)


Inputs = Sequence[Entry] | EmbeddedInput
"""The input of one decode call."""

RunSteps = list[tuple[tuple[int, ...], float, float]]
"""Of each decode step, the sampled token of each sequence, seconds of decoding, and seconds since the run began."""


class RunRow(NamedTuple):
    """A sequence's part of a run of decode steps."""

    entry: Entry  # its last token
    sampler: _native.Sampler
    # What drafts its next tokens, and whether drafts pay; both up to the last token, and None without drafts.
    lookup: _native.SuffixAutomaton | None = None
    gate: _native.Gate | None = None


MAX_RUN = 64
"""Tokens of all sequences that a run decodes without a look at the queue."""


class RunLimit(NamedTuple):
    """The end of a run of decode steps."""

    steps: int  # maximum, at least 1
    seconds: float  # maximum, or until steps are taken first
    interrupted: _native.CancelFlag  # ends it when it is set
    # Takes the steps so far; returns the seconds until it takes the next ones, a negative number to end the run.
    take: Callable[[RunSteps], float] | None = None


class Run(NamedTuple):
    """Decode steps of some sequences, one directly after the other."""

    steps: RunSteps  # that were not taken
    failed: Sequence[int] = ()  # entries for which no token could be sampled from the last step's logits
    failure: Aborted | LlmrunError | None = None  # of the next decode call


class Context(Protocol):
    """A model's context: computes logits and holds the KV cache."""

    n_ctx: int  # context window of each sequence, in tokens
    n_batch: int  # maximum number of entries in one decode call
    n_outputs: int  # maximum number of entries with logits in one decode call
    n_seq_max: int  # maximum number of sequences in one decode call
    n_parked: int  # more sequences can be cached: sequence ids are 0 .. n_seq_max + n_parked - 1
    n_cells: int  # cells of the KV cache in total
    cuts: bool  # forget() can drop the last positions of any sequence
    has_checkpoints: bool  # a part of the memory can't be cut; checkpoint() copies it
    # copy() can begin a sequence with another one's tokens, and all have n_cells together; else each has its own n_ctx.
    can_copy: bool
    # copy() shares cells, any sequence can use a free one, and each row of a batch reads all that are used; else each
    # sequence has cells of its own, and copy() copies.
    shares_cells: bool
    # Only sequences with adjacent ids and equally many tokens in a batch are computed together.
    splits_batches: bool
    # The KV cache is in a device's memory, and decode() returns before the device has computed.
    on_device: bool

    @property
    def predicts(self) -> bool:
        """The model generates text; False for an encoder."""

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def split_from(self) -> int | None:
        """Beyond this many tokens, the logits of a batch of one token depend on the number of threads; None: never."""

    @property
    def max_draft(self) -> int:
        """Maximum number of a sequence's last tokens in a batch that forget() can drop once after it.

        Unless the context `cuts`, all sequences of that batch need equally many entries.
        """

    def limit_threads(self, most: int) -> None:
        """Compute the next batches with at most this many of the threads that the context was loaded with."""

    def adapt(self, adapters: tuple[AdapterScale, ...]) -> None:
        """Choose the LoRA adapters of the next batches, as adapters.applied() orders them."""

    def decode(self, batch: Inputs) -> None:
        """Run the model over a batch, or over part of an image or audio, and append it to the KV cache.

        Raises:
            Aborted: the cancel flag was set meanwhile.
            CacheFull: the KV cache is full.
            DecodeError: llama.cpp failed.
        """

    @property
    def computed(self) -> float:
        """The share of the running decode() that is computed, below 1; 0 if it is unknown. Safe from any thread."""

    def run(self, rows: Sequence[RunRow], limit: RunLimit) -> Run:
        """Decode a token of each sequence, sample the next ones, and so on until an end token or the limit.

        It ends before a step in which a draft may pay, perhaps the first. On a device, steps are taken while the next
        one is computed; if taking them ends the run, it ends with that one.

        Raises:
            CacheFull: there are no cells for the first entries.
        """

    def synchronize(self) -> None:
        """Wait until the last batch is computed: on a GPU, decode() returns before. logits() waits by itself."""

    def logits(self, index: int) -> int:
        """Return the address of the logits of the batch's entry at index: n_tokens floats, valid until decode()."""

    def forget(self, sequence_id: int, start: int) -> bool:
        """Drop a sequence's positions from start on; return False if the model can't continue from there.

        A recurrent state can't be cut, except by the last tokens of the last batch (see max_draft), nor a sliding
        window that has passed. Start 0 always succeeds.
        """

    def can_forget(self, sequence_id: int, start: int) -> bool:
        """Return whether forget() would succeed."""

    def drop(self, sequence_id: int, start: int, end: int) -> bool:
        """Drop positions [start, end) of a sequence and shift the later ones down; return False if unsupported.

        Keys are rotated to their new positions. The later tokens' values still depend on the dropped tokens.
        """

    def copy(self, source: int, target: int, length: int, checkpoint: bytearray | memoryview | None = None) -> bool:
        """Give an empty sequence another one's first positions; return False, and leave it empty, if unsupported.

        Nothing is computed; cells are copied unless they are shared.

        Args:
            checkpoint: of the source after `length` tokens, for a memory that can't be cut.
        """

    def n_copied(self, source: int, length: int) -> int:
        """Return how many cells in the machine's memory copy() would copy; it may need to copy all of the source."""

    def checkpoint(self, sequence_id: int) -> bytearray:
        """Return a copy of the part of a sequence's memory that forget() can't cut; empty if it can't be copied."""

    def go_back(self, sequence_id: int, checkpoint: bytearray | memoryview, length: int) -> bool:
        """Cut a sequence to the `length` tokens that it had at a checkpoint; return False if that fails.

        A sequence for which that failed has to be emptied.
        """

    def state_bytes(self, sequence_id: int) -> int:
        """Return the size of a sequence's state, without making it."""

    def state_in_pieces(self, sequence_id: int, piece_bytes: int) -> Generator[None, None, bytearray | memoryview]:
        """Copy a sequence's part of the KV cache, for set_state() of the same model and build.

        Between two pieces, other sequences may change, but not this one.

        Args:
            piece_bytes: copied before each yield, about; more where a state can't be copied in pieces.

        Returns:
            The state; empty if it can't be saved.

        Raises:
            MemoryError: there is no memory for it.
        """

    def write_state(self, sequence_id: int, path: Path) -> int | None:
        """Write a sequence's state into a file without a copy in memory.

        Returns:
            The first byte of the state, which ends with the file; None if it can't be saved.

        Raises:
            OSError: the file can't be written.
        """

    def set_state(self, sequence_id: int, state: bytearray | memoryview, n_tokens: int) -> bool:
        """Replace a sequence by the state of n_tokens tokens; return False, and leave it empty, if that fails.

        The memory of the state is used, and is as before at the end.
        """
