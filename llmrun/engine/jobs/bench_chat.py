"""Chat tests of the job `bench`: an answer as in `llmrun run`, and the parts of its time.

Owns the stopwatch between the generation loop and llama.cpp; must not know repetitions. The loop is loop.Engine itself,
with our sampler at its defaults, text and streaming. Only the model's end tokens are forbidden, because every answer
has to be as long as the test says.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llmrun.engine.channel import Outbox
from llmrun.engine.core.loop import Engine
from llmrun.engine.core.sampler import SequenceSampler
from llmrun.engine.llama.base import Inputs
from llmrun.errors import LlmrunError
from llmrun.protocol.jobs.bench import BenchAnswer, BenchTest
from llmrun.protocol.messages import Event, Failed, TextDelta
from llmrun.protocol.params import Limits, SamplingParams

if TYPE_CHECKING:
    from llmrun.engine.llama.context import LlamaContext

_TEXT = (
    "A library in the old harbour kept every letter that had ever been sent from the islands. In winter, when no ship "
    "could come, its keeper read them aloud to whoever was cold enough to sit by the stove: weather of 1803, the price "
    "of rope, a list of 47 birds, and a recipe for soup that nobody had ever managed to cook twice the same way. "
)


class _Stopwatch:
    """A context and its vocabulary in one, whose calls from the loop are timed.

    The loop samples between logits() and is_end(), and detokenizes until the next decode().
    """

    def __init__(self, context: LlamaContext) -> None:
        self.context = context
        self.vocabulary = self
        self.sampling_ns = self.text_ns = 0
        self.token_times: list[int] = []
        self._mark = 0

    def __getattr__(self, name: str) -> Any:
        owner = self.context if hasattr(self.context, name) else self.context.vocabulary
        return getattr(owner, name)

    def decode(self, batch: Inputs) -> None:
        if self.token_times:
            self.text_ns += time.perf_counter_ns() - self._mark
        self.context.decode(batch)

    def logits(self, index: int) -> int:
        address = self.context.logits(index)
        self._mark = time.perf_counter_ns()
        return address

    def is_end(self, token: int) -> bool:
        now = time.perf_counter_ns()
        self.sampling_ns += now - self._mark
        self.token_times.append(now)
        self._mark = now
        return self.context.vocabulary.is_end(token)


class BenchConversation:
    """One prompt and its answer, in an empty context."""

    def __init__(self, context: LlamaContext, test: BenchTest, seed: int) -> None:
        self._stopwatch = _Stopwatch(context)
        self._engine = Engine(self._stopwatch)
        self._test = test
        self._text = _TEXT * (1 + (test.n_depth + test.n_prompt) // 16)
        vocabulary = context.vocabulary
        ends = [token for token in range(vocabulary.n_tokens) if vocabulary.is_end(token)]
        self._sampling = SamplingParams(seed=seed, logit_bias=tuple((token, -math.inf) for token in ends))

    def fill(self) -> None:
        """Fill the KV cache with the prompt's first n_depth tokens."""
        self._run(self._prompt()[: self._test.n_depth], 1, lambda *events: None)
        self._stopwatch.sampling_ns = self._stopwatch.text_ns = 0
        self._stopwatch.token_times.clear()

    def answer(self, send: Callable[[str], None]) -> tuple[int, BenchAnswer]:
        """Generate an answer; send its text as it comes.

        Returns:
            Nanoseconds from the prompt's text to the end of the answer's, and their parts.

        Raises:
            LlmrunError: llama.cpp failed.
        """
        first_text: list[int] = []

        def hand_on(*events: Event) -> None:
            for event in events:
                if isinstance(event, TextDelta):
                    send(event.text)
                    first_text.append(time.perf_counter_ns())

        began = time.perf_counter_ns()
        self._run(self._prompt(), self._test.n_gen, hand_on)
        ns = time.perf_counter_ns() - began
        watch, times = self._stopwatch, self._stopwatch.token_times
        gaps = tuple(after - before for before, after in itertools.pairwise(times))
        return ns, BenchAnswer((first_text or [began + ns])[0] - began, gaps, watch.sampling_ns, watch.text_ns)

    def _prompt(self) -> list[int]:
        tokens = self._stopwatch.context.vocabulary.tokenize(self._text, special=False)
        return tokens[: self._test.n_depth + self._test.n_prompt]

    def _run(self, prompt: list[int], n_tokens: int, hand_on: Callable[..., None]) -> None:
        outbox = Outbox(hand_on)
        sampler = SequenceSampler(self._sampling, self._stopwatch, prompt)
        self._engine.add(0, prompt, sampler, Limits(max_tokens=n_tokens))
        while self._engine.busy:
            events = self._engine.step()
            for event in events:
                if isinstance(event, Failed):
                    raise event.error()
            outbox.add(events)
        if len(self._stopwatch.token_times) < n_tokens:
            raise LlmrunError("the model ended its answer before the test did")
