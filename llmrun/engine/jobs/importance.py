"""The job `importance`: decode a text and sum the squared inputs of the model's matrices.

The arithmetic and the chunks are llama-imatrix's (tools/imatrix/imatrix.cpp): chunks of one length, independent, with
the begin-of-sequence token instead of the first token. If there is no text, the model writes one: many texts in
parallel, because a batch reads the weights once for all of them.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from collections.abc import Sequence as List
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from llmrun import _native
from llmrun.engine.core.loop import Engine
from llmrun.engine.core.sampler import SequenceSampler
from llmrun.engine.core.sequence import Sequence
from llmrun.engine.llama.base import DecodeError, Entry
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.ggml import GgmlTensor, TensorNumbers, operation_numbers
from llmrun.engine.llama.model import LlamaModel
from llmrun.engine.prompt.writer import PromptWriter
from llmrun.errors import (
    BadModelError,
    BadTemplateError,
    LlmrunError,
    ModelNotFoundError,
    OutOfMemoryError,
    ResourceError,
    UsageError,
)
from llmrun.protocol.jobs.importance import CalibrationPrompt, Importance, ImportanceSums, ImportanceUpdate, TensorSums
from llmrun.protocol.loading import Load
from llmrun.protocol.messages import AnswerRequest, Failed, Finished, Generate, Message, Started, TextDelta
from llmrun.protocol.params import Limits, SamplingParams

_UPDATE_SECONDS = 0.1
_MAX_TOKEN_BYTES = 32  # estimate that limits the bytes read from a file
_MIN_TOKENS = 16  # of a text
_F32 = 0  # ggml_type
_MIN_ROWS = 16  # tokens of a matrix product; fewer are not a text
PARALLEL = 16  # texts written in parallel; each needs memory for its own KV cache
_MIN_PIECE = 48  # tokens of one text, unless it ends by itself
# The model's own distribution without the most unlikely tokens: of small models those would be noise.
_SAMPLING = SamplingParams(temperature=1.0, top_k=0, top_p=0.98, min_p=0.01)

Report = Callable[[ImportanceUpdate], None]


def run_importance(command: Importance, report: Report, flag: _native.CancelFlag) -> ImportanceSums:
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
    never computed: Activations ends each computation before.
    """
    load = Load(model.path, n_ctx, n_batch=n_ctx, n_ubatch=n_ctx, threads=threads)
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


@dataclass(slots=True)
class Sums:
    """The sums of one tensor."""

    squares: Any  # float64 [matrices, columns]
    counts: Any  # int64 [experts], or [1] if every matrix reads all rows


class Activations:
    """The sums of all tensors, collected by an evaluation callback."""

    def __init__(self, *, includes_output: bool) -> None:
        self.sums: dict[str, Sums] = {}
        self._includes_output = includes_output
        self._numbers = TensorNumbers()
        numbers = operation_numbers()
        self._mul_mat, self._mul_mat_id = numbers["MUL_MAT"], numbers["MUL_MAT_ID"]
        self._seen = 0  # tensors of this computation
        self._last = 0  # tensors of the first computation: later ones end after as many
        self._source: tuple[Any, Any] = (None, None)  # the input summed last, and its sums

    def begin(self) -> None:
        self._last = self._last or self._seen
        self._seen, self._source = 0, (None, None)

    def watch(self, tensor: GgmlTensor, ask: bool) -> bool:
        """Observe a tensor, see llama.parameters.Watch; end the computation after the last required tensor.

        Raises:
            BadModelError: the model computed numbers that are not finite.
        """
        if ask:
            return self._is_required(tensor)
        self._add(tensor)
        self._seen += 1
        return self._seen != self._last

    def _is_required(self, tensor: GgmlTensor) -> bool:
        if tensor.op == self._mul_mat_id:
            return True
        if tensor.op != self._mul_mat:
            return False
        weights, inputs = tensor.source(0), tensor.source(1)
        if inputs.ne[1] < _MIN_ROWS or inputs.type != _F32:
            return False
        name = weights.plain_name
        return name.startswith("blk.") or (self._includes_output and name == "output.weight")

    def _add(self, tensor: GgmlTensor) -> None:
        weights, inputs = tensor.source(0), tensor.source(1)
        name = weights.plain_name
        if tensor.op == self._mul_mat_id:
            chosen = self._numbers(tensor.source(2), ctypes.c_int32)
            squares, counts = _experts(self._numbers(inputs), chosen[0, 0], weights.ne[2])
        else:
            source = (tensor.src[1], weights.ne[3], weights.ne[2])
            if source != self._source[0]:  # query, key and value have the same inputs
                self._source = (source, _dense(self._numbers(inputs), weights.ne[3], weights.ne[2]))
            squares, counts = self._source[1]
        before = self.sums.get(name)
        if before is None:
            self.sums[name] = before = Sums(squares.astype("f8"), counts.copy())
        else:
            before.squares += squares
            before.counts += counts
        if not np.isfinite(before.squares).all():
            raise BadModelError(f"the inputs of {name} are not finite numbers", why="the model is damaged or overflows")


def _dense(inputs: Any, n_outer: int, n_inner: int) -> tuple[Any, Any]:
    """Return the sums over all rows for each of the weights' matrices, which are broadcast over more inputs.

    Args:
        inputs: float32 [outer, inner, rows, columns].
        n_outer, n_inner: of the weights' matrices.
    """
    outer, inner, rows, columns = inputs.shape
    if outer == inner == n_outer == n_inner == 1:
        plain = inputs[0, 0]
        return np.einsum("rc,rc->c", plain, plain)[None], np.array([rows])
    squares = np.zeros((n_outer * n_inner, columns))
    for o in range(outer):
        for i in range(inner):
            matrix = (o % n_outer) * n_inner + i % n_inner
            squares[matrix] += np.einsum("rc,rc->c", inputs[o, i], inputs[o, i])
    return squares, np.array([outer * inner * rows // (n_outer * n_inner)])


def _experts(inputs: Any, chosen: Any, n_experts: int) -> tuple[Any, Any]:
    """Return the sums of each expert over its tokens.

    Args:
        inputs: float32 [1, tokens, inputs of a token, columns]: one input for all of its experts, or one for each.
        chosen: int32 [tokens, experts of a token].
    """
    squares = np.zeros((n_experts, inputs.shape[3]))
    for expert in np.unique(chosen):
        tokens, places = np.nonzero(chosen == expert)
        rows = inputs[0, tokens, places % inputs.shape[2]]
        squares[expert] = np.einsum("rc,rc->c", rows, rows)
    return squares, np.bincount(chosen.reshape(-1), minlength=n_experts)


@dataclass(slots=True)
class _Piece:
    prompt: CalibrationPrompt
    start: list[int]
    text: str = ""
    is_whole: bool = False


class Author:
    """A generation loop that writes texts with one model."""

    def __init__(self, model: LlamaModel, threads: int, n_ctx: int) -> None:
        """Create the context; raise UsageError if the model can't generate text."""
        self._model = model
        load = Load(model.path, n_ctx, n_batch=512, n_seq_max=PARALLEL, threads=threads, gpu_layers=model.gpu_layers)
        try:
            self._context = LlamaContext(model, load)
        except BadModelError as error:
            raise UsageError(
                "this model can't write its own calibration text",
                why=error.why,
                hint="name a text: --calibration FILE",
            ) from None
        self._engine = Engine(self._context)
        self._prompts = PromptWriter(model.vocabulary, model.chat_template, self._context.n_ctx)

    def close(self) -> None:
        self._context.close()

    def write(
        self,
        prompts: List[CalibrationPrompt],
        n_tokens: int,
        seconds: float,
        seed: int,
        report: Callable[[int, float], None],
    ) -> tuple[list[int], str]:
        """Write until there are n_tokens tokens, prompts included, or the time is over.

        Args:
            prompts: used in turn, repeatedly; questions are left out if the model has no usable chat template.

        Returns:
            The tokens of all texts, and the readable text.

        Raises:
            BadModelError: the model computes logits that are not numbers.
        """
        usable = self._usable(prompts)
        # Many subjects are worth more than long texts: all get equal shares.
        max_tokens = max(_MIN_PIECE, n_tokens // len(usable))
        pieces: list[_Piece] = []
        n_written, running, began = 0, 0, time.monotonic()
        while n_written < n_tokens and time.monotonic() - began < seconds:
            while running < PARALLEL:
                pieces.append(self._begin(usable[len(pieces) % len(usable)], len(pieces), seed, max_tokens))
                running += 1
            for event in self._engine.step():
                if isinstance(event, Failed):
                    raise event.error()
                if isinstance(event, Started):
                    n_written += event.prompt_tokens
                elif isinstance(event, TextDelta):
                    pieces[event.request].text += event.text
                    n_written += event.tokens
                elif isinstance(event, Finished):
                    pieces[event.request].is_whole = event.reason == "stop"
                    running -= 1
            report(n_written, time.monotonic() - began)
        return self._joined(pieces)

    def _usable(self, prompts: List[CalibrationPrompt]) -> list[CalibrationPrompt]:
        """Return all prompts, or only the plain ones if the chat template fails or fills half of the context."""
        questions = [prompt for prompt in prompts if prompt.is_question]
        with suppress(BadTemplateError):
            if questions and len(self._tokens(questions[0])) <= self._context.n_ctx // 2:
                return list(prompts)
        return [prompt for prompt in prompts if not prompt.is_question]

    def _begin(self, prompt: CalibrationPrompt, number: int, seed: int, max_tokens: int) -> _Piece:
        tokens = self._tokens(prompt)
        sampling = replace(_SAMPLING, seed=(seed + number) % 2**32)
        room = max(1, self._context.n_ctx - len(tokens))
        sampler = SequenceSampler(sampling, self._model.vocabulary, tokens)
        self._engine.add(Sequence(number, tokens, sampler, AnswerRequest(limits=Limits(min(max_tokens, room)))))
        return _Piece(prompt, tokens)

    def _tokens(self, prompt: CalibrationPrompt) -> list[int]:
        if prompt.is_question:
            request = AnswerRequest((Message("user", prompt.text),))
        else:
            request = AnswerRequest(prompt=prompt.text)
        return self._prompts.prompt(Generate(0, request)).tokens

    def _joined(self, pieces: List[_Piece]) -> tuple[list[int], str]:
        """Concatenate all texts as they were in the model's context, without begin-of-sequence tokens."""
        vocabulary = self._model.vocabulary
        tokens: list[int] = []
        for piece in pieces:
            tokens += piece.start[1:] if piece.start[:1] == [vocabulary.bos] else piece.start
            tokens += vocabulary.tokenize(piece.text, special=False)
            if piece.prompt.is_question and piece.is_whole and vocabulary.end_of_turn >= 0:
                tokens.append(vocabulary.end_of_turn)
            tokens += vocabulary.tokenize("\n\n", special=False)
        texts = (piece.prompt.text + ("\n\n" if piece.prompt.is_question else "") + piece.text for piece in pieces)
        return tokens, "\n\n".join(texts)
