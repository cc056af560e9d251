"""`llmrun chat`: a conversation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmrun.cli.answering import cancelling, show
from llmrun.cli.loading import open_model
from llmrun.cli.options import (
    CtxOption,
    GpuLayersOption,
    MaxTokensOption,
    ModelArgument,
    StatsOption,
    StopOption,
    SystemOption,
    TemplateOption,
    ThreadsOption,
    VerboseOption,
    YesOption,
    limits,
    template_text,
    with_sampling,
)
from llmrun.config import load_settings
from llmrun.errors import LlmrunError
from llmrun.messages import Event, Message, TextDelta
from llmrun.model import Model
from llmrun.params import Limits, SamplingParams
from llmrun.plan import Wishes
from llmrun.ui.chat import ChatInput
from llmrun.ui.keyboard import quiet_keyboard
from llmrun.ui.output import Output

COMMANDS = {
    "/?": "this help",
    "/clear": "forget the conversation, keep the system prompt",
    "/bye": "leave, as Ctrl-D does",
}
_OTHER_NAMES = {"/help": "/?", "/exit": "/bye", "/quit": "/bye"}


@with_sampling
def chat(
    model: ModelArgument,
    system: SystemOption = None,
    template: TemplateOption = None,
    max_tokens: MaxTokensOption = None,
    stop: StopOption = None,
    stats: StatsOption = None,
    ctx: CtxOption = None,
    threads: ThreadsOption = None,
    gpu_layers: GpuLayersOption = None,
    verbose: VerboseOption = False,
    yes: YesOption = False,
    *,
    flags: Mapping[str, Any],
) -> None:
    """Talk to a model. Ctrl-C stops an answer and keeps it, Ctrl-D leaves."""
    output = Output()
    jinja = template_text(template)
    ends = limits(max_tokens, stop)
    history = load_settings().state_dir / "chat_history"
    wishes = Wishes(ctx, threads, gpu_layers)
    with (
        ChatInput(output, history, commands=tuple(COMMANDS)) as typed,
        open_model(output, model, wishes, yes=yes, verbose=verbose, warm_up=typed.interactive) as loaded,
    ):
        sampling, _ = loaded.sampling(flags)
        conversation = Conversation(output, loaded, system, sampling, ends, jinja, stats)
        if typed.interactive:
            output.note(
                f"{loaded.spec.name}: context window {loaded.loaded.n_ctx:,} tokens. /? for help, Ctrl-D leaves."
            )
        while (message := typed.read()) is not None:
            if not typed.interactive or not message.startswith("/"):
                conversation.answer(message)
            elif not conversation.obey(message):
                break


class Conversation:
    """The turns so far, and how the next one is answered."""

    def __init__(
        self,
        output: Output,
        model: Model,
        system: str | None,
        sampling: SamplingParams,
        limits: Limits,
        template: str | None,
        stats: bool | None,
    ) -> None:
        self._output = output
        self._model = model
        self._system = [Message("system", system)] if system else []
        self._turns: list[Message] = []
        self._sampling = sampling
        self._limits = limits
        self._template = template
        self._stats = stats

    def answer(self, text: str) -> None:
        """Answer a message and remember both; a message whose answer fails is forgotten, earlier turns never are."""
        question = Message("user", text)
        pieces: list[str] = []
        try:
            with quiet_keyboard(self._output), cancelling(self._model):
                events = self._model.chat(
                    [*self._system, *self._turns, question],
                    sampling=self._sampling,
                    limits=self._limits,
                    template=self._template,
                )
                show(self._output, _collecting(events, pieces), self._model, self._stats)
        except LlmrunError as error:
            if not self._output.stdin_is_terminal:
                raise
            self._output.error(error)
            return
        self._turns += [question, Message("assistant", "".join(pieces))]
        if not self._output.stdout_is_terminal:
            self._output.text("")

    def obey(self, command: str) -> bool:
        """Do what a slash command says; False to leave."""
        word = command.split()[0]
        word = _OTHER_NAMES.get(word, word)
        if word == "/bye":
            return False
        if word == "/clear":
            self._turns.clear()
            self._output.note("The conversation is forgotten.")
        elif word == "/?":
            for name, meaning in COMMANDS.items():
                self._output.note(f"  {name:8} {meaning}")
            self._output.note('  Alt-Enter makes a newline, """ begins and ends a longer text.')
        else:
            self._output.note(f"There is no command {word}; /? lists them.")
        return True


def _collecting(events: Iterator[Event], pieces: list[str]) -> Iterator[Event]:
    """The events, their text kept."""
    for event in events:
        if isinstance(event, TextDelta):
            pieces.append(event.text)
        yield event
