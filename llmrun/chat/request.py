"""One request of a model: a conversation or a text, and how it is to be answered, as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmrun.grammar import Grammar
from llmrun.model import Model
from llmrun.protocol.messages import Event, Message
from llmrun.protocol.params import Limits, SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked, and how; all that a record of an answer keeps besides its sampling.

    Attributes:
        messages: the conversation; empty when `prompt` is used.
        prompt: plain text to be continued, without a chat template.
        template: Jinja text in place of the model's own chat template.
        grammar: what the answer has to follow.
        thinking, thinking_tokens: as Model.chat() takes them.
    """

    messages: tuple[Message, ...] = ()
    prompt: str | None = None
    template: str | None = None
    grammar: Grammar | None = None
    thinking: bool | None = None
    thinking_tokens: int | None = None

    def ask(
        self, model: Model, sampling: SamplingParams, limits: Limits, *, stops_repeats: bool = False
    ) -> Iterator[Event]:
        """Ask it; events and errors as Model.chat()."""
        if self.prompt is not None:
            return model.generate(
                self.prompt, sampling=sampling, limits=limits, grammar=self.grammar, stops_repeats=stops_repeats
            )
        return model.chat(
            self.messages,
            sampling=sampling,
            limits=limits,
            template=self.template,
            grammar=self.grammar,
            thinking=self.thinking,
            thinking_tokens=self.thinking_tokens,
            stops_repeats=stops_repeats,
        )
