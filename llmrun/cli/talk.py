"""A running chat: reads messages, answers them, and runs slash commands.

Owns this loop; llmrun.chat.conversation has the conversation, llmrun.cli.slash the commands.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack

from llmrun.chat.attachments import Attachments
from llmrun.chat.conversation import Conversation
from llmrun.chat.notes import describe_notes
from llmrun.chat.passages import FolderIndex, Passage, passages_for
from llmrun.chat.store.chat import SavedChat
from llmrun.chat.store.export import ending
from llmrun.chat.store.store import Sessions
from llmrun.chat.store.turns import Question
from llmrun.cli.answering import on_ctrl_c, show_again, show_attached
from llmrun.cli.docs import show_found
from llmrun.cli.options import LoadingOptions
from llmrun.cli.tools import Tools
from llmrun.errors import CancelledError, LlmrunError, TerminatedError, UsageError, did_you_mean
from llmrun.model.chat_model import ChatModel
from llmrun.protocol.messages import Event, Finished
from llmrun.ui.answer.view import DisplayOptions
from llmrun.ui.prompt.input import ChatInput
from llmrun.ui.terminal.format import counted, short
from llmrun.ui.terminal.output import Output

_LONG_ANSWER = 64  # tokens; the cost of drafts is measured after longer answers
_SHOWN_TURNS = 2  # of a resumed chat
_MAX_QUESTION = 240  # characters of a question that is shown again

Events = Generator[Event, None, None]


class Chat:
    """One run of `llmrun chat`.

    Args:
        commands: the functions of the slash commands, by name.
        index: of the documents of --docs.
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
        commands: Mapping[str, Callable[[Chat, str], None]],
        index: FolderIndex | None = None,
    ) -> None:
        self.store = store
        self.conversation = conversation
        self.output = output
        self.typed = typed
        self.loading = loading  # of further models
        self.shown_as = shown_as
        self.attached = attached  # to the next message
        self.tools = tools
        self.models = ExitStack()  # loaded after the first one
        self.leaves = False  # read no further message
        self.index = index  # of the documents of --docs
        self._commands = commands

    def greet(self) -> None:
        """Print the model and its context window, and the last turns of a resumed chat."""
        if not self.typed.interactive:
            return
        model, chat = self.conversation.model, self.conversation.chat
        window = f"context window {model.n_ctx:,} tokens" if model.n_ctx else "unknown context window"
        self.output.note(f"{_called(model)}: {window}. /? for help, Ctrl-D to leave.")
        self.tell_notes()
        show_attached(self.output, self.attached)
        if chat.entries:
            turns = sum(isinstance(entry.part, Question) for entry in chat.entries)
            self.output.note(f"Resuming {chat.name}: {counted(turns, 'turn')}.")
            self._show_last_turns()
        elif chat.id is not None:
            self.output.note(f"Resuming {chat.name}, which was cleared: {way_back(chat)}.")

    def tell_notes(self) -> None:
        """Print how many notes are in the prompt, if there are any."""
        if about := describe_notes():
            self.output.note(about)

    def _show_last_turns(self) -> None:
        """Print the last turns, and a hint if the last question has no answer."""
        chat = self.conversation.chat
        for entry in chat.entries[-2 * _SHOWN_TURNS :] if self.output.stdout_is_terminal else ():
            if isinstance(entry.part, Question):
                self.output.note(f">>> {short(entry.part.shown, _MAX_QUESTION)}")
            else:
                for call in (call for each in entry.part.rounds for call in each.calls):
                    self.output.note(f"● {call.name}")
                show_again(self.output, entry.part.content, self.shown_as)
                if ending(entry.part):
                    self.output.note(f"({ending(entry.part)})")
        if not chat.is_answered:
            self.output.note("The last question has no answer yet: /retry asks it again.")

    def run(self) -> None:
        """Read and answer until the user leaves, or stdin ends."""
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
        """Return the next message. While the user reads a long answer, the engine compares ways to compute."""
        last = self.conversation.last
        if last is None or last.stats.completion_tokens < _LONG_ANSWER or not self.typed.interactive:
            return self.typed.read()
        with self.conversation.model.while_idle():
            return self.typed.read()

    @property
    def is_saved(self) -> bool:
        """Whether another run can resume the chat."""
        return self.store.folder is not None and not self.conversation.chat.is_detached

    def _show_resume_hint(self) -> None:
        chat = self.conversation.chat
        if chat.id is not None and self.is_saved:
            self.output.note(f"Saved. To resume: llmrun chat --session {shlex.quote(chat.name)}", is_command=True)

    def obey(self, message: str) -> None:
        """Run a slash command, or print why that is not possible."""
        word = message.split()[0]
        if word not in self._commands:
            meant = did_you_mean(word, self._commands, "/? lists all.")
            self.output.note(f"Unknown command {word}: {meant} To send it as a message: /{short(message)}")
            return
        try:
            with self.typed.unechoed():
                self._commands[word](self, message[len(word) :].strip())
        except TerminatedError:
            raise
        except CancelledError as error:
            self.output.note(f"{error}")
        except LlmrunError as error:
            self.output.error(error)

    def _say(self, message: str) -> None:
        """Answer a message, with the attached files."""
        try:
            passages = self.find_passages(message) or ()
        except LlmrunError as error:
            if not self.typed.interactive or isinstance(error, TerminatedError):
                raise
            self.output.error(error)
            return
        self.tools.update(self.conversation)
        question = Question.of(message, self.attached, passages)
        n_entries = len(self.conversation.chat.entries)
        self.answer(self.conversation.ask(question))
        # A question that is saved has its files, answered or not: /retry sends them, the next message must not.
        # Files that were removed may have killed the engine: the next message must not send them either.
        if len(self.conversation.chat.entries) > n_entries or self.conversation.is_removed:
            self.attached = Attachments()

    def find_passages(self, message: str, *, is_edit: bool = False) -> tuple[Passage, ...] | None:
        """Return the passages that go along with a question; None without documents.

        Args:
            is_edit: it replaces the last question.
        """
        if self.index is None:
            return None
        asked = [entry.part.shown for entry in self.conversation.chat.entries if isinstance(entry.part, Question)]
        before = asked[: -1 if is_edit else None]
        found = passages_for(self.index, message, before[-1] if before else "", self.conversation.model.n_ctx)
        show_found(self.output, found, hint=" (/sources)" if self.typed.interactive else "")
        return found

    def answer(
        self,
        events: Events,
        show: Callable[[Generator[Event, None, None]], Finished] | None = None,
    ) -> bool:
        """Show an answer. An error ends the command if no user can try again.

        Args:
            show: shows the events; by default with further rounds after tool calls.
        """
        try:
            with on_ctrl_c(signal.default_int_handler):
                finished = show(events) if show else self.tools.show_rounds(self.conversation, events, self.shown_as)
        except KeyboardInterrupt:  # at the question about a tool call
            self.output.note("Stopped.")
            return True
        except LlmrunError as error:
            if not self.typed.interactive or isinstance(error, TerminatedError):
                raise
            self.output.error(error)
            if not isinstance(error, UsageError) and not self.conversation.is_removed:
                self.output.note("The question is saved. /retry asks it again.")
            return False
        finally:
            self.conversation.end_turn()
        if finished.stats.loops_closed:
            self.output.note("The reasoning repeated itself and was closed (--no-loop-guard allows that).")
        if finished.reason == "repeats":
            self.output.note(f'Stopped: the answer repeated "{short(finished.detail)}" (--no-loop-guard allows that).')
        return True


def way_back(saved: SavedChat) -> str:
    """Return the command that returns to the newest conversation of a cleared chat, in words."""
    branches = [branch for branch in saved.branches() if branch.turns and not branch.current]
    if not branches:
        return "/branch lists it"
    newest = max(branches, key=lambda branch: branch.head or 0)
    return f"/branch {newest.name or f'#{newest.head}'} returns to its {counted(newest.turns, 'turn')}"


def _called(model: ChatModel) -> str:
    """Return the model's name, with the server's if it has one."""
    return f"{model.name} at {model.used.server}" if model.used.server else model.name
