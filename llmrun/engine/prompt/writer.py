"""The prompts of one model: a conversation by the chat template, or a plain text, as tokens; and what tells about them.

Earlier answers stand in a prompt as they were generated, where the template would write the same text in other tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from llmrun.engine.core.media import PlacedChunk, PromptMedia, text_only
from llmrun.engine.core.metrics import PreparationClock
from llmrun.engine.core.prefix import Salt
from llmrun.engine.llama.base import check_tokens, vocabulary_pieces
from llmrun.engine.llama.media import MediaChunk, Projector
from llmrun.engine.prompt.control_texts import PRIVATE, ControlTexts, Part, text_of
from llmrun.engine.prompt.history import (
    Beginning,
    Conversation,
    History,
    OpenTurn,
    after_answer,
    begin_alike,
    keeps_reasoning,
)
from llmrun.engine.prompt.media import checked_file, without_unreadable
from llmrun.engine.prompt.sandbox import OTHER_TEMPLATE
from llmrun.engine.prompt.template import NAMED, ChatTemplate
from llmrun.engine.prompt.thinking import AnswerBeginning, known_reasoning
from llmrun.engine.prompt.token_cache import TokenCache
from llmrun.engine.prompt.tools import tells_tools
from llmrun.errors import BadModelError, BadTemplateError, ContextOverflowError, LlmrunError, UsageError
from llmrun.protocol.adapters import Adapter, AdapterScale, applied, by_default
from llmrun.protocol.jobs.text import TextTokens, TokenizeText
from llmrun.protocol.media import PLURALS, Media
from llmrun.protocol.messages import (
    AnswerRequest,
    Event,
    Generate,
    MediaAccepted,
    Message,
    Rendered,
    Rendering,
)
from llmrun.protocol.questions import TokenCount
from llmrun.protocol.reasoning import ReasoningSyntax

if TYPE_CHECKING:
    from llmrun.engine.llama.base import Vocabulary

Pieces = Sequence[list[int] | MediaChunk]
"""An image or audio in a prompt: token ids around vectors."""

_LAST = 64  # tokens of an answer, of which the text that closes a call takes a few
_MOST_KEPT = 1 << 20  # tokens of a text, or as many as the window has; those after them are only counted
# Of what is remembered for later requests.
_MAX_MEDIA_LENGTHS = len(PRIVATE)  # as many as a request may have
_MAX_TEMPLATES = 16
_MAX_OPTIONS = 256
# Shares of the context window. In longer prompts than the first, the template writes earlier turns in its own form,
# without their reasoning, if that saves the second.
_ROOMY, _WORTHWHILE = 3 / 4, 1 / 16
_ANSWER_ROOM = 2048  # tokens of an answer, for which tools that a request left out make room


class TokenizedPrompt(NamedTuple):
    """A prompt in text and tokens."""

    text: str  # without its images and audio, and without the beginning that stands as it was generated
    tokens: list[int]  # ids; negative ones are images and audio
    media: PromptMedia | None = None  # None without any
    turn: OpenTurn | None = None  # of a conversation
    accepted: tuple[Event, ...] = ()  # about its images and audio
    n_more: int = 0  # tokens after these, in a prompt that is much longer than the window
    asked: AnswerRequest | None = None  # with the tools that it left out of the conversation; None: as it was

    @property
    def n_tokens(self) -> int:
        return len(self.tokens) + self.n_more


class PromptWriter:
    """The prompts of one model.

    Attributes:
        history: the answers so far, for later prompts of their conversations.
        clock: of the phases of a preparation.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        template: str | None,
        n_ctx: int,
        *,
        projector: Projector | None = None,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        self.history = History()
        self.clock = PreparationClock()
        self._vocabulary, self._template, self._n_ctx = vocabulary, template, n_ctx
        self._projector, self._adapters = projector, adapters
        self._media_lengths: dict[int, int] = {}  # hash of a file's data -> tokens
        self._templates: dict[str, ChatTemplate] = {}
        self._begin_alike: dict[tuple[object, ...], bool] = {}  # template and options -> prompts begin as without them

    def prompt(
        self, generate: Generate, send: Callable[[Event], None] = lambda event: None, *, is_counted: bool = False
    ) -> TokenizedPrompt:
        """Return the tokens of a plain prompt or a conversation.

        Raises:
            BadTemplateError: there is no chat template, or it fails.
            BadModelError: the vocabulary has no tokens for the prompt.
            UsageError: the prompt is empty.
            ContextOverflowError: the prompt is much longer than the window, and is not only counted.
        """
        request = generate.asked
        is_plain = request.prompt is not None
        prompt = self._plain_prompt(request) if is_plain else self._written(generate, send, is_counted)
        if prompt.n_more and not is_counted:
            raise ContextOverflowError.of_prompt(prompt.n_tokens, self._n_ctx)
        for event in () if is_counted else prompt.accepted:
            send(event)
        if not prompt.tokens:
            raise _empty_prompt(is_plain=is_plain)
        return prompt

    def _written(self, generate: Generate, send: Callable[[Event], None], is_counted: bool) -> TokenizedPrompt:
        """Return the prompt of a conversation.

        A request without tools that goes on with a conversation that had some is answered from its prompt, tools
        described and none called: agents ask so for a summary, and would wait for the whole conversation again.
        """
        prompt = self._with_history(generate, send, remembers=not is_counted)
        request, kept = generate.asked, prompt.asked
        if kept is not None and prompt.turn is not None:
            room = request.limits.max_tokens or _ANSWER_ROOM
            if prompt.n_tokens + min(room, _ANSWER_ROOM) > self._n_ctx:
                return self._with_history(generate, send, remembers=not is_counted, keeps_tools=False)
            prompt.turn.kept_tools = len(kept.tools)
        return prompt

    def _with_history(
        self, generate: Generate, send: Callable[[Event], None], *, remembers: bool, keeps_tools: bool = True
    ) -> TokenizedPrompt:
        request = generate.asked
        render = partial(self._render, generate, send)
        messages, salt = self._readable(request.messages), self.salt(request, self.adapters_for(request.adapters))
        tools = request.tools if tells_tools(request) else ()
        context = self.chat_template(request.template).source, salt, self._options(generate, send)
        conversation = Conversation(context, messages, tools, private=bool(salt.private))
        keeps_tools &= not tools and request.keep_reasoning is not False
        if keeps_tools and (kept := self.history.tools_of(conversation)):
            conversation.tools = kept
            request = replace(request, tools=kept, tool_choice="none")
            render = partial(self._render, generate._replace(asked=request), send)
        keeps = request.keep_reasoning
        if keeps is None and any(message.role == "assistant" for message in messages):
            keeps = conversation.has_calls or keeps_reasoning(partial(render, keeps=None, is_trial=True))
        encode = partial(self._encode_media, generate.request)
        write = partial(self._conversation_prompt, conversation, render, encode, request.begins)
        beginning = self.history.find(conversation, keeps=bool(keeps))
        prompt = write(beginning, keeps)
        room = self._n_ctx if request.keep_reasoning else int(_ROOMY * self._n_ctx)
        # Both forms are written only where the second can save what is worth it: it takes as long as the first.
        if prompt.turn is not None and prompt.n_tokens > room and (beginning is not None or keeps):
            least = 0 if prompt.n_tokens > self._n_ctx else _WORTHWHILE * self._n_ctx
            known = beginning.turn if beginning is not None and beginning.n_messages > conversation.question else None
            prompt.turn.compared = known.compared if known is not None else 0
            if not least or prompt.n_tokens - prompt.turn.compared > least:
                shorter = write(None, False)
                if prompt.n_tokens - shorter.n_tokens > least and shorter.turn is not None:
                    prompt, shorter.turn.is_shortened = shorter, True
                if prompt.turn is not None:
                    prompt.turn.compared = prompt.n_tokens
        if remembers:
            self._remember(conversation, prompt, render, keeps)
        return prompt if request is generate.asked else prompt._replace(asked=request)

    def _remember(
        self,
        conversation: Conversation,
        prompt: TokenizedPrompt,
        render: Callable[..., list[Part | Media]],
        keeps: bool | None,
    ) -> None:
        """Remember a conversation up to its last answer as it stands in a prompt, if a client wrote that answer.

        The template would leave out its reasoning after the next question, and all after it would be new. A client
        writes answers that came from elsewhere, or were changed.
        """
        turn, messages = prompt.turn, conversation.messages
        n_known = turn.beginning.n_messages if turn is not None and turn.beginning is not None else 0
        n_messages = max((index + 1 for index, each in enumerate(messages) if each.role == "assistant"), default=0)
        if turn is None or not turn.reasons or prompt.media or prompt.n_more or n_messages <= n_known:
            return
        messages = self.history.with_reasoning(conversation, turn.beginning)
        trial, whole = partial(render, keeps=keeps, is_trial=True), partial(render, keeps=keeps)
        # Where no end token follows a call, it ends with the brace of its arguments here.
        parts = after_answer(messages, n_messages, trial, whole, {*self._end_texts}, "}")
        after = self._tokens(parts, _without_media, prompt.tokens[:1])[0][1:] if parts else []
        if after and prompt.tokens[-len(after) :] == after:
            turn.remember(messages[:n_messages], prompt.tokens[: -len(after)])

    def _render(
        self,
        generate: Generate,
        send: Callable[[Event], None],
        messages: Sequence[Message],
        keeps: bool | None,
        *,
        is_trial: bool = False,
    ) -> list[Part | Media]:
        """Return the parts of a conversation's prompt.

        Args:
            keeps: as in AnswerRequest.keep_reasoning.
            is_trial: with few tools, if any.
        """
        request = generate.asked
        tools = request.tools if tells_tools(request) else ()
        if is_trial:
            called = {call.name for message in messages for call in message.tool_calls}
            tools = tuple(tool for tool in tools if tool.name in called) or tools[:1]
        with self.clock.phase("template"):
            send(Rendering(generate.request))
            parts = self.chat_template(request.template).render(
                messages,
                self._control_texts,
                thinking=request.thinks,
                tools=tools,
                effort=request.reasoning_effort,
                keep_reasoning=keeps,
                variables=request.template_variables,
            )
        send(Rendered(generate.request))
        return parts

    def _options(self, generate: Generate, send: Callable[[Event], None]) -> tuple[object, ...]:
        """Return the template's options; none if they only change the end of a prompt, as thinking often does."""
        request = generate.asked
        options = request.thinks, request.reasoning_effort, request.template_variables
        key = self.chat_template(request.template).source, *options
        if options != (None, None, "{}") and key not in self._begin_alike:
            plain = replace(request, thinking=None, reasoning_effort=None, template_variables="{}")
            renders = (partial(self._render, Generate(generate.request, asked), send) for asked in (request, plain))
            _forget_oldest(self._begin_alike, _MAX_OPTIONS)
            self._begin_alike[key] = begin_alike(*(partial(render, keeps=None, is_trial=True) for render in renders))
        return () if self._begin_alike.get(key, True) else options

    def _conversation_prompt(
        self,
        conversation: Conversation,
        render: Callable[..., list[Part | Media]],
        encode: Callable[[Callable[[Event], None], Media], Pieces],
        begins: str,
        beginning: Beginning | None,
        keeps: bool | None,
    ) -> TokenizedPrompt:
        """Return the prompt of a conversation.

        Args:
            render: returns the parts of a prompt, given messages and `keeps`; with few tools if `is_trial`.
            encode: returns the tokens and vectors of an image or audio, given what takes the event about it.
            begins: as in AnswerRequest.
            beginning: the messages that stand as they were generated. The template writes the others, or all if it
                can't be told where they end.
            keeps: reasoning of turns before the last question may stand in it; None leaves that to the template.
        """
        accepted = list[Event]()
        encode_media = partial(encode, accepted.append)
        messages = self.history.with_reasoning(conversation, beginning)
        parts = before = None
        if beginning is not None:
            n_messages = beginning.n_messages
            ends = {*self._end_texts}
            written = b"".join(map(self._vocabulary.control_piece, text_only(beginning.turn.tokens[-_LAST:])))
            trial, whole = partial(render, keeps=keeps, is_trial=True), partial(render, keeps=keeps)
            parts = after_answer(messages, n_messages, trial, whole, ends, written.decode("utf-8", "replace"))
            if parts is not None:
                before = self._standing(beginning, messages, encode_media)
        if parts is None or before is None:
            beginning, before, messages = None, ([], []), self.history.with_reasoning(conversation, None)
            parts = render(messages, keeps)
            accepted.clear()
        tokens, placed, n_more = self._tokens(parts, encode_media, before[0])
        media = [*before[1], *placed]
        turn = OpenTurn(self.history, conversation, messages, beginning, keeps=bool(keeps), begins=begins)
        all_media = PromptMedia(media) if media else None
        return TokenizedPrompt(text_of(parts), tokens, all_media, turn, tuple(accepted), n_more)

    def _standing(
        self, beginning: Beginning, messages: Sequence[Message], encode: Callable[[Media], Pieces]
    ) -> tuple[list[int], list[PlacedChunk]] | None:
        """Return the tokens that a prompt begins with, and the media there; None if some have other tokens now."""
        tokens, placed, end = beginning.turn.all_tokens, list[PlacedChunk](), 0
        for media in (media for message in messages[: beginning.n_messages] for media in message.media):
            for chunk in (piece for piece in encode(media) if not isinstance(piece, list)):
                ids = list(chunk.ids)
                start = tokens.index(ids[0], end) if ids[0] in tokens[end:] else end
                end = start + len(ids)
                if tokens[start:end] != ids:
                    return None
                placed.append(PlacedChunk(start, chunk))
        return tokens, placed

    def _plain_prompt(self, request: AnswerRequest) -> TokenizedPrompt:
        """Return the tokens of a text, of token ids with texts between them, or of a text with a gap to fill in."""
        text, suffix, vocabulary = request.prompt or "", request.suffix, self._vocabulary
        if suffix is not None:
            if vocabulary.fill_in is None:
                raise UsageError(
                    "this model can't fill in the middle",
                    why="its vocabulary has no tokens for it",
                    hint="leave the suffix out, or use a model for code, such as qwen2.5-coder",
                )
            before, after, middle = vocabulary.fill_in
            pieces = (vocabulary.tokenize(part, special=False, begins=False) for part in (text, suffix))
            return TokenizedPrompt(text, vocabulary.with_bos([before, *next(pieces), after, *next(pieces), middle]))
        tokens, n_more = self.plain_tokens(request.prompt_tokens or (text,))
        if not tokens:
            raise UsageError("the prompt is empty", hint="type something")
        return TokenizedPrompt(text, tokens, n_more=n_more)

    def plain_tokens(self, parts: Sequence[int | str]) -> tuple[list[int], int]:
        """Return the tokens of a prompt without a chat template: token ids, and texts, in which control tokens count.

        The last value is the number of tokens after these, which are only counted.

        Raises:
            BadModelError: the vocabulary has no tokens for a text.
            UsageError: the vocabulary has no such token.
        """
        check_tokens((part for part in parts if isinstance(part, int)), self._vocabulary.n_tokens)
        ids, n_more = list[int](), 0
        for part in parts:
            pieces = [[part]] if isinstance(part, int) else self._checked_pieces(part, special=True, begins=not ids)
            ids, n_after = self._kept(ids, pieces)
            n_more += n_after
        if not ids and any(parts):
            raise _lossy_vocabulary()
        return ids if parts and isinstance(parts[0], int) else self._vocabulary.with_bos(ids), n_more

    def count(self, asked: AnswerRequest, request: int, send: Callable[[Event], None]) -> TokenCount:
        """Count the tokens of a conversation, and of each message.

        Raises:
            BadTemplateError: there is no chat template, or it fails.
            BadModelError: the vocabulary has no tokens for the conversation.
            UsageError: the prompt is empty.
        """
        prompt = self.prompt(Generate(request, asked), send, is_counted=True)
        messages = self._readable(asked.messages)
        each = [self._n_tokens(message.content) for message in messages]
        for index, message in enumerate(messages):
            # 0 for an image that the template leaves out.
            each[index] += sum(self._media_lengths.get(hash(media.data), 0) for media in message.media)
        n_given = self._n_tokens(asked.begins_reasoning) + self._n_tokens(asked.begins)
        return TokenCount(
            tuple(each), prompt.n_tokens + n_given, prompt.turn.history if prompt.turn is not None else None
        )

    def _n_tokens(self, text: str) -> int:
        return sum(map(len, self._vocabulary.token_pieces(text, special=False)))

    def rendered(self, asked: AnswerRequest, request: int, send: Callable[[Event], None]) -> str:
        """Return the prompt of a conversation as text. Raises as prompt()."""
        text = self.prompt(Generate(request, asked), send, is_counted=True).text
        beginning = self.beginning(asked, text, self.reasoning(asked))
        return text + "".join(part.text for part in beginning.parts) if beginning is not None else text

    def tokenize(self, command: TokenizeText) -> TextTokens:
        """Tokenize a text.

        Raises:
            BadModelError: the vocabulary has no tokens for it.
            UsageError: it has more tokens than one message can hold.
        """
        vocabulary = self._vocabulary
        tokens, n_more = self._kept([], vocabulary.token_pieces(command.text, special=command.special))
        if n_more:
            what = f"the text has {len(tokens) + n_more:,} tokens, and at most {self._most_kept:,} can be returned"
            raise UsageError(what, hint="count it as a message, or divide it")
        tokens = vocabulary.with_bos(tokens) if command.adds_bos else tokens
        pieces = vocabulary_pieces(vocabulary, tokens) if command.has_pieces else ()
        return TextTokens(tuple(tokens), pieces, vocabulary.n_tokens)

    @property
    def _most_kept(self) -> int:
        return max(self._n_ctx, _MOST_KEPT)

    def _kept(self, tokens: list[int], pieces: Iterable[list[int]]) -> tuple[list[int], int]:
        """Append tokens in pieces up to the limit; return all, and the number of tokens after them."""
        n_more = 0
        for piece in pieces:
            n_new = 0 if n_more else max(self._most_kept - len(tokens), 0)
            tokens += piece[:n_new]
            n_more += len(piece[n_new:])
        return tokens, n_more

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens.

        Raises:
            UsageError: the vocabulary has no such token.
        """
        check_tokens(tokens, self._vocabulary.n_tokens)
        vocabulary, pieces, begins = self._vocabulary, [], True
        for token in tokens:
            piece = vocabulary.piece(token)
            text = piece.removeprefix(self._added) if begins else piece
            pieces.append(text if piece else vocabulary.control_piece(token))
            begins = not piece  # the tokenizer adds a space after a control token too
        return b"".join(pieces).decode("utf-8", "replace")

    @cached_property
    def _added(self) -> bytes:
        """The space that the tokenizer puts before a text, if it does."""
        data = b"".join(map(self._vocabulary.piece, self._vocabulary.tokenize("a", special=False)))
        return data.removesuffix(b"a")

    @cached_property
    def thinking_tags(self) -> tuple[str, ...]:
        """The tags around reasoning by the model's own chat template; none without reasoning.

        Trial renderings take a tenth of a second of loading, so only templates that reason in other tags get them.
        """
        syntax = known_reasoning(self._template)
        if syntax is None and re.search("think|reason", self._template or "", re.IGNORECASE):
            with suppress(LlmrunError):  # the first request will report it
                syntax = self.chat_template(None).reasoning
        return syntax[:2] if syntax else ()

    def reasoning(self, request: AnswerRequest) -> ReasoningSyntax | None:
        """Return the syntax of the reasoning, by the request's template or the model's own; None without any."""
        with self.clock.phase("template"):
            syntax = self.chat_template(request.template).reasoning if request.prompt is None else None
        return syntax or known_reasoning(self._template)

    def beginning(
        self, request: AnswerRequest, prompt: str, reasoning: ReasoningSyntax | None
    ) -> AnswerBeginning | None:
        """Return what the answer is given to begin with; None for nothing.

        Raises:
            UsageError: there is no chat template.
        """
        if not (request.begins or request.begins_reasoning):
            return None
        if request.prompt is not None:
            raise UsageError("an answer with a given beginning has no plain prompt")
        return AnswerBeginning.of(prompt, reasoning, request.begins_reasoning, request.begins)

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
        named = {number for number, _ in requested}
        stored = [number for number, adapter in enumerate(self._adapters) if adapter.is_stored and number not in named]
        return applied((*requested, *(AdapterScale(number, self._adapters[number].scale) for number in stored)))

    def salt(self, request: AnswerRequest, adapters: tuple[AdapterScale, ...]) -> Salt:
        """Return the prefix salt, made of the owner, the client's salt and the adapters.

        States of the default adapters may be saved to disk, for later loads with the same ones. No client's salt can
        equal that of other adapters.
        """
        is_default = adapters == by_default(self._adapters)
        if not self._adapters or (is_default and not request.salt):
            return Salt(request.owner, request.salt)
        return Salt(request.owner, f"{'' if is_default else [tuple(each) for each in adapters]}|{request.salt}")

    def _tokens(
        self, parts: Sequence[Part | Media], encode: Callable[[Media], Pieces], standing: Sequence[int] = ()
    ) -> tuple[list[int], list[PlacedChunk], int]:
        """Return the token ids of a prompt, none for an empty one, and the images and audio of the parts.

        The last value is the number of tokens after these, which are only counted.

        Args:
            standing: the tokens before the parts.
        """
        vocabulary, ids, placed, n_more = self._vocabulary, [*standing], list[PlacedChunk](), 0
        for part in parts:
            if isinstance(part, Part):
                begins = not ids
                pieces = (
                    [self._token_cache.tokens(part.text, begins=begins)]
                    if part.special
                    else self._checked_pieces(part.text, special=False, begins=begins)
                )
                ids, n_after = self._kept(ids, pieces)
                n_more += n_after
            for piece in encode(part) if isinstance(part, Media) else ():
                if isinstance(piece, list):
                    ids += piece
                else:
                    placed.append(PlacedChunk(len(ids), piece))
                    ids += piece.ids
        tokens = ids if standing else vocabulary.with_bos(ids)
        placed = [chunk._replace(start=chunk.start + len(tokens) - len(ids)) for chunk in placed]
        is_lost = not ids and text_of(parts)
        if is_lost or (tokens and tokens[0] >= vocabulary.n_tokens):
            raise _lossy_vocabulary()
        return tokens, placed, n_more

    @cached_property
    def _token_cache(self) -> TokenCache:
        """The tokens of texts of templates, in which control texts are control tokens."""
        return TokenCache(partial(self._checked, special=True), self._control_texts)

    def _checked(self, text: str, *, special: bool, begins: bool) -> list[int]:
        return [*chain.from_iterable(self._checked_pieces(text, special=special, begins=begins))]

    def _checked_pieces(self, text: str, *, special: bool, begins: bool) -> Iterator[list[int]]:
        """Yield the tokens of a text.

        Raises:
            BadModelError: the vocabulary does not have all of them.
        """
        n_tokens = self._vocabulary.n_tokens
        for piece in self._vocabulary.token_pieces(text, special=special, begins=begins):
            if piece and not 0 <= min(piece) <= max(piece) < n_tokens:
                raise _lossy_vocabulary()
            yield piece

    def _readable(self, messages: Sequence[Message]) -> Sequence[Message]:
        return without_unreadable(messages, self._projector.modalities if self._projector is not None else frozenset())

    def _encode_media(self, request: int, send: Callable[[Event], None], media: Media) -> Pieces:
        """Return the tokens and vectors of an image or an audio file, and send MediaAccepted."""
        file, name = checked_file(media), media.name or "the file"
        if self._projector is None:
            what = f"this model can't read {PLURALS[file.modality]}"
            raise UsageError(what, why="it was loaded without a projector")
        pieces, seconds = self._projector.pieces(file, name)
        n_tokens = sum(len(piece if isinstance(piece, list) else piece.ids) for piece in pieces)
        _forget_oldest(self._media_lengths, _MAX_MEDIA_LENGTHS)
        self._media_lengths[hash(media.data)] = n_tokens
        send(MediaAccepted(request, media.name, n_tokens, file.width, file.height, seconds))
        return pieces

    def chat_template(self, template: str | None) -> ChatTemplate:
        source = template or self._template
        if source is None:
            raise BadTemplateError(
                "this model has no chat template",
                hint="complete plain text with --raw, or give a template with --template chatml or --template FILE",
            )
        source = NAMED.get(source, source)
        if source not in self._templates:
            _forget_oldest(self._templates, _MAX_TEMPLATES)
            vocabulary = self._vocabulary
            self._templates[source] = ChatTemplate(
                source,
                bos=vocabulary.bos_text,
                eos=vocabulary.eos_text,
                control=vocabulary.control_texts,
                ends=self._end_texts,
            )
        return self._templates[source]

    @cached_property
    def _control_texts(self) -> ControlTexts:
        return ControlTexts((*self._vocabulary.control_texts, *self._vocabulary.shown_control_texts))

    def control_tokens(self, texts: Sequence[str]) -> frozenset[int]:
        tokens = (token for text in texts for token in self._vocabulary.tokenize(text, special=True))
        return frozenset(token for token in tokens if not self._vocabulary.piece(token))

    @cached_property
    def _end_texts(self) -> tuple[str, ...]:
        pieces = map(self._vocabulary.control_piece, self._vocabulary.ends)
        return tuple(piece.decode("utf-8", "replace") for piece in pieces)


def _forget_oldest(remembered: dict[Any, Any], limit: int) -> None:
    """Make room for one more."""
    while len(remembered) >= limit:
        del remembered[next(iter(remembered))]


def _without_media(media: Media) -> Pieces:
    raise AssertionError("a prompt with media is not remembered")


def _empty_prompt(*, is_plain: bool) -> UsageError:
    if is_plain:
        return UsageError("the prompt is empty", hint="type something")
    why = "the chat template writes nothing for this conversation"
    return UsageError("the prompt is empty", why=why, hint=OTHER_TEMPLATE)


def _lossy_vocabulary() -> BadModelError:
    return BadModelError(
        "the model's vocabulary can't encode this prompt",
        why="it has no token for some of its characters",
        hint="the file is probably damaged, or badly converted: download another one",
    )
