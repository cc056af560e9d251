"""How a request becomes what the loop takes.

Owns templates and grammars of one model; must not know the pipe, nor the loop (loaded.py). Preparing needs no context,
so that another thread than the loop's can do it: no step waits for a template or a grammar.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from llmrun import _native
from llmrun.engine.core.draft_model import DraftModel, ModelDrafter
from llmrun.engine.core.drafts import Drafting
from llmrun.engine.core.images import ImageChunk, PlacedChunk, PromptImages, text_only
from llmrun.engine.core.logprobs import LogprobStream
from llmrun.engine.core.sampler import SequenceSampler
from llmrun.engine.core.sequence import Extras
from llmrun.engine.llama.base import ALLOCATING
from llmrun.engine.llama.media import Projector
from llmrun.engine.prompt.images import image_bytes
from llmrun.engine.prompt.template import NAMED, ChatTemplate, ControlTexts, Part
from llmrun.engine.prompt.thinking import ReasoningTracker, Tags, ThinkingBudget, lead_in, opens, thinking_tags
from llmrun.engine.prompt.tools import offers_tools, waits_for_call
from llmrun.errors import BadModelError, BadTemplateError, ContextOverflowError, LlmrunError, UsageError
from llmrun.protocol.adapters import Adapter, AdapterScale, applied, by_default
from llmrun.protocol.messages import (
    AnswerRequest,
    CountTokens,
    Detokenize,
    Detokenized,
    Event,
    Generate,
    Image,
    ImageAccepted,
    Message,
    Rendered,
    Rendering,
    TokenCount,
    Tokenize,
    Tokenized,
    Tool,
)
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.protocol.toolcalls import HARMONY, Syntax

if TYPE_CHECKING:
    from llmrun.engine.constraint.matcher import Constraint, Matcher
    from llmrun.engine.llama.base import Vocabulary
    from llmrun.grammar import Grammar
    from llmrun.protocol.answer import AnswerSplitter

    Pieces = Sequence[list[int] | ImageChunk]
    """What a picture is in a prompt: token ids, and what stands in place of some."""

_LONG_TOKEN = 32  # bytes; most are a few


class PreparedRequest(NamedTuple):
    """A request as Engine.add() takes it."""

    request: int
    tokens: list[int]
    sampler: SequenceSampler
    limits: Limits
    extras: Extras


class TokenizedPrompt(NamedTuple):
    """What is asked, as the model reads it.

    Attributes:
        text: of the prompt, without its pictures.
        tokens: ids; negative ones stand for pictures.
        pictures: and where they stand; None without any.
    """

    text: str
    tokens: list[int]
    pictures: PromptImages | None = None


class Preparer:
    """Turns requests into what the loop takes.

    Attributes:
        thinking_tags: the texts between which the model thinks, as its own chat template has them; None if it doesn't.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        template: str | None,
        n_ctx: int,
        draft_model: DraftModel | None = None,
        *,
        projector: Projector | None = None,
        adapters: Sequence[Adapter] = (),
        predicts: bool = True,
    ) -> None:
        """For a model with these tokens, this chat template, and a context window of so many tokens."""
        self._projector = projector
        self._lengths: dict[int, int] = {}  # of pictures that were looked at, in tokens
        self._adapters, self._predicts = adapters, predicts
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

    def prepare(self, generate: Generate, send: Callable[[Event], None]) -> PreparedRequest:
        """All that a request needs before its first step.

        Raises:
            BadTemplateError: there is no chat template, or it fails.
            BadGrammarError: the grammar is broken, or asks for too much.
            BadModelError: the vocabulary lacks what the prompt is made of.
            UsageError: the prompt is empty, or certainly too long, or the sampling parameters are invalid.
        """
        if not self._predicts:
            raise BadModelError("this model can't generate text", why="it is an encoder, made for embeddings")
        asked = generate.asked
        syntax = None
        matcher = None if offers_tools(asked) else self._matcher(asked.grammar)
        text, tokens, pictures = self.prompt(generate, send)
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
        said = tokens if pictures is None else text_only(tokens)
        sampler = SequenceSampler(sampling, self._vocabulary, said, constraint, asked.remember, asked.logprobs)
        extras = self._extras(asked, tags, syntax, inside=inside)
        if pictures is not None:
            assert self._projector is not None
            salt = f"{asked.salt} {generate.request}" if self._projector.is_exact else asked.salt
            extras = replace(extras, images=pictures, salt=salt)
        elif asked.speculation is not None:
            model = ModelDrafter(self._draft_model) if self._draft_model is not None else None
            extras = replace(extras, drafting=Drafting(asked.speculation, _native.SuffixAutomaton(), tokens, model))
        return PreparedRequest(generate.request, tokens, sampler, asked.limits, extras)

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
            from llmrun.engine.constraint.calls import ToolCallConstraint

            thoughts = ReasoningTracker.begin(tags, inside=inside) if tags is not None else None
            return ToolCallConstraint(matcher, self._vocabulary, syntax, thoughts)
        if matcher is None or tags is None:
            return matcher
        from llmrun.engine.constraint.reasoning import AfterReasoning

        may_think = asked.prompt is None and asked.thinking is not False
        return AfterReasoning(matcher, self._vocabulary, tags, inside=inside, may_think=may_think)

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
        adapters = self.adapters_for(asked.adapters)
        if tags is not None and asked.thinking_tokens is not None:
            thinking = ThinkingBudget(tags, inside, asked.thinking_tokens)
        if asked.stops_repeats:
            from llmrun.engine.core.repeats import RepeatGuard

            guard = RepeatGuard()
        return Extras(
            starts_in_reasoning=inside,
            thinking_tags=tags or (),
            thinking=thinking,
            guard=guard,
            moves=asked.moves,
            logprobs=LogprobStream() if asked.logprobs is not None else None,
            salt=self._salt(asked.salt, adapters),
            adapters=adapters,
            shown=self._control_tokens((*(tags or ()), *(syntax.marks if syntax else ()))),
            tool_syntax=syntax.name if syntax else "",
            splitter=_splitter(tags, syntax, asked.tools, inside=inside),
        )

    def adapters_for(self, asked: tuple[AdapterScale, ...] | None) -> tuple[AdapterScale, ...]:
        """The adapters that an answer is computed with.

        Raises:
            UsageError: there is no such adapter.
        """
        if asked is None:
            return by_default(self._adapters)
        wrong = next((number for number, _ in asked if not 0 <= number < len(self._adapters)), None)
        if wrong is not None:
            raise UsageError(f"there is no adapter {wrong}", why=f"the model was loaded with {len(self._adapters)}")
        return applied(asked)

    def _salt(self, asked: str, adapters: tuple[AdapterScale, ...]) -> str:
        """What keeps prefixes apart: what the client says, and the adapters that they were computed with.

        States without a salt may be saved, for those who load the model with the same adapters. No client can give a
        salt that means other adapters than its own.
        """
        is_usual = adapters == by_default(self._adapters)
        if not self._adapters or (is_usual and not asked):
            return asked
        return f"{'' if is_usual else [tuple(each) for each in adapters]}|{asked}"

    def count(self, count: CountTokens, send: Callable[[Event], None]) -> TokenCount:
        """How many tokens a conversation has.

        Raises:
            BadTemplateError: there is no chat template, or it fails.
            BadModelError: the vocabulary lacks what the conversation is made of.
            UsageError: the prompt is empty, or its last message alone certainly too long.
        """
        self._refuse_endless(count.asked.messages[-1:])
        tokenize, prompt = self._vocabulary.tokenize, self.prompt(count, send)
        each = [len(tokenize(message.content, special=False)) for message in count.asked.messages]
        for index, message in enumerate(count.asked.messages):
            each[index] += sum(self._lengths[hash(picture.data)] for picture in message.pictures)
        return TokenCount(count.request, tuple(each), len(prompt.tokens))

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
        self, request: Generate | CountTokens, send: Callable[[Event], None] = lambda event: None
    ) -> TokenizedPrompt:
        """What is asked, a rendered conversation or a plain text, as tokens.

        Raises:
            BadTemplateError: there is no chat template, or it fails.
            BadModelError: the vocabulary lacks what the prompt is made of.
            UsageError: the prompt is empty, or certainly too long.
        """
        asked = request.asked
        if asked.prompt is not None:
            self._refuse_endless([Message("user", asked.prompt)])
            parts: Sequence[Part | Image] = [Part(asked.prompt, False)]
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
        text = "".join(part.text for part in parts if isinstance(part, Part))
        see = partial(self._note_image, request.request, send if isinstance(request, Generate) else None)
        tokens, placed = self._tokens(parts, see)
        if not tokens:
            raise empty
        return TokenizedPrompt(text, tokens, PromptImages(placed) if placed else None)

    def _note_image(self, request: int, send: Callable[[Event], None] | None, picture: Image) -> Pieces:
        """A picture as tokens and vectors; send() is told about it.

        Raises:
            UsageError: the model can't see, or the picture is none.
            BadModelError: the projector does not go with the model.
        """
        if self._projector is None:
            raise UsageError("this model can't look at pictures", why="it was loaded without a projector")
        data, width, height = image_bytes(picture)
        pieces = self._projector.pieces(data, picture.name or "the picture")
        n_tokens = sum(len(piece if isinstance(piece, list) else piece.ids) for piece in pieces)
        self._lengths[hash(picture.data)] = n_tokens
        if send is not None:
            send(ImageAccepted(request, picture.name, width, height, n_tokens))
        return pieces

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

    def _tokens(
        self, parts: Sequence[Part | Image], see: Callable[[Image], Pieces]
    ) -> tuple[list[int], list[PlacedChunk]]:
        """Token ids of a prompt, none where it has no text, and where its pictures stand.

        Raises:
            BadModelError: the vocabulary lacks some.
        """
        vocabulary, found, placed = self._vocabulary, list[int](), list[PlacedChunk]()
        for part in parts:
            if isinstance(part, Part):
                found += vocabulary.tokenize(part.text, special=part.special)
            for piece in see(part) if isinstance(part, Image) else ():
                if isinstance(piece, list):
                    found += piece
                else:
                    placed.append(PlacedChunk(len(found), piece))
                    found += piece.ids
        tokens = vocabulary.with_bos(found)
        placed = [each._replace(start=each.start + len(tokens) - len(found)) for each in placed]
        said = text_only(tokens) if placed else tokens
        lost = not found and any(part.text for part in parts if isinstance(part, Part))
        if lost or (said and not 0 <= min(said) <= max(said) < vocabulary.n_tokens):
            raise BadModelError(
                "the model's vocabulary can't write this prompt",
                why="it has no token for some of its characters",
                hint="the file is probably damaged, or badly converted: download another one",
            )
        return tokens, placed

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


def _splitter(
    tags: Tags | None, syntax: Syntax | None, tools: Sequence[Tool], *, inside: bool
) -> AnswerSplitter | None:
    if tags is None and syntax is None:
        return None
    from llmrun.protocol.answer import AnswerSplitter  # few models reason, few requests have tools

    return AnswerSplitter(tags or (), inside=inside, tool_syntax=syntax.name if syntax else "", tools=tools)
