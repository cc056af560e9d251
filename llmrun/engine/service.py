"""The preparation of requests for the loop: prompt, tokens, grammar and sampler.

Owns templates and grammars of one model; must not know the pipe, nor the loop (loaded.py). It needs no llama.cpp
context, so that a thread of its own can do it, and no step waits for a template or a grammar.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

from llmrun import _native
from llmrun.engine.core.draft_model import DraftModel, ModelDrafter
from llmrun.engine.core.drafts import Drafting
from llmrun.engine.core.images import ImageChunk, PlacedChunk, PromptImages, text_only
from llmrun.engine.core.logprobs import LogprobStream
from llmrun.engine.core.probe import StepProbe
from llmrun.engine.core.sampler import SequenceSampler
from llmrun.engine.core.sequence import Extras
from llmrun.engine.llama.base import ALLOCATING, PIECE_TOKENS
from llmrun.engine.llama.media import Projector
from llmrun.engine.prompt.images import image_bytes, with_omitted_images
from llmrun.engine.prompt.template import NAMED, ChatTemplate, ControlTexts, Part
from llmrun.engine.prompt.thinking import (
    AnswerBeginning,
    ReasoningTracker,
    Tags,
    ThinkingBudget,
    lead_in,
    opens,
    thinking_tags,
)
from llmrun.engine.prompt.token_cache import TokenCache
from llmrun.engine.prompt.tools import allows_text, offers_tools
from llmrun.errors import (
    BadGrammarError,
    BadModelError,
    BadTemplateError,
    ContextOverflowError,
    LlmrunError,
    UsageError,
)
from llmrun.protocol.adapters import Adapter, AdapterScale, applied, by_default
from llmrun.protocol.jobs.tokenize import TextTokens, TokenizeText
from llmrun.protocol.messages import (
    AnswerRequest,
    Event,
    Generate,
    Image,
    ImageAccepted,
    Message,
    Rendered,
    Rendering,
    Tool,
)
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.protocol.questions import Detokenize, DetokenizedText, RenderedPrompt, TokenCount
from llmrun.protocol.toolcalls import HARMONY, Syntax

if TYPE_CHECKING:
    from llmrun.engine.constraint.matcher import Constraint, Matcher
    from llmrun.engine.llama.base import Vocabulary
    from llmrun.grammar import Grammar
    from llmrun.protocol.answer import AnswerSplitter

    Pieces = Sequence[list[int] | ImageChunk]  # An image in a prompt: token ids around vectors

_FORCED_THINKING = 4096
"""Maximum number of reasoning tokens before a call that must come, and at most half of the answer."""
_LONG_TOKEN = 32  # bytes; most have a few


class PreparedRequest(NamedTuple):
    """The arguments of Engine.add()."""

    request: int
    tokens: list[int]
    sampler: SequenceSampler
    limits: Limits
    extras: Extras


class TokenizedPrompt(NamedTuple):
    """A prompt in text and tokens."""

    text: str  # without its images
    tokens: list[int]  # ids; negative ones are images
    images: PromptImages | None = None  # None without any


class Preparer:
    """The preparation of requests for one model.

    Attributes:
        thinking_tags: the tags around reasoning in the model's own chat template; None if it has none.
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
        self._projector = projector
        self._image_lengths: dict[int, int] = {}  # hash of an image's data -> tokens
        self._adapters, self._predicts = adapters, predicts
        self._draft_model = draft_model
        self._vocabulary = vocabulary
        self._template = template
        self._n_ctx = n_ctx
        self.thinking_tags = thinking_tags(template)
        self._templates: dict[str, ChatTemplate] = {}
        self._token_cache: TokenCache | None = None
        self._control: ControlTexts | None = None

    def read_vocabulary(self) -> None:
        """Read the vocabulary now, which the first grammar would otherwise do while other requests wait."""
        from llmrun.engine.constraint.matcher import tokens_of

        with suppress(LlmrunError):  # compile_grammar() will report it
            tokens_of(self._vocabulary)

    def prepare(self, generate: Generate, send: Callable[[Event], None]) -> PreparedRequest:
        """Prepare a request for its first step.

        Raises:
            BadTemplateError: there is no chat template, or it fails.
            BadGrammarError: the grammar is invalid or exceeds a limit.
            BadModelError: the vocabulary has no tokens for the prompt.
            UsageError: the prompt is empty, or certainly too long, or the sampling parameters are invalid.
        """
        if not self._predicts:
            raise BadModelError("this model can't generate text", why="it is an encoder, made for embeddings")
        request = generate.asked
        syntax = None
        matcher = None if offers_tools(request) else self._matcher(request.grammar)
        text, tokens, images = self.prompt(generate, send)
        if offers_tools(request):
            syntax = self._chat_template(request.template).syntax
            matcher = self._calls(request, syntax)
        tags = self._tags(request, calls=syntax is HARMONY)
        beginning = self._beginning(request, text, tags)
        if matcher is not None and request.prompt is None and beginning is None:
            lead = lead_in(tags, thinks=request.thinks is not False)
            text += lead
            tokens += self._vocabulary.tokenize(lead, special=True)
        if beginning is not None:
            for part in beginning.parts:
                tokens += self._vocabulary.tokenize(part.text, special=part.special)
        inside = tags is not None and (opens(text, tags) if beginning is None else beginning.inside)
        constraint = self._constraint(request, matcher, syntax, tags, inside=inside)
        if beginning is not None and constraint is not None:
            self._accept(constraint, beginning.text)
        sampling = self._sampling(request, constraint)
        prompt = tokens if images is None else text_only(tokens)
        sampler = SequenceSampler(sampling, self._vocabulary, prompt, constraint, request.remember, request.logprobs)
        extras = self._extras(request, tags, syntax, inside=inside)
        if beginning is not None and extras.splitter is not None:
            extras.splitter.skip(beginning.text)
        if images is not None:
            assert self._projector is not None
            salt = f"{extras.salt} {generate.request}" if self._projector.is_exact else extras.salt
            extras = replace(extras, images=images, salt=salt)
        elif request.speculation is not None and request.speculation.probes:
            probe = StepProbe()
            extras = replace(extras, drafting=probe, probe=probe)
        elif request.speculation is not None:
            model = ModelDrafter(self._draft_model) if self._draft_model is not None else None
            extras = replace(extras, drafting=Drafting(request.speculation, _native.SuffixAutomaton(), tokens, model))
        return PreparedRequest(generate.request, tokens, sampler, request.limits, extras)

    def _tags(self, request: AnswerRequest, *, calls: bool = False) -> Tags | None:
        return thinking_tags(request.template, calls=calls) or thinking_tags(self._template, calls=calls)

    def _beginning(self, request: AnswerRequest, prompt: str, tags: Tags | None) -> AnswerBeginning | None:
        """Return what the answer is given to begin with; None for nothing.

        Raises:
            UsageError: there is no chat template, or the text is certainly too long.
        """
        if not (request.begins or request.begins_reasoning):
            return None
        if request.prompt is not None:
            raise UsageError("an answer with a given beginning has no plain prompt")
        self._raise_if_too_long([Message("assistant", request.begins, reasoning=request.begins_reasoning)])
        return AnswerBeginning.of(prompt, tags, request.begins_reasoning, request.begins)

    def _accept(self, constraint: Constraint, text: str) -> None:
        """Advance a constraint by the text that the answer is given to begin with.

        Raises:
            UsageError: it does not allow the text.
        """
        try:
            for token in self._vocabulary.tokenize(text, special=False):
                constraint.accept(token)
        except BadGrammarError:
            what = f"an answer that begins with {text[:40]!r} can't be continued"
            raise UsageError(what, why="its grammar, schema or tool choice does not allow that") from None

    def _sampling(self, request: AnswerRequest, constraint: Constraint | None) -> SamplingParams:
        """Return the sampling parameters, with end tokens banned if the request ignores them."""
        if not request.limits.ignores_end:
            return request.sampling
        if constraint is not None:
            raise UsageError("ignore_eos can't be used here", why="a grammar or a tool call has to end")
        return replace(request.sampling, logit_bias=(*request.sampling.logit_bias, *self._end_bans))

    @cached_property
    def _end_bans(self) -> tuple[tuple[int, float], ...]:
        vocabulary = self._vocabulary
        return tuple((token, -math.inf) for token in range(vocabulary.n_tokens) if vocabulary.is_end(token))

    def _constraint(
        self, request: AnswerRequest, matcher: Matcher | None, syntax: Syntax | None, tags: Tags | None, *, inside: bool
    ) -> Constraint | None:
        """Return the constraint that applies the grammar to the right part: answer, text after reasoning, or call."""
        if matcher is not None and syntax is not None and allows_text(request):
            from llmrun.engine.constraint.calls import ToolCallConstraint

            reasoning = ReasoningTracker.begin(tags, inside=inside) if tags is not None else None
            return ToolCallConstraint(matcher, self._vocabulary, syntax, reasoning)
        if matcher is None or tags is None:
            return matcher
        from llmrun.engine.constraint.reasoning import AfterReasoning

        may_think = request.prompt is None and request.thinks is not False
        return AfterReasoning(matcher, self._vocabulary, tags, inside=inside, may_think=may_think)

    def _calls(self, request: AnswerRequest, syntax: Syntax) -> Matcher:
        from llmrun.engine.constraint.calls import compile_calls

        return compile_calls(request, syntax, self._vocabulary, self._control_tokens(syntax.marks))

    def _matcher(self, grammar: Grammar | None) -> Matcher | None:
        if grammar is None:
            return None
        from llmrun.engine.constraint.matcher import compile_grammar

        return compile_grammar(grammar, self._vocabulary)

    def _extras(self, request: AnswerRequest, tags: Tags | None, syntax: Syntax | None, *, inside: bool) -> Extras:
        thinking = guard = None
        adapters = self.adapters_for(request.adapters)
        budget = self._thinking_tokens(request)
        if tags is not None and budget is not None:
            thinking = ThinkingBudget(tags, inside, budget)
        if request.stops_repeats:
            from llmrun.engine.core.repeats import RepeatGuard

            guard = RepeatGuard()
        return Extras(
            starts_in_reasoning=inside,
            thinking_tags=tags or (),
            thinking=thinking,
            guard=guard,
            moves=request.moves,
            logprobs=LogprobStream() if request.logprobs is not None else None,
            salt=self._salt(request.salt, adapters),
            adapters=adapters,
            rewritten=self._chat_template(request.template).new_rewritings() if request.prompt is None else (),
            shown=self._control_tokens((*(tags or ()), *(syntax.marks if syntax else ()))),
            tool_syntax=syntax.name if syntax else "",
            splitter=_splitter(tags, syntax, request.tools, inside=inside),
        )

    def _thinking_tokens(self, request: AnswerRequest) -> int | None:
        """Return the maximum number of reasoning tokens; a call that must come is not waited for without end."""
        if request.thinking_tokens is not None or not offers_tools(request) or request.tool_choice == "auto":
            return request.thinking_tokens
        return min(_FORCED_THINKING, (request.limits.max_tokens or self._n_ctx) // 2)

    def adapters_for(self, requested: tuple[AdapterScale, ...] | None) -> tuple[AdapterScale, ...]:
        """Return the adapters to compute an answer with; None requests the default ones.

        Raises:
            UsageError: there is no such adapter.
        """
        if requested is None:
            return by_default(self._adapters)
        invalid = next((number for number, _ in requested if not 0 <= number < len(self._adapters)), None)
        if invalid is not None:
            raise UsageError(f"there is no adapter {invalid}", why=f"the model was loaded with {len(self._adapters)}")
        return applied(requested)

    def _salt(self, requested: str, adapters: tuple[AdapterScale, ...]) -> str:
        """Return the prefix salt, made of the client's salt and the adapters.

        States without a salt may be saved to disk, for later loads with the same adapters. No client's salt can equal
        that of other adapters.
        """
        is_default = adapters == by_default(self._adapters)
        if not self._adapters or (is_default and not requested):
            return requested
        return f"{'' if is_default else [tuple(each) for each in adapters]}|{requested}"

    def count(self, asked: AnswerRequest, request: int, send: Callable[[Event], None]) -> TokenCount:
        """Count the tokens of a conversation, and of each message.

        Raises:
            BadTemplateError: there is no chat template, or it fails.
            BadModelError: the vocabulary has no tokens for the conversation.
            UsageError: the prompt is empty, or its last message alone certainly too long.
        """
        self._raise_if_too_long(asked.messages[-1:])
        tokenize, prompt = self._vocabulary.tokenize, self.prompt(Generate(request, asked), send, is_counted=True)
        messages = self._readable(asked.messages)
        each = [len(tokenize(message.content, special=False)) for message in messages]
        for index, message in enumerate(messages):
            each[index] += sum(self._image_lengths[hash(image.data)] for image in message.pictures)
        n_given = len(tokenize(asked.begins_reasoning, special=False)) + len(tokenize(asked.begins, special=False))
        return TokenCount(tuple(each), len(prompt.tokens) + n_given)

    def rendered(self, asked: AnswerRequest, request: int, send: Callable[[Event], None]) -> RenderedPrompt:
        """Return the prompt of a conversation as text. Raises as prompt()."""
        text = self.prompt(Generate(request, asked), send, is_counted=True).text
        beginning = self._beginning(asked, text, self._tags(asked))
        return RenderedPrompt(text + "".join(part.text for part in beginning.parts) if beginning is not None else text)

    def tokenize(self, command: TokenizeText) -> TextTokens:
        """Tokenize a text.

        Raises:
            BadModelError: the vocabulary has no tokens for it.
            ContextOverflowError: it is certainly longer than the context window.
        """
        self._raise_if_too_long([Message("user", command.text)])
        tokens = self._vocabulary.tokenize(command.text, special=command.special)
        return TextTokens(tuple(tokens), (), self._vocabulary.n_tokens)

    def detokenize(self, command: Detokenize) -> DetokenizedText:
        """Return the text of tokens.

        Raises:
            UsageError: the vocabulary has no such token.
        """
        self._require_known(command.tokens)
        vocabulary, pieces, begins = self._vocabulary, [], True
        for token in command.tokens:
            piece = vocabulary.piece(token)
            text = piece.removeprefix(self._added) if begins else piece
            pieces.append(text if piece else vocabulary.control_piece(token))
            begins = not piece  # the tokenizer adds a space after a control token too
        return DetokenizedText(b"".join(pieces).decode("utf-8", "replace"))

    @cached_property
    def _added(self) -> bytes:
        """The space that the tokenizer puts before a text, if it does."""
        data = b"".join(map(self._vocabulary.piece, self._vocabulary.tokenize("a", special=False)))
        return data.removesuffix(b"a")

    def prompt(
        self, generate: Generate, send: Callable[[Event], None] = lambda event: None, *, is_counted: bool = False
    ) -> TokenizedPrompt:
        """Return the tokens of a plain prompt or a conversation.

        Raises:
            BadTemplateError: there is no chat template, or it fails.
            BadModelError: the vocabulary has no tokens for the prompt.
            UsageError: the prompt is empty, or certainly too long.
        """
        request = generate.asked
        if request.prompt is not None:
            return self._plain_prompt(request)
        if not is_counted:
            self._raise_if_too_long(request.messages, request.tools)
        with ALLOCATING:
            send(Rendering(generate.request))
            template = self._chat_template(request.template)
            tools = request.tools if offers_tools(request) else ()
            messages = self._readable(request.messages)
            parts = template.render(
                messages,
                self._control_texts(),
                thinking=request.thinks,
                tools=tools,
                effort=request.reasoning_effort,
                variables=request.template_variables,
            )
        send(Rendered(generate.request))
        text = "".join(part.text for part in parts if isinstance(part, Part))
        encode = partial(self._encode_image, generate.request, None if is_counted else send)
        tokens, placed = self._tokens(parts, encode)
        if not tokens:
            raise UsageError(
                "the prompt is empty",
                why="the chat template writes nothing for this conversation",
                hint="choose another template with --template",
            )
        return TokenizedPrompt(text, tokens, PromptImages(placed) if placed else None)

    def _plain_prompt(self, request: AnswerRequest) -> TokenizedPrompt:
        """Return a text's tokens, token ids as they are, or a text with a gap to fill in."""
        text, suffix, vocabulary = request.prompt or "", request.suffix, self._vocabulary
        if request.prompt_tokens:
            self._require_known(request.prompt_tokens)
            return TokenizedPrompt("", [*request.prompt_tokens])
        self._raise_if_too_long([Message("user", text), Message("user", suffix or "")])
        tokens, _ = self._tokens([Part(text, False)], lambda image: ())
        if suffix is not None:
            if vocabulary.fill_in is None:
                raise UsageError(
                    "this model can't fill in the middle",
                    why="its vocabulary has no tokens for it",
                    hint="leave the suffix out, or use a model for code, such as qwen2.5-coder",
                )
            before, after, middle = vocabulary.fill_in
            pieces = (vocabulary.tokenize(each, special=False) for each in (text, suffix))
            return TokenizedPrompt(text, vocabulary.with_bos([before, *next(pieces), after, *next(pieces), middle]))
        if not tokens:
            raise UsageError("the prompt is empty", hint="type something")
        return TokenizedPrompt(text, tokens)

    def _require_known(self, tokens: Sequence[int]) -> None:
        """Raise UsageError if the vocabulary lacks one of these tokens."""
        n_tokens = self._vocabulary.n_tokens
        invalid = next((token for token in tokens if not 0 <= token < n_tokens), None)
        if invalid is not None:
            raise UsageError(f"there is no token {invalid}", why=f"the vocabulary has {n_tokens:,}")

    def _readable(self, messages: Sequence[Message]) -> Sequence[Message]:
        return with_omitted_images(messages, sees=self._projector is not None)

    def _encode_image(self, request: int, send: Callable[[Event], None] | None, image: Image) -> Pieces:
        """Return the tokens and vectors of an image, and send ImageAccepted."""
        if self._projector is None:
            raise UsageError("this model can't read images", why="it was loaded without a projector")
        data, width, height = image_bytes(image)
        pieces = self._projector.pieces(data, image.name or "the image")
        n_tokens = sum(len(piece if isinstance(piece, list) else piece.ids) for piece in pieces)
        self._image_lengths[hash(image.data)] = n_tokens
        if send is not None:
            send(ImageAccepted(request, image.name, width, height, n_tokens))
        return pieces

    def _raise_if_too_long(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        """Raise if the texts are longer than the context window in any tokenization; tokenizing them takes minutes."""
        texts = (*(text for message in messages for text in message.texts), *(text for tool in tools for text in tool))
        n_bytes = sum(len(text.encode("utf-8", "replace")) for text in texts)
        if n_bytes <= self._n_ctx * _LONG_TOKEN:
            return
        vocabulary = self._vocabulary
        longest = max(len(vocabulary.piece(token)) for token in range(vocabulary.n_tokens))
        minimum = n_bytes // max(longest, 1)
        if minimum > self._n_ctx:
            raise ContextOverflowError(
                f"the prompt is at least {minimum:,} tokens long, the context window {self._n_ctx:,}",
                hint="shorten it, or ask for a larger context window with --ctx",
                size=(minimum, self._n_ctx),
            )

    def _tokens(
        self, parts: Sequence[Part | Image], encode: Callable[[Image], Pieces]
    ) -> tuple[list[int], list[PlacedChunk]]:
        """Return the token ids of a prompt, none for an empty one, and its images."""
        vocabulary, ids, placed = self._vocabulary, list[int](), list[PlacedChunk]()
        for part in parts:
            if isinstance(part, Part):
                ids += self._special_tokens(part.text) if part.special else self._checked(part.text, special=False)
            for piece in encode(part) if isinstance(part, Image) else ():
                if isinstance(piece, list):
                    ids += piece
                else:
                    placed.append(PlacedChunk(len(ids), piece))
                    ids += piece.ids
        tokens = vocabulary.with_bos(ids)
        placed = [each._replace(start=each.start + len(tokens) - len(ids)) for each in placed]
        is_lost = not ids and any(part.text for part in parts if isinstance(part, Part))
        if is_lost or (tokens and tokens[0] >= vocabulary.n_tokens):
            raise _lossy_vocabulary()
        return tokens, placed

    def _checked(self, text: str, *, special: bool) -> list[int]:
        """Return the tokens of a text.

        Raises:
            BadModelError: the vocabulary does not have all of them.
        """
        tokens, n_tokens = self._vocabulary.tokenize(text, special=special), self._vocabulary.n_tokens
        for start in range(0, len(tokens), PIECE_TOKENS):
            piece = tokens[start : start + PIECE_TOKENS]
            if not 0 <= min(piece) <= max(piece) < n_tokens:
                raise _lossy_vocabulary()
        return tokens

    def _chat_template(self, template: str | None) -> ChatTemplate:
        source = template or self._template
        if source is None:
            raise BadTemplateError(
                "this model has no chat template",
                hint="complete plain text with --raw, or give a template with --template chatml or --template FILE",
            )
        source = NAMED.get(source, source)
        if source not in self._templates:
            vocabulary = self._vocabulary
            self._templates[source] = ChatTemplate(source, bos=vocabulary.bos_text, eos=vocabulary.eos_text)
        return self._templates[source]

    def _special_tokens(self, text: str) -> list[int]:
        """Return the tokens of a text of the template, in which control texts are control tokens."""
        if self._token_cache is None:
            self._token_cache = TokenCache(partial(self._checked, special=True), self._control_texts())
        return self._token_cache.tokens(text)

    def _control_texts(self) -> ControlTexts:
        if self._control is None:
            self._control = ControlTexts(self._vocabulary.control_texts)
        return self._control

    def _control_tokens(self, texts: Sequence[str]) -> frozenset[int]:
        tokens = (token for text in texts for token in self._vocabulary.tokenize(text, special=True))
        return frozenset(token for token in tokens if not self._vocabulary.piece(token))


def _lossy_vocabulary() -> BadModelError:
    return BadModelError(
        "the model's vocabulary can't encode this prompt",
        why="it has no token for some of its characters",
        hint="the file is probably damaged, or badly converted: download another one",
    )


def _splitter(
    tags: Tags | None, syntax: Syntax | None, tools: Sequence[Tool], *, inside: bool
) -> AnswerSplitter | None:
    if tags is None and syntax is None:
        return None
    from llmrun.protocol.answer import AnswerSplitter  # few models reason, few requests have tools

    return AnswerSplitter(tags or (), inside=inside, tool_syntax=syntax.name if syntax else "", tools=tools)
