"""The job `importance`: a text goes through the model, and what its matrices are multiplied with is summed.

Owns how a text is cut and read, which is llama-imatrix's way: pieces of one length, each on its own, with the mark of a
beginning in place of its first token. activations.py sums; calibration.py writes a text where there is none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
_MOST_TOKEN_BYTES = 32  # a text is not looked at beyond what its tokens can be made of
_LEAST_TOKENS = 16  # shorter pieces are not counted

Report = Callable[[ImportanceUpdate], None]


def run(command: Importance, report: Report, flag: _native.CancelFlag) -> ImportanceSums:
    """Read a text, or let the model write one and read that; write the sums.

    Raises:
        BadModelError: the model can't be loaded, or computes something that is not a number.
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
    with _context(model, activations, n_ctx, command.threads) as context:
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
    """The calibration text; "" where the model is to write it."""
    if not command.text:
        return ""
    try:
        path = Path(command.text)
        with path.open("rb") as file:
            data = file.read(min(_MOST_TOKEN_BYTES * command.n_tokens, path.stat().st_size))
        return data.decode("utf-8-sig", "replace")
    except OSError as error:
        raise ModelNotFoundError(f"can't read {command.text!r}", why=error.strerror or str(error)) from None


def _write(model: LlamaModel, command: Importance, n_ctx: int, report: Report) -> tuple[list[int], str]:
    """Let the model write."""
    tell = _Pace(report)

    def progress(done: int, seconds: float) -> None:
        share = max(done / command.n_tokens, seconds / command.seconds)
        tell(ImportanceUpdate("writing", done, command.n_tokens, min(share, 1.0)))

    author = Author(model, command.threads, n_ctx)
    try:
        return author.write(command.prompts, command.n_tokens, command.seconds, command.seed, progress)
    finally:
        author.close()


def _pieces(tokens: list[int], n_ctx: int, command: Importance) -> list[list[int]]:
    """Whole pieces only, as in llama-imatrix; of a text that is shorter than one, what there is.

    Raises:
        UsageError: that is next to nothing.
    """
    tokens = tokens[: max(command.n_tokens, n_ctx)]
    if len(tokens) < _LEAST_TOKENS:
        raise UsageError(
            "the calibration text is too short",
            why=f"it has {len(tokens)} tokens, and at least {_LEAST_TOKENS} are needed; 4,000 are good",
            hint="name a longer one, or let the model write its own: --imatrix auto",
        )
    starts = range(0, max(len(tokens) - n_ctx, 0) + 1, n_ctx)
    return [tokens[start : start + n_ctx] for start in starts]


@contextmanager
def _context(model: LlamaModel, activations: Activations, n_ctx: int, threads: int) -> Iterator[LlamaContext]:
    """A context that shows all it computes.

    Every token asks for logits, or llama.cpp would leave most tokens out of the last layer; the logits themselves are
    never computed: activations.py ends each computation before.

    Raises:
        OutOfMemoryError: it does not fit.
    """
    load = Load(model.path, n_ctx, n_ctx, n_batch=n_ctx, n_ubatch=n_ctx, threads=threads)
    try:
        context = LlamaContext(model, load, n_outputs=n_ctx, watch=activations.watch)
    except OutOfMemoryError:
        hint = "close other programs, or use fewer layers"
        raise OutOfMemoryError(f"there is no memory for reading {n_ctx} tokens at once", hint=hint) from None
    try:
        yield context
    finally:
        context.close()


def _read(context: LlamaContext, pieces: list[list[int]], activations: Activations, report: Report) -> None:
    """Let each piece go through the model on its own."""
    tell, vocabulary = _Pace(report), context.vocabulary
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
        tell(ImportanceUpdate("reading", done, total, done / total))


def _save(activations: Activations, path: str) -> tuple[TensorSums, ...]:
    """Write all sums and counts, one tensor after another."""
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


class _Pace:
    """Sends updates on, not more often than anybody can see."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._sent_at = float("-inf")

    def __call__(self, update: ImportanceUpdate) -> None:
        now = time.monotonic()
        if now - self._sent_at >= _UPDATE_SECONDS or update.share >= 1:
            self._sent_at = now
            self._report(update)
