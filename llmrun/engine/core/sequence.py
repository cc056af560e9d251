"""One request's state while it is answered."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmrun.engine.core.gate import StepShape
from llmrun.engine.core.images import text_only
from llmrun.engine.core.metrics import Metrics
from llmrun.engine.core.prefix import common_prefix
from llmrun.engine.core.sampler import SequenceSampler
from llmrun.engine.core.text import TextStream
from llmrun.protocol.adapters import AdapterScale
from llmrun.protocol.messages import Started, Stats, TextDelta
from llmrun.protocol.params import Limits

if TYPE_CHECKING:
    from llmrun.engine.core.drafts import Drafting
    from llmrun.engine.core.images import PromptImages
    from llmrun.engine.core.logprobs import LogprobStream
    from llmrun.engine.core.repeats import RepeatGuard
    from llmrun.engine.prompt.thinking import ThinkingBudget
    from llmrun.protocol.answer import AnswerSplitter
    from llmrun.protocol.messages import AnswerPart


@dataclass(frozen=True, slots=True)
class Extras:
    """What a request may want besides an answer.

    Attributes:
        inside_thought: the prompt ends where the model is to think.
        thinking_tags: what encloses its thoughts; none where it does not think.
        thinking: how long it may think.
        guard: ends an answer that repeats itself.
        moves: the conversation lost its oldest turns; what the KV cache holds behind them is moved, not computed again.
        shown: control tokens whose text is part of the answer.
        logprobs: holds how likely the tokens were, as the sampler notes it, until their text is shown.
        salt: prefixes are shared only among equal ones.
        tool_syntax: of its tool calls, see llmrun.protocol.toolcalls; "" if it can have none.
        splitter: splits the answer into its parts; None if it is nothing but text.
        drafting: guesses tokens, to be verified several in a step; None decodes one token a step.
        pictures: of the prompt, and where they stand.
        adapters: that it is computed with.
    """

    inside_thought: bool = False
    thinking_tags: tuple[str, ...] = ()
    thinking: ThinkingBudget | None = None
    guard: RepeatGuard | None = None
    moves: bool = False
    shown: frozenset[int] = frozenset()
    logprobs: LogprobStream | None = None
    salt: str = ""
    tool_syntax: str = ""
    splitter: AnswerSplitter | None = None
    drafting: Drafting | None = None
    pictures: PromptImages | None = None
    adapters: tuple[AdapterScale, ...] = ()


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and the answer that grows behind it.

    Attributes:
        number: they are counted as they come.
        request: the front's number for it.
        tokens: prompt and answer.
        n_prompt: how many of them are the prompt.
        admitted: it has, or had, a slot.
        slot: llama.cpp's sequence id, whose KV cache it fills while it runs.
        n_reused: how many of the prompt were in the KV cache already.
        n_cached: how many of tokens are in the KV cache now.
        n_fed: how many of tokens stand before the draft.
        n_shown: how many answer tokens the text given out so far accounts for.
        n_retracted: how many answer tokens were taken back.
        draft: guessed tokens that go through the model behind all others in this step; never part of tokens.
        n_drafted: how many went through the model so.
        n_accepted: of these, that were chosen; those of this step's draft come when it ends.
        n_steps: batches that gave at least one token.
        refused: index of tokens -> what must not stand there, given what stands before.
        cancelled: somebody asked it to stop.
        passed: how many younger ones got in before it.
        awaits_prefix: another sequence is prefilling a prefix that this one can reuse.
    """

    number: int
    request: int
    tokens: list[int]
    n_prompt: int
    sampler: SequenceSampler
    text: TextStream
    limits: Limits
    metrics: Metrics
    extras: Extras
    admitted: bool = False
    slot: int = -1
    n_reused: int = 0
    n_cached: int = 0
    n_fed: int = 0
    n_shown: int = 0
    n_retracted: int = 0
    draft: list[int] = field(default_factory=list)
    n_drafted: int = 0
    n_accepted: int = 0
    n_steps: int = 0
    refused: dict[int, set[int]] = field(default_factory=dict)
    cancelled: bool = False
    passed: int = 0
    awaits_prefix: bool = False

    def admit(self, slot: int, n_cached: int) -> None:
        """It has a slot, which holds its first tokens."""
        self.n_reused = min(self.n_reused, n_cached) if self.admitted else n_cached
        self.admitted, self.slot, self.n_cached = True, slot, n_cached

    def started(self) -> Started:
        """The event for its admission."""
        extras = self.extras
        return Started(
            self.request,
            self.n_prompt,
            self.n_reused,
            self.sampler.seed,
            extras.inside_thought,
            extras.thinking_tags,
            extras.tool_syntax,
        )

    @property
    def n_waiting(self) -> int:
        """Tokens that are not in the KV cache yet."""
        return len(self.tokens) - self.n_cached

    @property
    def n_ready(self) -> int:
        """Tokens of these that can go through the model in one batch: as far as the next picture, or one picture."""
        pictures = self.extras.pictures
        return self.n_waiting if pictures is None else pictures.n_alike(self.n_cached, len(self.tokens))

    @property
    def is_at_image(self) -> bool:
        """Whether a picture comes next."""
        return self.tokens[self.n_cached] < 0

    @property
    def n_completion(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - self.n_prompt

    def plan_draft(self, drafting: Drafting, most: int, step: StepShape) -> int:
        """How many tokens may be verified beside what a step computes anyway; mostly none, at most so many."""
        if self.limits.max_tokens is not None:
            most = min(most, self.limits.max_tokens - self.n_completion - 1)
        return drafting.plan(self.tokens, most, step)

    @property
    def n_verified(self) -> int:
        """How many first tokens of the draft were chosen."""
        return common_prefix(self.tokens[self.n_fed :], self.draft)

    def end_draft(self) -> None:
        """No more tokens are drawn in this step."""
        self.n_accepted += self.n_verified
        self.draft = []

    def retract(self, n_tokens: int) -> int:
        """Take back the answer's last tokens and refuse the first of them there; how many tokens are left."""
        left = len(self.tokens) - n_tokens
        self.end_draft()
        if self.extras.drafting is not None:
            self.extras.drafting.rewind(left)
        self.refused = {index: tokens for index, tokens in self.refused.items() if index <= left}
        self.refused.setdefault(left, set()).add(self.tokens[left])
        del self.tokens[left:]
        self.sampler.rewind(n_tokens, self.tokens if self.extras.pictures is None else text_only(self.tokens))
        if self.extras.thinking is not None:
            self.extras.thinking.rewind(self.n_completion)
        if self.extras.logprobs is not None:
            self.extras.logprobs.retract(n_tokens)
        self.metrics.retracted(n_tokens)
        self.n_retracted += n_tokens
        self.n_shown = min(self.n_shown, self.n_completion)
        return left

    def end_reason(self, text: str, window: int) -> tuple[str, str]:
        """Why it ends with its last token, which made text safe to show, and what there is to say; or ""."""
        if self.text.stopped_by:
            return "stop", self.text.stopped_by
        extras, most = self.extras, self.limits.max_tokens
        if extras.thinking is not None:
            extras.thinking.push(self.text.decoded)
        repeated = extras.guard.push(text) if extras.guard is not None else None
        if repeated is not None:
            return "repeats", repeated
        full = len(self.tokens) > window
        return ("length", "") if full or (most is not None and self.n_completion >= most) else ("", "")

    def end(self) -> None:
        """It is answered no further."""
        for extra in (self.extras.drafting, self.extras.pictures):
            if extra is not None:
                extra.close()

    def delta(self, text: str) -> TextDelta:
        """Return the event for text that became safe to show."""
        splitter = self.extras.splitter
        return self._delta(text, splitter.feed(text) if splitter is not None else None)

    def last_deltas(self, text: str, *, is_cut_off: bool) -> list[TextDelta]:
        """Return the event for the rest of the answer, if there is any rest.

        Args:
            text: the last text that became safe to show.
            is_cut_off: the model did not end the answer itself.
        """
        splitter = self.extras.splitter
        parts = (*splitter.feed(text), *splitter.flush(is_cut_off=is_cut_off)) if splitter is not None else None
        return [self._delta(text, parts)] if text or parts else []

    def _delta(self, text: str, parts: tuple[AnswerPart, ...] | None) -> TextDelta:
        before, self.n_shown = self.n_shown, self.n_completion
        logprobs = self.extras.logprobs.show(text) if self.extras.logprobs is not None else ()
        drafted = bool(self.draft) and self.n_verified == len(self.tokens) - self.n_fed
        return TextDelta(self.request, text, self.n_shown - before, logprobs, drafted, parts)

    def stats(self, n_ctx: int) -> Stats:
        """What it cost up to now."""
        drafting, pictures = self.extras.drafting, self.extras.pictures
        return Stats(
            prompt_tokens=self.n_prompt,
            reused_tokens=self.n_reused,
            prefill_seconds=self.metrics.prefill_seconds,
            completion_tokens=self.n_completion,
            decode_seconds=self.metrics.decode_seconds,
            ttft_seconds=self.metrics.ttft_seconds,
            itl_p50_seconds=self.metrics.itl_quantile(0.5),
            itl_p95_seconds=self.metrics.itl_quantile(0.95),
            context_used=self.n_cached,
            n_ctx=n_ctx,
            overhead_seconds=self.metrics.overhead_seconds,
            seed=self.sampler.seed,
            retracted_tokens=self.n_retracted,
            drafted_tokens=self.n_drafted,
            accepted_tokens=self.n_accepted + self.n_verified,
            decode_steps=self.n_steps,
            draft_steps=drafting.model.n_steps if drafting is not None and drafting.model is not None else 0,
            picture_tokens=pictures.n_tokens if pictures is not None else 0,
            picture_seconds=pictures.seconds if pictures is not None else 0.0,
        )
