"""A loaded model: how a request becomes what the loop takes, and the loop.

Owns templates, grammars and saved states of one model; must not know the pipe. Preparing needs no context, so that
another thread than the loop's can do it: no step waits for a template or a grammar.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from llmrun import _native
from llmrun.engine.core.draft_model import DraftModel, ModelDrafter
from llmrun.engine.core.drafts import Drafting
from llmrun.engine.core.logprobs import LogprobStream
from llmrun.engine.core.loop import Engine
from llmrun.engine.core.sampler import SequenceSampler
from llmrun.engine.core.sequence import Extras
from llmrun.engine.llama.base import ALLOCATING
from llmrun.engine.prompt.template import NAMED, ChatTemplate, ControlTexts, Part
from llmrun.engine.prompt.thinking import Tags, ThinkingBudget, Thoughts, lead_in, opens, thinking_tags
from llmrun.engine.prompt.tools import offers_tools, waits_for_call
from llmrun.errors import BadModelError, BadTemplateError, ContextOverflowError, LlmrunError, UsageError
from llmrun.protocol.ended import SaveState, StateSaved
from llmrun.protocol.messages import (
    AnswerRequest,
    Count,
    Counted,
    Detokenize,
    Detokenized,
    Event,
    Generate,
    Load,
    Message,
    Rendered,
    Rendering,
    Tokenize,
    Tokenized,
    Tool,
)
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.protocol.toolcalls import HARMONY, Syntax

if TYPE_CHECKING:
    from llmrun.engine.constraint.matcher import Constraint, Matcher
    from llmrun.engine.core.states import KVStore
    from llmrun.engine.llama.base import Context, Vocabulary
    from llmrun.engine.llama.model import LlamaModel
    from llmrun.grammar import Grammar

_LONG_TOKEN = 32  # bytes; most are a few


class Prepared(NamedTuple):
    """A request as Engine.add() takes it."""

    request: int
    tokens: list[int]
    sampler: SequenceSampler
    limits: Limits
    extras: Extras


class Preparer:
    """Turns requests into what the loop takes.

    Attributes:
        thinking_tags: the texts between which the model thinks, as its own chat template has them; None if it doesn't.
    """

    def __init__(
        self, vocabulary: Vocabulary, template: str | None, n_ctx: int, draft_model: DraftModel | None = None
    ) -> None:
        """For a model with these tokens, this chat template, and a context window of so many tokens."""
        self._draft_model = draft_model
        self._vocabulary = vocabulary
        self._template = template
        self._n_ctx = n_ctx
        self.thinking_tags = thinking_tags(template)
        self._templates: dict[str, ChatTemplate] = {}
        self._control: ControlTexts | None = None

    def look_ahead(self) -> None:
        """Look through the vocabulary now, which the first grammar would otherwise do while others wait for Python."""
        from llmrun.engine.constraint.matcher import known_tokens

        with suppress(LlmrunError):  # the grammar will say it
            known_tokens(self._vocabulary)

    def prepare(self, generate: Generate, send: Callable[[Event], None]) -> Prepared:
        """All that a request needs before its first step.

        Raises:
            BadTemplateError: there is no chat template, or it fails.
            BadGrammarError: the grammar is broken, or asks for too much.
            BadModelError: the vocabulary lacks what the prompt is made of.
            UsageError: the prompt is empty, or certainly too long, or the sampling parameters are invalid.
        """
        asked = generate.asked
        syntax = None
        matcher = None if offers_tools(asked) else self._matcher(asked.grammar)
        text, tokens = self.prompt(generate, send)
        if offers_tools(asked):
            syntax = self._chat_template(asked.template).syntax
            matcher = self._calls(asked, syntax)
        calls = syntax is HARMONY
        tags = thinking_tags(asked.template, calls=calls) or thinking_tags(self._template, calls=calls)
        if matcher is not None and asked.prompt is None:
            lead = lead_in(tags, thinks=asked.thinking is not False)
            text += lead
            tokens += self._vocabulary.tokenize(lead, special=True)
        inside = tags is not None and opens(text, tags)
        constraint = self._constraint(asked, matcher, syntax, tags, inside=inside)
        sampling = self._sampling(asked, constraint)
        sampler = SequenceSampler(sampling, self._vocabulary, tokens, constraint, asked.remember, asked.logprobs)
        extras = self._extras(asked, tags, syntax, inside=inside)
        if asked.speculation is not None:
            model = ModelDrafter(self._draft_model) if self._draft_model is not None else None
            extras = replace(extras, drafting=Drafting(asked.speculation, _native.SuffixAutomaton(), tokens, model))
        return Prepared(generate.request, tokens, sampler, asked.limits, extras)

    def _sampling(self, asked: AnswerRequest, constraint: Constraint | None) -> SamplingParams:
        """How tokens are chosen: not the end token, where it is to be ignored.

        Raises:
            UsageError: that would leave nothing to choose where a grammar ends.
        """
        if not asked.limits.ignores_end:
            return asked.sampling
        if constraint is not None:
            raise UsageError("ignore_eos can't be used here", why="a grammar or a call of a tool has to end")
        vocabulary = self._vocabulary
        ends = ((token, -math.inf) for token in range(vocabulary.n_tokens) if vocabulary.is_end(token))
        return replace(asked.sampling, logit_bias=(*asked.sampling.logit_bias, *ends))

    def _constraint(
        self, asked: AnswerRequest, matcher: Matcher | None, syntax: Syntax | None, tags: Tags | None, *, inside: bool
    ) -> Constraint | None:
        """When the grammar begins to bind: with the answer, behind the thoughts, or with a call of a tool."""
        if matcher is not None and syntax is not None and waits_for_call(asked):
            from llmrun.engine.constraint.calls import UntilCall

            thoughts = Thoughts.begin(tags, inside=inside) if tags is not None else None
            return UntilCall(matcher, self._vocabulary, syntax, thoughts)
        if matcher is None or tags is None:
            return matcher
        from llmrun.engine.constraint.thoughts import AfterThoughts

        may_think = asked.prompt is None and asked.thinking is not False
        return AfterThoughts(matcher, self._vocabulary, tags, inside=inside, may_think=may_think)

    def _calls(self, asked: AnswerRequest, syntax: Syntax) -> Matcher:
        from llmrun.engine.constraint.calls import compile_calls

        return compile_calls(asked, syntax, self._vocabulary, self._control_tokens(syntax.marks))

    def _matcher(self, grammar: Grammar | None) -> Matcher | None:
        if grammar is None:
            return None
        from llmrun.engine.constraint.matcher import compile_grammar

        return compile_grammar(grammar, self._vocabulary)

    def _extras(self, asked: AnswerRequest, tags: Tags | None, syntax: Syntax | None, *, inside: bool) -> Extras:
        thinking = guard = None
        if tags is not None and asked.thinking_tokens is not None:
            thinking = ThinkingBudget(tags, inside, asked.thinking_tokens)
        if asked.stops_repeats:
            from llmrun.engine.core.repeats import RepeatGuard

            guard = RepeatGuard()
        return Extras(
            inside_thought=inside,
            thinking_tags=tags or (),
            thinking=thinking,
            guard=guard,
            moves=asked.moves,
            logprobs=LogprobStream() if asked.logprobs is not None else None,
            salt=asked.salt,
            shown=self._control_tokens((*(tags or ()), *(syntax.marks if syntax else ()))),
            tool_syntax=syntax.name if syntax else "",
        )

    def count(self, count: Count, send: Callable[[Event], None]) -> Counted:
        """How many tokens a conversation has.

        Raises:
            BadTemplateError: there is no chat template, or it fails.
            BadModelError: the vocabulary lacks what the conversation is made of.
            UsageError: the prompt is empty, or its last message alone certainly too long.
        """
        self._refuse_endless(count.asked.messages[-1:])
        each = tuple(len(self._vocabulary.tokenize(message.content, special=False)) for message in count.asked.messages)
        return Counted(count.request, each, len(self.prompt(count, send)[1]))

    def tokenize(self, tokenize: Tokenize) -> Tokenized:
        """The token ids of a text.

        Raises:
            BadModelError: the vocabulary can't write it.
            ContextOverflowError: it is certainly longer than the context window.
        """
        self._refuse_endless([Message("user", tokenize.text)])
        tokens = self._vocabulary.tokenize(tokenize.text, special=tokenize.special)
        return Tokenized(tokenize.request, tuple(tokens))

    def detokenize(self, detokenize: Detokenize) -> Detokenized:
        """The text of tokens.

        Raises:
            UsageError: the vocabulary has no such token.
        """
        vocabulary, tokens = self._vocabulary, detokenize.tokens
        wrong = next((token for token in tokens if not 0 <= token < vocabulary.n_tokens), None)
        if wrong is not None:
            raise UsageError(f"there is no token {wrong}", why=f"the vocabulary has {vocabulary.n_tokens:,}")
        data = b"".join(map(vocabulary.control_piece, tokens))
        return Detokenized(detokenize.request, data.decode("utf-8", "replace"))

    def prompt(
        self, request: Generate | Count, send: Callable[[Event], None] = lambda event: None
    ) -> tuple[str, list[int]]:
        """Text and token ids of what is asked: a rendered conversation, or a plain text.

        Raises:
            BadTemplateError: there is no chat template, or it fails.
            BadModelError: the vocabulary lacks what the prompt is made of.
            UsageError: the prompt is empty, or certainly too long.
        """
        asked = request.asked
        if asked.prompt is not None:
            self._refuse_endless([Message("user", asked.prompt)])
            parts = [Part(asked.prompt, False)]
            empty = UsageError("the prompt is empty", hint="type something")
        else:
            if isinstance(request, Generate):
                self._refuse_endless(asked.messages, asked.tools)
            with ALLOCATING:
                send(Rendering(request.request))
                template = self._chat_template(asked.template)
                tools = asked.tools if offers_tools(asked) else ()
                parts = template.render(asked.messages, self._control_texts(), thinking=asked.thinking, tools=tools)
            send(Rendered(request.request))
            empty = UsageError(
                "the prompt is empty",
                why="the chat template writes nothing for this conversation",
                hint="another one goes with --template",
            )
        text = "".join(part.text for part in parts)
        tokens = self._tokens(parts)
        if not tokens:
            raise empty
        return text, tokens

    def _refuse_endless(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        """Refuse what has more tokens than the context window, whatever they are: finding out which takes minutes.

        Raises:
            ContextOverflowError: it has.
        """
        texts = (*(text for message in messages for text in message.texts), *(text for tool in tools for text in tool))
        n_bytes = sum(len(text.encode("utf-8", "replace")) for text in texts)
        if n_bytes <= self._n_ctx * _LONG_TOKEN:
            return
        vocabulary = self._vocabulary
        longest = max(len(vocabulary.piece(token)) for token in range(vocabulary.n_tokens))
        least = n_bytes // max(longest, 1)
        if least > self._n_ctx:
            raise ContextOverflowError(
                f"the prompt is at least {least:,} tokens long, the context window {self._n_ctx:,}",
                hint="shorten it, or ask for a larger context window with --ctx",
            )

    def _tokens(self, parts: Sequence[Part]) -> list[int]:
        """Token ids of a prompt; none where it has no text.

        Raises:
            BadModelError: the vocabulary lacks some.
        """
        vocabulary = self._vocabulary
        found = [token for part in parts for token in vocabulary.tokenize(part.text, special=part.special)]
        tokens = vocabulary.with_bos(found)
        lost = not found and any(part.text for part in parts)
        if lost or (tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary.n_tokens):
            raise BadModelError(
                "the model's vocabulary can't write this prompt",
                why="it has no token for some of its characters",
                hint="the file is probably damaged, or badly converted: download another one",
            )
        return tokens

    def _chat_template(self, template: str | None) -> ChatTemplate:
        source = template or self._template
        if source is None:
            raise BadTemplateError(
                "this model comes without a chat template",
                hint="complete plain text with --raw, or give a template with --template chatml or --template FILE",
            )
        source = NAMED.get(source, source)
        if source not in self._templates:
            vocabulary = self._vocabulary
            self._templates[source] = ChatTemplate(source, bos=vocabulary.bos_text, eos=vocabulary.eos_text)
        return self._templates[source]

    def _control_texts(self) -> ControlTexts:
        if self._control is None:
            self._control = ControlTexts(self._vocabulary.control_texts)
        return self._control

    def _control_tokens(self, texts: Sequence[str]) -> frozenset[int]:
        """Those that the texts are written with."""
        tokens = (token for text in texts for token in self._vocabulary.tokenize(text, special=True))
        return frozenset(token for token in tokens if not self._vocabulary.piece(token))


class LoadedModel:
    """The loop over one model, and what prepares its requests.

    Attributes:
        preparer: for a thread of its own.
        engine: the loop.
        weights: what it computes with.
        load: as it was loaded.
    """

    def __init__(self, weights: LlamaModel, context: Context, load: Load, drafts: Context | None = None) -> None:
        """Over a model's context, and that of its draft model."""
        self.weights, self.load = weights, load
        draft_model = DraftModel(drafts, weights.vocabulary.n_tokens) if drafts is not None else None
        self.preparer = Preparer(weights.vocabulary, weights.chat_template, context.n_ctx, draft_model)
        self.engine = Engine(context, states=_states(load, weights), draft_model=draft_model, exact=load.exact)
        self._is_shared = load.n_seq_max > 1

    @property
    def is_worn_out(self) -> bool:
        """Whether a new engine serves better: a grammar that nobody waits for any more is read on, on a core."""
        matcher = sys.modules.get("llmrun.engine.constraint.matcher")  # where there was a grammar
        return self._is_shared and matcher is not None and matcher.runaways() > 0

    def save(self, save: SaveState) -> StateSaved:
        """Save an answer's KV state; nothing is saved where it can't be written, because it is only a cache.

        Raises:
            UsageError: another answer came after it.
        """
        tokens = n_bytes = 0
        with suppress(OSError):
            tokens, n_bytes = self.engine.save(save.answer, prompt_only=save.prompt_only)
        return StateSaved(save.request, tokens, n_bytes)


def _states(load: Load, weights: LlamaModel) -> KVStore | None:
    """Where this model's KV states are saved; what they depend on is part of the key."""
    if not load.states:
        return None
    from llmrun.engine.core.states import KVStore, model_key
    from llmrun.engine.llama.library import VERSION

    with suppress(OSError):
        cache = f"{load.kv_type_k} {load.kv_type_v} {load.flash_attention}"  # as it lies in memory
        key = f"{model_key(Path(weights.path))} llama-cpp-python {VERSION} {cache}"
        return KVStore(Path(load.states), key, load.states_bytes)
    return None
