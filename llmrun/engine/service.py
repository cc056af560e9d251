"""A loaded model with the loop over it: how a request becomes a prompt's tokens, and what else it brings along.

Owns templates, grammars and saved states of one model; must not know the pipe.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.engine.core.loop import Engine
from llmrun.engine.core.sequence import Extras
from llmrun.engine.prompt.thinking import ThinkingBudget, opens, thinking_tags
from llmrun.errors import BadTemplateError, LlmrunError, ResourceError
from llmrun.protocol.messages import Count, Counted, Event, Generate, Load, Rendered, Rendering, SaveState, StateSaved

if TYPE_CHECKING:
    from llmrun.engine.constraint.matcher import Constraint
    from llmrun.engine.core.states import KVStore
    from llmrun.engine.llama.context import LlamaContext
    from llmrun.engine.llama.model import LlamaModel
    from llmrun.engine.prompt.template import ChatTemplate, ControlTexts


class LoadedModel:
    """What answers requests.

    Attributes:
        engine: the loop.
        thinking_tags: the texts between which the model thinks, as its own chat template has them; None if it doesn't.
    """

    def __init__(self, weights: LlamaModel, context: LlamaContext, load: Load) -> None:
        self._weights, self._vocabulary = weights, weights.vocabulary
        self.engine = Engine(context, states=_states(load, weights))
        self.thinking_tags = thinking_tags(weights.chat_template)
        self._shown = frozenset(self._control_tokens(self.thinking_tags or ()))
        self._templates: dict[str, ChatTemplate] = {}
        self._control: ControlTexts | None = None

    def generate(self, generate: Generate, send: Callable[[Event], None]) -> None:
        """Give a request to the loop.

        Raises:
            BadTemplateError: there is no chat template, or it fails.
            BadGrammarError: the grammar is broken, or asks for too much.
            ContextOverflowError: the prompt alone is longer than the context window.
        """
        constraint = self._constraint(generate)
        text, tokens = self.prompt(generate, send)
        tags = thinking_tags(generate.template) or self.thinking_tags
        extras = self._extras(generate, constraint, tags, inside=tags is not None and opens(text, tags))
        self.engine.add(generate.request, tokens, generate.sampling, generate.limits, extras)

    def count(self, count: Count, send: Callable[[Event], None]) -> Counted:
        """How many tokens a conversation has.

        Raises:
            BadTemplateError: there is no chat template, or it fails.
        """
        each = tuple(len(self._vocabulary.tokenize(message.content, special=False)) for message in count.messages)
        return Counted(count.request, each, len(self.prompt(count, send)[1]))

    def save(self, save: SaveState) -> StateSaved:
        """Save an answer's KV state.

        Raises:
            ResourceError: it can't be written.
            UsageError: another answer came after it.
        """
        try:
            tokens, n_bytes = self.engine.save(save.answer, prompt_only=save.prompt_only)
        except OSError as error:
            raise ResourceError("the KV state can't be saved", why=error.strerror or str(error)) from None
        return StateSaved(save.request, tokens, n_bytes)

    def _constraint(self, generate: Generate) -> Constraint | None:
        if generate.grammar is None:
            return None
        from llmrun.engine.constraint.matcher import compile_grammar

        return compile_grammar(generate.grammar, self._vocabulary)

    def _extras(
        self, generate: Generate, constraint: Constraint | None, tags: tuple[str, str] | None, *, inside: bool
    ) -> Extras:
        thinking = guard = None
        if tags is not None and generate.thinking_tokens is not None:
            thinking = ThinkingBudget(tags, inside, generate.thinking_tokens)
        if generate.stops_repeats:
            from llmrun.engine.core.repeats import RepeatGuard

            guard = RepeatGuard()
        return Extras(constraint, generate.remember, inside, thinking, guard, generate.moves, self._shown)

    def prompt(
        self, request: Generate | Count, send: Callable[[Event], None] = lambda event: None
    ) -> tuple[str, list[int]]:
        """Text and token ids of what is asked: a rendered conversation, or a plain text.

        Raises:
            BadTemplateError: there is no chat template, or it fails.
        """
        vocabulary = self._vocabulary
        if isinstance(request, Generate) and request.prompt is not None:
            text = request.prompt
            tokens = vocabulary.tokenize(text, special=False)
        else:
            send(Rendering(request.request))
            template = self._template(request.template)
            parts = template.render(request.messages, self._control_texts(), thinking=request.thinking)
            send(Rendered(request.request))
            text = "".join(part.text for part in parts)
            tokens = [token for part in parts for token in vocabulary.tokenize(part.text, special=part.special)]
        tokens = vocabulary.with_bos(tokens)
        if not tokens:
            raise LlmrunError("the prompt is empty", hint="type something")
        return text, tokens

    def _template(self, template: str | None) -> ChatTemplate:
        from llmrun.engine.prompt.template import NAMED, ChatTemplate

        source = template or self._weights.chat_template
        if source is None:
            raise BadTemplateError(
                "this model comes without a chat template",
                hint="complete plain text with --raw, or give a template with --template chatml or --template FILE",
            )
        source = NAMED.get(source, source)
        if source not in self._templates:
            self._templates[source] = ChatTemplate(source, bos=self._vocabulary.bos_text, eos=self._vocabulary.eos_text)
        return self._templates[source]

    def _control_texts(self) -> ControlTexts:
        from llmrun.engine.prompt.template import ControlTexts

        if self._control is None:
            self._control = ControlTexts(self._vocabulary.control_texts)
        return self._control

    def _control_tokens(self, texts: tuple[str, ...]) -> list[int]:
        """The texts that are one token each."""
        tokens = (self._vocabulary.tokenize(text, special=True) for text in texts)
        return [found[0] for found in tokens if len(found) == 1]


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
