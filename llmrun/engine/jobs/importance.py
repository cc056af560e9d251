"""The job `importance`: decode a text and sum the squared inputs of the model's matrices.

Owns the chunks, which are llama-imatrix's: of one length, independent, with the begin-of-sequence token instead of the
first token. activations.py sums; calibration.py writes a text if there is none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from llmrun import _native
from llmrun.engine.jobs.activations import Activations
from llmrun.engine.jobs.calibration import Author
from llmrun.engine.llama.base import DecodeError, Entry
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.model import LlamaModel
from llmrun.errors import LlmrunError, ModelNotFoundError, OutOfMemoryError, ResourceError, UsageError
from llmrun.protocol.jobs.importance import Importance, ImportanceSums, ImportanceUpdate, TensorSums
from llmrun.protocol.loading import Load

_UPDATE_SECONDS = 0.1
_MAX_TOKEN_BYTES = 32  # estimate that limits the bytes read from a file
_MIN_TOKENS = 16  # of a text

Report = Callable[[ImportanceUpdate], None]


def run(command: Importance, report: Report, flag: _native.CancelFlag) -> ImportanceSums:
    """Decode a text, written by the model if there is none; save the sums.

    Raises:
        BadModelError: the model can't be loaded, or computes invalid numbers.
        UsageError: the text is too short, or the model can't write one.
        ModelNotFoundError: the text can't be read.
        OutOfMemoryError: the context does not fit.
        ResourceError: the sums can't be written.
    """
    report(ImportanceUpdate("loading"))
    text = _text(command)
    model = LlamaModel(command.model, command.gpu_layers, flag)
    if model.translates:
        raise UsageError("this model can't have an importance matrix", why="it translates: an encoder and a decoder")
    n_ctx = min(command.n_ctx, model.n_ctx_train or command.n_ctx)
    began, vocabulary = time.monotonic(), model.vocabulary
    if command.text:
        n_written, tokens = 0, vocabulary.with_bos(vocabulary.tokenize(text, special=False))
    else:
        tokens, text = _write(model, command, n_ctx, report)
        n_written = len(tokens)
    written = time.monotonic()
    pieces = _pieces(tokens, n_ctx, command)
    activations = Activations(includes_output=command.includes_output)
    with closing(_context(model, activations, n_ctx, command.threads)) as context:
        _read(context, pieces, activations, report)
    tensors = _save(activations, command.sums)
    return ImportanceSums(
        tensors=tensors,
        n_tokens=sum(map(len, pieces)),
        n_chunks=len(pieces),
        chunk_size=len(pieces[0]),
        written_tokens=n_written,
        writing_seconds=written - began if n_written else 0.0,
        reading_seconds=time.monotonic() - written,
        text="" if command.text else text,
    )


def _text(command: Importance) -> str:
    """Return the calibration text; "" if the model writes it."""
    if not command.text:
        return ""
    try:
        path = Path(command.text)
        with path.open("rb") as file:
            data = file.read(min(_MAX_TOKEN_BYTES * command.n_tokens, path.stat().st_size))
        return data.decode("utf-8-sig", "replace")
    except OSError as error:
        raise ModelNotFoundError(f"can't read {command.text!r}", why=error.strerror or str(error)) from None


def _write(model: LlamaModel, command: Importance, n_ctx: int, report: Report) -> tuple[list[int], str]:
    limited = _LimitedReport(report)

    def progress(done: int, seconds: float) -> None:
        share = max(done / command.n_tokens, seconds / command.seconds)
        limited(ImportanceUpdate("writing", done, command.n_tokens, min(share, 1.0)))

    with closing(Author(model, command.threads, n_ctx)) as author:
        return author.write(command.prompts, command.n_tokens, command.seconds, command.seed, progress)


def _pieces(tokens: list[int], n_ctx: int, command: Importance) -> list[list[int]]:
    """Return full chunks only, as in llama-imatrix; a shorter text as one chunk."""
    tokens = tokens[: max(command.n_tokens, n_ctx)]
    if len(tokens) < _MIN_TOKENS:
        raise UsageError(
            "the calibration text is too short",
            why=f"it has {len(tokens)} tokens, and at least {_MIN_TOKENS} are needed; 4,000 are good",
            hint="name a longer one, or let the model write its own: --imatrix auto",
        )
    starts = range(0, max(len(tokens) - n_ctx, 0) + 1, n_ctx)
    return [tokens[start : start + n_ctx] for start in starts]


def _context(model: LlamaModel, activations: Activations, n_ctx: int, threads: int) -> LlamaContext:
    """Return a context with the evaluation callback.

    Every token requests logits, or llama.cpp would leave most tokens out of the last layer; the logits themselves are
    never computed: activations.py ends each computation before.
    """
    load = Load(model.path, n_ctx, n_ctx, n_batch=n_ctx, n_ubatch=n_ctx, threads=threads)
    try:
        return LlamaContext(model, load, n_outputs=n_ctx, watch=activations.watch)
    except OutOfMemoryError:
        hint = "close other programs, or use fewer layers"
        raise OutOfMemoryError(f"there is no memory for reading {n_ctx} tokens at once", hint=hint) from None


def _read(context: LlamaContext, pieces: list[list[int]], activations: Activations, report: Report) -> None:
    """Decode each chunk in an empty context."""
    limited, vocabulary = _LimitedReport(report), context.vocabulary
    done, total = 0, sum(map(len, pieces))
    for piece in pieces:
        context.clear()
        tokens = [vocabulary.bos, *piece[1:]] if vocabulary.adds_bos else piece
        activations.begin()
        try:
            context.decode([Entry(token, position, 0, True) for position, token in enumerate(tokens)])
        except DecodeError as error:
            raise LlmrunError("llama.cpp could not read the calibration text", why=error.why) from None
        done += len(piece)
        limited(ImportanceUpdate("reading", done, total, done / total))


def _save(activations: Activations, path: str) -> tuple[TensorSums, ...]:
    import numpy as np

    tensors = []
    try:
        with Path(path).open("wb") as file:
            for name in sorted(activations.sums):
                sums = activations.sums[name]
                for numbers in (sums.squares, sums.counts):
                    file.write(np.ascontiguousarray(numbers, "<f4").data)
                tensors.append(TensorSums(name, sums.squares.size, sums.counts.size))
    except OSError as error:
        with suppress(OSError):
            Path(path).unlink()
        raise ResourceError(f"can't write {path!r}", why=error.strerror or str(error)) from None
    return tuple(tensors)


class _LimitedReport:
    """A rate limit for updates."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._sent_at = float("-inf")

    def __call__(self, update: ImportanceUpdate) -> None:
        now = time.monotonic()
        if now - self._sent_at >= _UPDATE_SECONDS or update.share >= 1:
            self._sent_at = now
            self._report(update)
