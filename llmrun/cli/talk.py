"""A chat at work: messages are read and answered, slash commands obeyed until the user leaves.

Owns the order of that; what a conversation is stands in llmrun.chat.conversation, each command in llmrun.cli.slash.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing

from llmrun.chat.attachments import Attachments
from llmrun.chat.conversation import Conversation
from llmrun.chat.images import ImageFile
from llmrun.chat.store.export import ending
from llmrun.chat.store.store import Sessions
from llmrun.chat.store.turns import Question
from llmrun.cli.answering import DisplayOptions, cancelling, on_ctrl_c, show, show_again, show_attached
from llmrun.cli.options import LoadingOptions
from llmrun.cli.tools import Tools
from llmrun.errors import CancelledError, LlmrunError, TerminatedError, UsageError
from llmrun.model.chat_model import ChatModel
from llmrun.protocol.messages import Event, Finished
from llmrun.ui.prompt.input import ChatInput
from llmrun.ui.terminal.format import counted, short
from llmrun.ui.terminal.keyboard import keyboard
from llmrun.ui.terminal.output import Output

_MOST_ROUNDS = 20  # of calls in one turn
_LONG_ANSWER = 64  # tokens, from which on drafts are worth looking into
_TURNS_SHOWN = 2  # of a chat that goes on
_MOST_OF_QUESTION = 240  # characters of one that is shown again

Events = Generator[Event, None, None]


class Chat:
    """One run of `llmrun chat`: reads, answers and obeys until the user leaves.

    Attributes:
        store: the saved chats.
        conversation: that goes on now.
        output: where commands say what they did.
        typed: what the user types.
        loading: how models that come later are loaded.
        shown_as: how answers are shown.
        attached: files that go along with the next message.
        tools: what the model may call.
        models: those that came after the first.
        leaves: nothing more is read.
    """

    def __init__(
        self,
        output: Output,
        typed: ChatInput,
        store: Sessions,
        conversation: Conversation,
        loading: LoadingOptions,
        shown_as: DisplayOptions,
        attached: Attachments,
        tools: Tools,
        find_command: Callable[[str], Callable[[Chat, str], None] | None],
    ) -> None:
        self.store = store
        self.conversation = conversation
        self.output = output
        self.typed = typed
        self.loading = loading
        self.shown_as = shown_as
        self.attached = attached
        self.tools = tools
        self._find_command = find_command
        self.models = ExitStack()
        self.leaves = False

    def greet(self) -> None:
        """Say who is there, and what was said last where a chat goes on."""
        if not self.typed.interactive:
            return
        model, chat = self.conversation.model, self.conversation.chat
        window = f"context window {model.n_ctx:,} tokens" if model.n_ctx else "context window not known"
        self.output.note(f"{_called(model)}: {window}. /? for help, Ctrl-D leaves.")
        show_attached(self.output, self.attached)
        if chat.entries:
            turns = sum(isinstance(entry.part, Question) for entry in chat.entries)
            self.output.note(f"Going on with {chat.name}: {counted(turns, 'turn')}.")
            self._show_last_turns()

    def _show_last_turns(self) -> None:
        """What was said last, and how to have it answered where it was not."""
        chat = self.conversation.chat
        for entry in chat.entries[-2 * _TURNS_SHOWN :] if self.output.stdout_is_terminal else ():
            if isinstance(entry.part, Question):
                self.output.note(f">>> {short(entry.part.shown, _MOST_OF_QUESTION)}")
            else:
                for call in (call for made in entry.part.rounds for call in made.calls):
                    self.output.note(f"● {call.name}")
                show_again(self.output, entry.part.content, self.shown_as)
                if ending(entry.part):
                    self.output.note(f"({ending(entry.part)})")
        if not chat.is_answered:
            self.output.note("The last question has no answer yet: /retry asks it again.")

    def run(self) -> None:
        """Until the user leaves, or stdin ends."""
        while not self.leaves and (message := self._read()) is not None:
            if self.typed.is_command:
                self.obey(message)
            else:
                self._say(message)
        self.conversation.save_state()
        if self.typed.interactive:
            self._show_resume_hint()
        self.conversation.chat.release()
        self.models.close()

    def _read(self) -> str | None:
        """The next message. While the user reads a long answer, the engine finds out what drafting would cost."""
        last = self.conversation.last
        if last is None or last.stats.completion_tokens < _LONG_ANSWER or not self.typed.interactive:
            return self.typed.read()
        with self.conversation.model.measuring_steps():
            return self.typed.read()

    def _show_resume_hint(self) -> None:
        chat = self.conversation.chat
        if chat.id is not None and self.store.folder is not None and not chat.is_detached:
            self.output.note(f"Saved. To go on: llmrun chat --session {shlex.quote(chat.name)}", is_command=True)

    def obey(self, message: str) -> None:
        """Do what a command says, or say why that is impossible."""
        word = message.split()[0]
        command = self._find_command(word)
        if command is None:
            self.output.note(f"There is no command {word}; /? lists them. As a message: /{short(message)}")
            return
        try:
            command(self, message[len(word) :].strip())
        except TerminatedError:
            raise
        except CancelledError as error:
            self.output.note(f"{error}")
        except LlmrunError as error:
            self.output.error(error)

    def _say(self, message: str) -> None:
        """Answer a message; the files that were waiting go along."""
        attached = self.attached
        pictures = tuple(map(ImageFile.of, attached.pictures))
        question = Question(attached.before(message), message if attached.block else "", pictures)
        if self.answer(self.conversation.ask(question)):
            self.attached = Attachments()

    def answer(
        self,
        events: Events,
        show: Callable[[Generator[Event, None, None]], Finished] | None = None,
    ) -> bool:
        """Show an answer as it comes. Where nobody can read the error and try again, it ends the command.

        Args:
            show: shows it to its end; by default with the rounds that follow where the model calls tools.
        """
        try:
            with on_ctrl_c(signal.default_int_handler):
                finished = (show or self._show_rounds)(events)
        except KeyboardInterrupt:  # at the question whether a tool may run
            self.output.note("Stopped.")
            return True
        except LlmrunError as error:
            if not self.typed.interactive or isinstance(error, TerminatedError):
                raise
            self.output.error(error)
            if not isinstance(error, UsageError):
                self.output.note("What was said is kept. /retry asks the question again.")
            return False
        finally:
            self.conversation.end_turn()
        if finished.reason == "repeats":
            self.output.note(f'Stopped: the answer repeated "{short(finished.detail)}" (--no-loop-guard lets it).')
        return True

    def _show_rounds(self, events: Events) -> Finished:
        """Show an answer of the model's, and while it calls tools, the next one."""
        conversation = self.conversation
        finished = self._show_round(events)
        for _ in range(_MOST_ROUNDS):
            if not conversation.calls:
                return finished
            results = [self.tools.answer(call) for call in conversation.calls]
            finished = self._show_round(conversation.go_on(results))
        if conversation.calls:
            self.output.note(f"Stopped: there were {_MOST_ROUNDS} rounds of calls. Say go on to have more.")
        return finished

    def _show_round(self, events: Events) -> Finished:
        """Show an answer of the model's, which may end in calls."""
        # Whatever is raised here, what came of the answer is saved before the store is closed.
        with closing(events), keyboard(self.output.stdin, echoes=False), cancelling(self.conversation.model):
            finished = show(self.output, events, self.conversation.model, self.shown_as)
            for _ in events:
                pass  # the turn is saved behind its last event
        return finished


def _called(model: ChatModel) -> str:
    """A model's name, and the server's where one answers."""
    return f"{model.name} at {model.used.server}" if model.used.server else model.name
