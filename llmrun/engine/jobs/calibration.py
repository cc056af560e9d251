"""Calibration text for an importance matrix, written by the model itself.

Owns the requests and the joining of the texts; the generation loop is loop.Engine, the prompts come with the command.
Many texts are written in parallel: a batch reads the weights once for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from llmrun.engine.core.loop import Engine
from llmrun.engine.core.sampler import SequenceSampler
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.model import LlamaModel
from llmrun.engine.service import Preparer
from llmrun.errors import BadModelError, BadTemplateError, UsageError
from llmrun.protocol.jobs.importance import CalibrationPrompt
from llmrun.protocol.loading import Load
from llmrun.protocol.messages import AnswerRequest, Failed, Finished, Generate, Message, Started, TextDelta
from llmrun.protocol.params import Limits, SamplingParams

PARALLEL = 16  # Texts written in parallel; each needs memory for its own KV cache
_MIN_TOKENS = 48  # of one text, unless it ends by itself
# The model's own distribution without the most unlikely tokens: of small models those would be noise.
_SAMPLING = SamplingParams(temperature=1.0, top_k=0, top_p=0.98, min_p=0.01)


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
        load = Load(
            model.path, n_ctx, n_ctx, n_batch=512, n_seq_max=PARALLEL, threads=threads, gpu_layers=model.gpu_layers
        )
        try:
            self._context = LlamaContext(model, load)
        except BadModelError as error:
            raise UsageError(
                "this model can't write its own calibration text",
                why=error.why,
                hint="name a text: --calibration FILE",
            ) from None
        self._engine = Engine(self._context)
        self._preparer = Preparer(model.vocabulary, model.chat_template, self._context.n_ctx)

    def close(self) -> None:
        self._context.close()

    def write(
        self,
        prompts: Sequence[CalibrationPrompt],
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
        max_tokens = max(_MIN_TOKENS, n_tokens // len(usable))
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

    def _usable(self, prompts: Sequence[CalibrationPrompt]) -> list[CalibrationPrompt]:
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
        self._engine.add(number, tokens, sampler, Limits(min(max_tokens, room)))
        return _Piece(prompt, tokens)

    def _tokens(self, prompt: CalibrationPrompt) -> list[int]:
        if prompt.is_question:
            request = AnswerRequest((Message("user", prompt.text),))
        else:
            request = AnswerRequest(prompt=prompt.text)
        return self._preparer.prompt(Generate(0, request))[1]

    def _joined(self, pieces: Sequence[_Piece]) -> tuple[list[int], str]:
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
