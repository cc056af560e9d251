"""The state of one request in the generation loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from llmrun._native import StepShape
from llmrun.engine.core.media import text_only
from llmrun.engine.core.metrics import Metrics
from llmrun.engine.core.prefix import NO_SALT, Salt, common_prefix
from llmrun.engine.core.sampler import SequenceSampler
from llmrun.engine.core.text import LogprobStream, TextStream
from llmrun.protocol.adapters import AdapterScale
from llmrun.protocol.messages import DraftedToken, PromptDifference, Started, Stats, TextDelta

if TYPE_CHECKING:
    from llmrun.engine.core.drafts import Drafting
    from llmrun.engine.core.media import PromptMedia
    from llmrun.engine.core.repeats import RepeatGuard
    from llmrun.engine.llama.base import Vocabulary
    from llmrun.engine.prompt.history import OpenTurn
    from llmrun.engine.prompt.thinking import ThinkingBudget
    from llmrun.protocol.answer import AnswerSplitter
    from llmrun.protocol.messages import AnswerPart, AnswerRequest, Event
    from llmrun.protocol.speculation import StepDraft


class SequenceError(Exception):
    """An exception that is one sequence's own fault: it alone ends."""

    def __init__(self, sequence: Sequence, error: Exception) -> None:
        super().__init__(str(error))
        self.sequence, self.error = sequence, error


@contextmanager
def blame(sequence: Sequence) -> Iterator[None]:
    """Raise SequenceError for an exception in the block."""
    try:
        yield
    except Exception as error:
        raise SequenceError(sequence, error) from error


_CONTINUES = "", ""
_PLAIN_START = Started(0, 0, 0, 0)


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in the loop: its prompt and its answer so far, and the features that it uses."""

    request: int  # the front's number for it
    tokens: list[int]  # prompt and answer
    sampler: SequenceSampler
    asked: AnswerRequest  # without its texts and media, once it has ended
    salt: Salt = NO_SALT  # prefixes are shared only among requests with the same salt
    adapters: tuple[AdapterScale, ...] = ()  # to compute with
    media: PromptMedia | None = None  # images and audio of the prompt
    # drafts tokens, to verify several in a step; None decodes one token a step
    drafting: Drafting | None = None
    shown_controls: frozenset[int] = frozenset()  # control tokens whose text is part of the answer
    splitter: AnswerSplitter | None = None  # splits the answer into its parts; None if it is only text; see split_by()
    thinking: ThinkingBudget | None = None  # limits the reasoning
    guard: RepeatGuard | None = None  # ends an answer that repeats itself
    closing: str = ""  # closes the reasoning, if that repeats itself; "" without reasoning
    turn: OpenTurn | None = None  # remembers the answer for later prompts of the conversation
    metrics: Metrics = field(default_factory=Metrics)
    announcement: Started = _PLAIN_START  # what the preparation of the request knows of it

    n_prompt: int = field(init=False)  # tokens of the prompt
    text: TextStream = field(init=False)
    logprobs: LogprobStream | None = field(init=False)  # None if the request has none
    number: int = -1  # its place in the order of arrival
    admitted: bool = False  # it has, or had, a slot
    slot: int = -1  # llama.cpp's sequence id while it runs
    n_reused: int = 0  # prompt tokens that needed no prefill
    n_cached: int = 0  # tokens that are in the KV cache now
    n_progress: int = 0  # prompt tokens that were told within a batch, without reused ones
    n_fed: int = 0  # tokens before the draft
    n_shown: int = 0  # answer tokens that were sent with their text
    n_told: int = 0  # answer tokens whose ids were sent
    n_retracted: int = 0  # answer tokens that were retracted
    must_close: bool = False  # the reasoning repeats itself: the next tokens close it
    n_loops_closed: int = 0
    # tokens that this step decodes after all others, to verify them; never part of tokens
    draft: list[int] = field(default_factory=list)
    drafts: list[StepDraft] = field(default_factory=list)  # of all steps
    n_drafted: int = 0  # drafted tokens that were decoded
    n_model_drafted: int = 0  # of these, those of a draft model or the model's heads
    n_accepted: int = 0  # of all, the accepted ones; those of the current draft are added when it ends
    n_model_accepted: int = 0
    drafted: dict[int, DraftedToken] = field(default_factory=dict)  # index in tokens -> what was drafted there
    n_steps: int = 0  # batches with logits for this sequence
    # index in tokens -> token ids that are excluded there, given the tokens before
    refused: dict[int, set[int]] = field(default_factory=dict)
    cancelled: bool = False  # its client has cancelled it
    passed: int = 0  # number of younger sequences that were admitted before it
    awaits_prefix: bool = False  # another sequence is prefilling a prefix that this one can reuse

    def __post_init__(self) -> None:
        self.tokens = list(self.tokens)
        self.n_prompt = len(self.tokens)
        self.text = TextStream(self.asked.limits.stop, self.asked.limits.ban)
        self.logprobs = LogprobStream() if self.asked.logprobs is not None else None

    def split_by(self, splitter: AnswerSplitter) -> None:
        """Split the answer into its parts; stops count only outside of the reasoning."""
        self.splitter, self.text.mask = splitter, splitter.mask

    def admit(self, slot: int, n_cached: int, now: float) -> None:
        """Assign a slot, which holds the first n_cached tokens."""
        if not self.admitted:
            self.metrics.admitted = now
        self.n_reused = min(self.n_reused, n_cached) if self.admitted else n_cached
        self.admitted, self.slot, self.n_cached = True, slot, n_cached

    def started(self, difference: PromptDifference | None = None) -> Started:
        """Return the event for its admission."""
        return self.announcement._replace(
            request=self.request,
            prompt_tokens=self.n_prompt,
            reused_tokens=self.n_reused,
            seed=self.sampler.seed,
            difference=difference,
        )

    @property
    def n_waiting(self) -> int:
        """Tokens that are not in the KV cache yet."""
        return len(self.tokens) - self.n_cached

    @property
    def n_ready(self) -> int:
        """Waiting tokens that fit into one batch: text up to the next image or audio, or a chunk of these."""
        media = self.media
        return self.n_waiting if media is None else media.n_batchable(self.n_cached, len(self.tokens))

    @property
    def is_at_media(self) -> bool:
        return self.tokens[self.n_cached] < 0

    @property
    def is_plain(self) -> bool:
        """Sampling its next token needs nothing but the logits after the last one; it may have drafts."""
        drafts_natively = self.drafting is None or self.drafting.is_native
        is_decoding = self.n_waiting == 1 and self.n_completion > 0 and drafts_natively
        return is_decoding and self.sampler.is_plain and not self.asked.limits.ban

    @property
    def is_closing(self) -> bool:
        """Whether the next tokens close the reasoning: it repeats itself, or its budget is used up."""
        return self.must_close or (self.thinking is not None and self.thinking.is_used_up)

    @property
    def text_tokens(self) -> list[int]:
        """Its tokens without those of images and audio."""
        return self.tokens if self.media is None else text_only(self.tokens)

    @property
    def n_completion(self) -> int:
        return len(self.tokens) - self.n_prompt

    def plan_draft(self, drafting: Drafting, limit: int, step: StepShape) -> int:
        """Return the maximum number of tokens that this step verifies for the sequence; mostly 0."""
        max_tokens = self.asked.limits.max_tokens
        if max_tokens is not None:
            limit = min(limit, max_tokens - self.n_completion - 1)
        return drafting.plan(self, limit, step)

    @property
    def n_verified(self) -> int:
        """Tokens of the current draft that were accepted."""
        return common_prefix(self.tokens[self.n_fed :], self.draft)

    @property
    def n_model_verified(self) -> int:
        """Accepted tokens of the current draft if it is a model's."""
        return self.n_verified if self.has_model_draft else 0

    @property
    def has_model_draft(self) -> bool:
        """Whether the current draft is a draft model's, or the heads'."""
        return bool(self.draft) and self.drafting is not None and self.drafting.is_by_model

    def end_draft(self) -> None:
        self.n_accepted += self.n_verified
        self.n_model_accepted += self.n_model_verified
        self.draft = []

    def retract(self, n_tokens: int) -> int:
        """Remove the answer's last tokens, and refuse the first of them there; return the number of tokens left."""
        remaining = len(self.tokens) - n_tokens
        self.end_draft()
        if self.drafting is not None:
            self.drafting.rewind(self, remaining)
        self.refused = {index: tokens for index, tokens in self.refused.items() if index <= remaining}
        self.refused.setdefault(remaining, set()).add(self.tokens[remaining])
        del self.tokens[remaining:]
        self.drafted = {index: drafted for index, drafted in self.drafted.items() if index < remaining}
        self.sampler.rewind(n_tokens, self.text_tokens)
        if self.thinking is not None:
            self.thinking.rewind(self.n_completion)
        if self.logprobs is not None:
            self.logprobs.retract(n_tokens)
        self.metrics.retract(n_tokens)
        self.n_retracted += n_tokens
        self.n_shown = min(self.n_shown, self.n_completion)
        return remaining

    def append(
        self, token: int, vocabulary: Vocabulary, window: int, now: float, events: list[Event]
    ) -> tuple[str, str]:
        """Append one token to the answer, and the event for its text; return as end_reason()."""
        self.tokens.append(token)
        self.metrics.record_token(now)
        if self.draft and self.sampler.is_reported:
            self._note_draft()
        if vocabulary.is_end(token):
            return "length" if self.sampler.is_cut_short else "stop", ""
        stream, is_shown = self.text, token in self.shown_controls
        text = stream.push(vocabulary.control_piece(token) if is_shown else vocabulary.piece(token))
        if self.logprobs is not None and self.sampler.logprob is not None:
            logprob = self.sampler.logprob._replace(draft=self.drafted.get(len(self.tokens) - 1))
            self.logprobs.push(logprob, stream.decoded)
        if text:
            ids = self._new_ids(len(self.tokens) - stream.n_undoable)
            events.append(self._delta(text, self.splitter.feed(text) if self.splitter is not None else None, ids))
        return _CONTINUES if stream.banned else self.end_reason(text, window)

    def _note_draft(self) -> None:
        """Note what the draft had in the place of the newest token, if the draft was right up to there."""
        place, draft = len(self.tokens) - 1 - self.n_fed, self.drafting.draft if self.drafting is not None else None
        if draft is None or place >= len(self.draft) or self.tokens[self.n_fed : -1] != self.draft[:place]:
            return
        token, likelihoods = self.draft[place], draft.probabilities
        self.drafted[len(self.tokens) - 1] = DraftedToken(
            draft.source,
            place + 1,
            self.sampler.text(token),
            token == self.tokens[-1],
            likelihoods[place] if place < len(likelihoods) else None,
        )

    def end_reason(self, text: str, window: int) -> tuple[str, str]:
        """Return the finish reason and its detail; "" if the answer continues."""
        if self.text.stopped_by:
            return "stop", self.text.stopped_by
        limit = self.asked.limits.max_tokens
        if self.thinking is not None:
            self.thinking.push(self.text.decoded)
        repeated = self.guard.push(text) if self.guard is not None else None
        is_full = len(self.tokens) > window or (limit is not None and self.n_completion >= limit)
        if repeated is None:
            return ("length", "") if is_full else _CONTINUES
        if is_full or not self.closing or self.splitter is None or not self.splitter.in_reasoning:
            return "repeats", repeated
        self.must_close = True
        return _CONTINUES

    def close_reasoning(self) -> str:
        """Return the text that closes a reasoning that repeats itself; a loop in what follows is found anew."""
        assert self.guard is not None
        self.must_close = False
        self.n_loops_closed += 1
        self.guard.restart()
        return self.closing

    def end(self) -> None:
        """Free what the finished request no longer needs: its slot may stay for long before another one takes it."""
        self.asked = replace(self.asked, messages=(), prompt=None, prompt_tokens=(), tools=())
        if self.drafting is not None:
            self.drafting.close(self)
        if self.media is not None:
            self.media.close()

    def last_deltas(self, text: str, *, is_cut_off: bool) -> list[TextDelta]:
        """Return the event for the rest of the answer, if there is any rest.

        Args:
            is_cut_off: the model did not end the answer itself.
        """
        splitter = self.splitter
        parts = None
        if splitter is not None:
            parts = *splitter.feed(text), *splitter.flush(is_cut_off=is_cut_off, stop=self.asked.limits.stop)
        ids = self._new_ids(len(self.tokens))
        return [self._delta(text, parts, ids)] if text or parts or ids else []

    def _new_ids(self, end: int) -> tuple[int, ...]:
        """Return the ids of the answer's tokens before an index that were not sent yet, if they were requested."""
        if not self.asked.token_ids:
            return ()
        start, self.n_told = self.n_prompt + self.n_told, end - self.n_prompt
        return tuple(self.tokens[start:end])

    def _delta(self, text: str, parts: tuple[AnswerPart, ...] | None, ids: tuple[int, ...]) -> TextDelta:
        """Return the event for text that became safe to show."""
        before, self.n_shown = self.n_shown, self.n_completion
        logprobs = self.logprobs.show(text) if self.logprobs is not None else ()
        drafted = bool(self.draft) and self.n_verified == len(self.tokens) - self.n_fed
        delta = TextDelta(self.request, text, self.n_shown - before, logprobs, drafted, parts, ids)
        if self.turn is not None:
            self.turn.take(delta)
        return delta

    def stats(self, n_ctx: int, threads: tuple[int, int] = (0, 0)) -> Stats:
        """Return the figures of the answer.

        Args:
            n_ctx: context window in tokens.
            threads: as in Stats.
        """
        drafting, media = self.drafting, self.media
        return Stats(
            prompt_tokens=self.n_prompt,
            reused_tokens=self.n_reused,
            prefill_seconds=self.metrics.prefill_seconds,
            completion_tokens=self.n_completion,
            decode_seconds=self.metrics.decode_seconds,
            ttft_seconds=self.metrics.ttft_seconds,
            queue_seconds=self.metrics.queue_seconds,
            template_seconds=self.metrics.template_seconds,
            tokenize_seconds=self.metrics.tokenize_seconds,
            grammar_seconds=self.metrics.grammar_seconds,
            itl_p50_seconds=self.metrics.itl_quantile(0.5),
            itl_p95_seconds=self.metrics.itl_quantile(0.95),
            context_used=self.n_cached,
            n_ctx=n_ctx,
            overhead_seconds=self.metrics.overhead_seconds,
            seed=self.sampler.seed,
            retracted_tokens=self.n_retracted,
            drafted_tokens=self.n_drafted,
            accepted_tokens=self.n_accepted + self.n_verified,
            model_drafted=self.n_model_drafted,
            model_accepted=self.n_model_accepted + self.n_model_verified,
            decode_steps=self.n_steps,
            draft_steps=drafting.n_model_steps if drafting is not None else 0,
            media_tokens=media.n_tokens if media is not None else 0,
            media_seconds=media.seconds if media is not None else 0.0,
            loops_closed=self.n_loops_closed,
            threads=threads,
            draft_gain=drafting.speedup if drafting is not None and self.n_drafted else 0.0,
        )
