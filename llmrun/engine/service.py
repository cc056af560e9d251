"""The preparation of requests for the loop: prompt, grammar, reasoning and sampler, step by step.

It needs no llama.cpp context, so that a thread of its own can do it, and no step waits for a template or a grammar.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from llmrun.engine.core.draft_source import DraftWeights
from llmrun.engine.core.drafts import Drafting
from llmrun.engine.core.media import text_only
from llmrun.engine.core.repeats import RepeatGuard
from llmrun.engine.core.sampler import SequenceSampler
from llmrun.engine.core.sequence import Sequence
from llmrun.engine.core.steps import ON_PROCESSOR, StepCosts
from llmrun.engine.llama.media import Projector
from llmrun.engine.prompt.thinking import (
    ReasoningTracker,
    ThinkingBudget,
    closing_text,
    constrained_tags,
    lead_in,
    opens,
    possible_reasoning,
)
from llmrun.engine.prompt.tools import allows_text, offers_tools, tells_tools
from llmrun.engine.prompt.writer import PromptWriter
from llmrun.errors import BadGrammarError, BadModelError, LlmrunError, UsageError
from llmrun.protocol.adapters import Adapter
from llmrun.protocol.answer import AnswerSplitter
from llmrun.protocol.messages import AnswerRequest, Event, Generate, begun_anew
from llmrun.protocol.reasoning import ReasoningSyntax
from llmrun.protocol.toolcalls import CallSyntax

if TYPE_CHECKING:
    from llmrun.engine.constraint.closing import TimelyEnd
    from llmrun.engine.constraint.matcher import Constraint, Matcher
    from llmrun.engine.llama.base import Vocabulary
    from llmrun.grammar import Grammar

_FORCED_THINKING = 4096
"""Maximum number of reasoning tokens before a call that must come, and at most half of the answer."""


class Preparer:
    """The preparation of requests for one model.

    Attributes:
        prompts: the writer of their prompts.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        template: str | None,
        n_ctx: int,
        draft_model: DraftWeights | None = None,
        *,
        projector: Projector | None = None,
        adapters: tuple[Adapter, ...] = (),
        predicts: bool = True,
        costs: StepCosts | None = None,
    ) -> None:
        self.prompts = PromptWriter(vocabulary, template, n_ctx, projector=projector, adapters=adapters)
        self._vocabulary, self._n_ctx = vocabulary, n_ctx
        self._draft_model, self._predicts = draft_model, predicts
        self._costs = costs or StepCosts(ON_PROCESSOR)

    def read_vocabulary(self) -> None:
        """Read the vocabulary now, which the first grammar would otherwise do while other requests wait."""
        from llmrun.engine.constraint.matcher import tokens_of

        with suppress(LlmrunError):  # compile_grammar() will report it
            tokens_of(self._vocabulary)

    def prepare(self, generate: Generate, send: Callable[[Event], None]) -> Sequence:
        """Return a request, ready for its first step.

        Raises:
            BadTemplateError: there is no chat template, or it fails.
            BadGrammarError: the grammar is invalid or exceeds a limit.
            BadModelError: the vocabulary has no tokens for the prompt.
            UsageError: the prompt is empty, or certainly too long, or the sampling parameters are invalid.
        """
        if not self._predicts:
            raise BadModelError("this model can't generate text", why="it is an encoder, made for embeddings")
        self.prompts.clock.start()
        sequence = self._sequence(generate, send)
        sequence.metrics = self.prompts.clock.end(generate.asked.arrived)
        return sequence

    def _sequence(self, generate: Generate, send: Callable[[Event], None]) -> Sequence:
        """Write the prompt, let the grammar begin in the right place, and say what happens to the answer's tokens."""
        request = generate.asked
        matcher = None if offers_tools(request) else self._matcher(request.grammar)
        prompt = self.prompts.prompt(generate, send)
        request, text, tokens = prompt.asked or request, prompt.text, prompt.tokens
        syntax = None
        if offers_tools(request):
            with self.prompts.clock.phase("template"):
                syntax = self.prompts.chat_template(request.template).syntax
            matcher = self._calls(request, syntax)
        reasoning = self.prompts.reasoning(request)
        beginning = self.prompts.beginning(request, text, reasoning)
        if beginning is not None:
            for part in beginning.parts:
                tokens += self._vocabulary.tokenize(part.text, special=part.special, begins=False)
        elif matcher is not None and request.prompt is None:
            lead = self._lead(request, reasoning, syntax)
            text += lead
            tokens += self._vocabulary.tokenize(lead, special=True, begins=False)
        inside = reasoning is not None and (opens(text, reasoning) if beginning is None else beginning.inside)
        with self.prompts.clock.phase("grammar"):
            constraint = self._constraint(request, matcher, syntax, reasoning, inside=inside)
        if beginning is not None and constraint is not None and not self._accepts(constraint, beginning.text):
            if request.may_begin_anew:
                return self._sequence(generate._replace(asked=begun_anew(request)), send)
            raise _not_continued(beginning.text)
        if request.limits.ignores_end and constraint is not None:
            raise UsageError("ignore_eos can't be used here", why="a grammar or a tool call has to end")
        end = self._end(request, constraint, matcher, n_prompt=len(tokens))
        sampler = self._sampler(request, tokens if prompt.media is None else text_only(tokens), constraint, end)
        adapters = self.prompts.adapters_for(request.adapters)
        sequence = Sequence(
            generate.request,
            tokens,
            sampler,
            request,
            salt=self.prompts.salt(request, adapters),
            adapters=adapters,
            media=prompt.media,
            drafting=self._drafting(request, tokens, has_media=prompt.media is not None),
            guard=RepeatGuard() if request.stops_repeats else None,
        )
        if prompt.turn is not None and beginning is None:  # else the answer's message has more than was generated
            prompt.turn.reasons |= inside or (reasoning is not None and text.rstrip().endswith(reasoning.closing))
            sequence.turn = prompt.turn
        self._follow_syntax(sequence, request, reasoning, syntax, inside=inside)
        if beginning is not None and sequence.splitter is not None:
            sequence.splitter.skip(beginning.text)
        if matcher is not None:
            sequence.announcement = sequence.announcement._replace(left_out=matcher.left_out)
        return sequence

    def _lead(self, request: AnswerRequest, reasoning: ReasoningSyntax | None, syntax: CallSyntax | None) -> str:
        """Return the text before a constrained answer that the grammar does not describe."""
        if reasoning is None and syntax is None:
            return self.prompts.chat_template(request.template).lead
        thinks = request.thinks is not False and (syntax is None or request.tool_choice == "auto")
        return lead_in(reasoning, thinks=thinks, calls=syntax is not None)

    def _sampler(
        self, request: AnswerRequest, tokens: list[int], constraint: Constraint | None, end: TimelyEnd | None
    ) -> SequenceSampler:
        """Return the sampler of an answer to these tokens; arguments as in its constructor."""
        return SequenceSampler(
            request.sampling,
            self._vocabulary,
            tokens,
            constraint,
            request.remember,
            request.logprobs,
            end,
            self._vocabulary.ends if request.limits.ignores_end else (),
            processed_logprobs=request.processed_logprobs,
        )

    def _drafting(self, request: AnswerRequest, tokens: list[int], *, has_media: bool) -> Drafting | None:
        """Return what drafts the answer's tokens.

        Args:
            has_media: the prompt has images or audio, which neither a draft model nor heads can read.
        """
        speculation = request.speculation
        if speculation is None:
            return None
        model = None if has_media else self._draft_model
        return Drafting(speculation, tokens, model, self._costs, is_repeatable=request.sampling.is_repeatable)

    def _matcher(self, grammar: Grammar | None) -> Matcher | None:
        if grammar is None:
            return None
        from llmrun.engine.constraint.matcher import compile_grammar

        with self.prompts.clock.phase("grammar"):
            return compile_grammar(grammar, self._vocabulary)

    def _calls(self, request: AnswerRequest, syntax: CallSyntax) -> Matcher:
        from llmrun.engine.constraint.calls import compile_calls

        with self.prompts.clock.phase("grammar"):
            return compile_calls(request, syntax, self._vocabulary, self.prompts.control_tokens(syntax.texts))

    def _accepts(self, constraint: Constraint, text: str) -> bool:
        """Advance a constraint by the text that the answer is given to begin with; return whether it allows that."""
        try:
            for token in self._vocabulary.tokenize(text, special=False):
                constraint.accept(token)
        except BadGrammarError:
            return False
        return True

    def _constraint(
        self,
        request: AnswerRequest,
        matcher: Matcher | None,
        syntax: CallSyntax | None,
        reasoning: ReasoningSyntax | None,
        *,
        inside: bool,
    ) -> Constraint | None:
        """Return the constraint that applies the grammar to the right part: answer, text after reasoning, or call."""
        tags = constrained_tags(reasoning, calls=syntax is not None) if reasoning is not None else None
        is_told = matcher is None and tells_tools(request) and request.grammar is None
        if is_told or (matcher is not None and syntax is not None and allows_text(request) and not syntax.has_header):
            from llmrun.engine.constraint.calls import ToolCallConstraint

            tracker = ReasoningTracker.begin(tags, inside=inside) if tags is not None else None
            written = syntax or self.prompts.chat_template(request.template).syntax
            return ToolCallConstraint(
                matcher, self._vocabulary, written, tracker, self.prompts.control_tokens(written.texts)
            )
        if matcher is None or tags is None:
            return matcher
        from llmrun.engine.constraint.reasoning import AfterReasoning

        may_think = request.prompt is None and request.thinks is not False
        return AfterReasoning(matcher, self._vocabulary, tags, inside=inside, may_think=may_think)

    def _end(
        self, request: AnswerRequest, constraint: Constraint | None, matcher: Matcher | None, *, n_prompt: int
    ) -> TimelyEnd | None:
        """Return what completes a constrained answer before its limit."""
        if constraint is None or matcher is None:
            return None
        from llmrun.engine.constraint.closing import TimelyEnd

        room, limit = self._n_ctx - n_prompt, request.limits.max_tokens
        n_tokens = room if limit is None else min(limit, room)
        return TimelyEnd(constraint, matcher.tokens, n_tokens, matcher.endings)

    def _follow_syntax(
        self,
        sequence: Sequence,
        request: AnswerRequest,
        reasoning: ReasoningSyntax | None,
        syntax: CallSyntax | None,
        *,
        inside: bool,
    ) -> None:
        """Set what tells reasoning and calls from the answer's text, and what limits the reasoning."""
        template = self.prompts.chat_template(request.template) if request.prompt is None else None
        if reasoning is None and template is not None:
            lead = template.lead if syntax is None else ""
            reasoning = possible_reasoning(self._vocabulary.control_texts, lead)
        elif reasoning is not None and (
            request.grammar is not None or request.begins or request.tool_choice not in ("auto", "none")
        ):
            reasoning = reasoning._replace(is_implied=False)  # the grammar, or the answer, begins at once
        if reasoning is not None or syntax is not None:
            taken = (call.id for message in request.messages for call in message.tool_calls)
            sequence.split_by(
                AnswerSplitter(reasoning or (), inside=inside, syntax=syntax, tools=request.tools, taken=taken)
            )
        if reasoning is not None:
            budget = self._thinking_tokens(request)
            # Where calls may follow, the grammar of calls has the text before an answer.
            closed = reasoning if syntax is None else reasoning._replace(lead="")
            sequence.thinking = ThinkingBudget(closed, inside, budget) if budget is not None else None
            sequence.closing = closing_text(closed)
        texts = [text for tags in (reasoning, syntax) if tags is not None for text in tags.texts]
        sequence.shown_controls = self.prompts.control_tokens(texts)
        sequence.announcement = sequence.announcement._replace(
            thinking=inside,
            thinking_tags=reasoning[:2] if reasoning is not None else (),
            tool_syntax=syntax.trigger if syntax is not None else "",
            rewritten=template.new_rewritings() if template is not None else (),
            history=sequence.turn.history if sequence.turn is not None else None,
        )

    def _thinking_tokens(self, request: AnswerRequest) -> int | None:
        """Return the maximum number of reasoning tokens; a call that must come is not waited for without end."""
        if request.thinking_tokens is not None or not offers_tools(request) or request.tool_choice == "auto":
            return request.thinking_tokens
        return min(_FORCED_THINKING, (request.limits.max_tokens or self._n_ctx) // 2)


def _not_continued(beginning: str) -> UsageError:
    what = f"an answer that begins with {beginning[:40]!r} can't be continued"
    return UsageError(what, why="its grammar, schema or tool choice does not allow that")
