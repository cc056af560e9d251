"""A chat at work: messages are answered, slash commands obeyed. The names are those that Ollama's users know.

Owns what each command does and says; what a conversation is stands in llmrun.chat.conversation.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

from llmrun.chat.attachments import Attached, attach
from llmrun.chat.conversation import Conversation
from llmrun.chat.store.export import ending
from llmrun.chat.store.store import Sessions
from llmrun.chat.store.turns import Question
from llmrun.cli.answering import ShownAs, cancelling, on_ctrl_c, show, show_again, show_attached
from llmrun.cli.loading import open_model
from llmrun.cli.options import LoadingOptions, read_think
from llmrun.cli.sampling import FLAGS, read_value, sampling_rows, shown_value
from llmrun.cli.tools import Tools
from llmrun.errors import LlmrunError, TerminatedError, UsageError
from llmrun.model import A_CHAT
from llmrun.planning.speculation import AUTO, OFF, read_speculate
from llmrun.protocol.messages import Event, Finished
from llmrun.protocol.params import BOUNDS
from llmrun.ui.answer.keyboard import quiet_keyboard
from llmrun.ui.prompt.completion import Candidate, Completion, file_names
from llmrun.ui.prompt.input import KEYS, ChatInput
from llmrun.ui.terminal.format import counted
from llmrun.ui.terminal.output import Output

REMEMBERED = 16  # tokens that /why can be asked about; each costs 4 bytes for every token of the vocabulary
_CANDIDATES = 8
_MOST_ROUNDS = 20  # of calls in one turn
_LONG_ANSWER = 64  # tokens, from which on drafts are worth looking into
_TURNS_SHOWN = 2  # of a chat that goes on
_MOST_OF_QUESTION = 240  # characters of one that is shown again

HELP = {
    "/help": "this help; also /?",
    "/retry": "another answer to the last question",
    "/edit": "ask the last question differently",
    "/undo": "take the last question and its answer back",
    "/branch [NAME]": "go on under a name of its own, or go to a branch; without a name, list them",
    "/file PATTERN...": "text files that go along with the next message",
    "/set [NAME VALUE]": "a sampling value, such as /set temp 0.5; /set system TEXT; without a name, all of them",
    "/think MODE": "on, off, hide, fold, or a number of tokens",
    "/speculation [MODE]": "drafted tokens: on tints them; off, auto, or how many a step",
    "/system [TEXT]": "another system prompt from now on; without a text, show it",
    "/model [NAME]": "go on with another model; without a name, say which it is",
    "/show": "the model, as `llmrun show` does",
    "/tools": "what the model may call",
    "/context": "what fills the context window",
    "/stats": "what the last answer cost",
    "/why [COUNT]": "how the least certain of the last tokens was chosen, or that many of the last",
    "/explain": "what the model did for the last answer, from its tokens to its choices",
    "/save NAME": "call this chat something",
    "/load NAME": "go on with another saved chat",
    "/sessions": "the saved chats",
    "/export FILE": "write this chat as .md, .json or .jsonl",
    "/copy": "the last answer into the clipboard",
    "/multiline": "Enter makes newlines, Alt-Enter sends; once more: as before",
    "/clear": "forget the conversation, keep the system prompt",
    "/bye": "leave, as Ctrl-D does",
}
_OTHER_NAMES = {"/?": "/help", "/exit": "/bye", "/quit": "/bye", "/q": "/bye", "/history": "/sessions"}


class Chat:
    """One run of `llmrun chat`: reads, answers and obeys until the user leaves."""

    def __init__(
        self,
        output: Output,
        typed: ChatInput,
        store: Sessions,
        conversation: Conversation,
        loading: LoadingOptions,
        shown_as: ShownAs,
        attached: Attached,
        tools: Tools,
    ) -> None:
        self.store = store
        self.conversation = conversation
        self._output = output
        self._typed = typed
        self._loading = loading
        self._shown_as = shown_as
        self._attached = attached
        self.tools = tools
        self._commands: Mapping[str, Callable[[str], None]] = {
            "/image": self._image,
            **{name.split()[0]: getattr(self, f"_{name.split()[0][1:]}") for name in HELP if name != "/bye"},
        }
        self._models = ExitStack()  # those that came after the first

    def greet(self) -> None:
        """Say who is there, and what was said last where a chat goes on."""
        if not self._typed.interactive:
            return
        model, chat = self.conversation.model, self.conversation.chat
        self._output.note(
            f"{model.spec.name}: context window {model.loaded.n_ctx:,} tokens. /? for help, Ctrl-D leaves."
        )
        show_attached(self._output, self._attached)
        if chat.entries:
            turns = sum(isinstance(entry.part, Question) for entry in chat.entries)
            self._output.note(f"Going on with {chat.name}: {counted(turns, 'turn')}.")
            self._show_last_turns()

    def _show_last_turns(self) -> None:
        """What was said last, and how to have it answered where it was not."""
        chat = self.conversation.chat
        for entry in chat.entries[-2 * _TURNS_SHOWN :] if self._output.stdout_is_terminal else ():
            if isinstance(entry.part, Question):
                self._output.note(f">>> {_short(entry.part.shown, _MOST_OF_QUESTION)}")
            else:
                for call in (call for made in entry.part.rounds for call in made.calls):
                    self._output.note(f"● {call.name}")
                show_again(self._output, entry.part.content, self._shown_as)
                if ending(entry.part):
                    self._output.note(f"({ending(entry.part)})")
        if not chat.is_answered:
            self._output.note("The last question has no answer yet: /retry asks it again.")

    def run(self) -> None:
        """Until the user leaves, or stdin ends."""
        while (message := self._read()) is not None:
            word = message.split()[0]
            if not self._typed.is_command:
                self._say(message)
            elif _OTHER_NAMES.get(word, word) == "/bye":
                break
            else:
                self._obey(message)
        self.conversation.save_state()
        if self._typed.interactive:
            self._say_how_to_come_back()
        self.conversation.chat.release()
        self._models.close()

    def _read(self) -> str | None:
        """The next message. While the user reads a long answer, the engine finds out what drafting would cost."""
        last = self.conversation.last
        if last is None or last.stats.completion_tokens < _LONG_ANSWER or not self._typed.interactive:
            return self._typed.read()
        with self.conversation.model.measuring_steps():
            return self._typed.read()

    def _say_how_to_come_back(self) -> None:
        chat = self.conversation.chat
        if chat.id is not None and self.store.folder is not None and not chat.is_detached:
            self._output.note(f"Saved. To go on: llmrun chat --session {shlex.quote(chat.name)}")

    def _obey(self, message: str) -> None:
        word = message.split()[0]
        rest = message[len(word) :]
        command = self._commands.get(_OTHER_NAMES.get(word, word))
        if command is None:
            self._output.note(f"There is no command {word}; /? lists them.")
            return
        try:
            command(rest.strip())
        except TerminatedError:
            raise
        except LlmrunError as error:
            self._output.error(error)

    def _say(self, message: str) -> None:
        """Answer a message; the files that were waiting go along."""
        question = Question(self._attached.before(message), message if self._attached.block else "")
        if self._answer(self.conversation.ask(question)):
            self._attached = Attached()

    def _answer(self, events: Generator[Event, None, None]) -> bool:
        """Show an answer as it comes. Where nobody can read the error and try again, it ends the command."""
        try:
            with on_ctrl_c(signal.default_int_handler):
                finished = self._show_rounds(events)
        except KeyboardInterrupt:  # at the question whether a tool may run
            self._output.note("Stopped.")
            return True
        except LlmrunError as error:
            if not self._typed.interactive or isinstance(error, TerminatedError):
                raise
            self._output.error(error)
            if not isinstance(error, UsageError):
                self._output.note("What was said is kept. /retry asks the question again.")
            return False
        finally:
            self.conversation.end_turn()
        if finished.reason == "repeats":
            self._output.note(f'Stopped: the answer repeated "{_short(finished.detail)}" (--no-loop-guard lets it).')
        return True

    def _show_rounds(self, events: Generator[Event, None, None]) -> Finished:
        """Show an answer of the model's, and while it calls tools, the next one."""
        conversation = self.conversation
        finished = self._show_round(events)
        for _ in range(_MOST_ROUNDS):
            if not conversation.calls:
                return finished
            results = [self.tools.answer(call) for call in conversation.calls]
            finished = self._show_round(conversation.go_on(results))
        if conversation.calls:
            self._output.note(f"Stopped: there were {_MOST_ROUNDS} rounds of calls. Say go on to have more.")
        return finished

    def _show_round(self, events: Generator[Event, None, None]) -> Finished:
        """Show an answer of the model's, which may end in calls."""
        # Whatever is raised here, what came of the answer is saved before the store is closed.
        with closing(events), quiet_keyboard(self._output), cancelling(self.conversation.model):
            finished = show(self._output, events, self.conversation.model, self._shown_as)
            for _ in events:
                pass  # the turn is saved behind its last event
        return finished

    # ---- commands, in the order of the help; each gets what stands behind its name ----

    def _help(self, rest: str) -> None:
        width = max(map(len, HELP))
        for name, meaning in HELP.items():
            self._output.note(f"  {name:{width}}  {meaning}")
        for key, meaning in KEYS.items():
            self._output.note(f"  {key:{width}}  {meaning}")

    def _retry(self, rest: str) -> None:
        self._answer(self.conversation.retry())

    def _edit(self, rest: str) -> None:
        last = self.conversation.chat.last_question
        if last is None or not isinstance(last.part, Question):
            self._output.note("There is no question yet.")
            return
        if not rest:
            self._typed.prefill(last.part.shown)
            rest = self._typed.read() or ""
        if rest:
            self._answer(self.conversation.edit(Question(rest)))

    def _undo(self, rest: str) -> None:
        question = self.conversation.chat.undo()
        self._output.note(f'Taken back: "{_short(question.shown)}"' if question else "There is nothing to take back.")

    def _branch(self, rest: str) -> None:
        chat = self.conversation.chat
        if not rest:
            self._list_branches()
        elif any(rest in (branch.name, f"#{branch.head}") for branch in chat.branches()):
            chat.switch(rest)
            self._output.note(f"Going on with {chat.branch}.")
        else:
            chat.make_branch(rest)
            self._output.note(f"From here on this is {rest}.")

    def _list_branches(self) -> None:
        """Each with where it leaves the one that goes on, and what was said there instead."""
        chat = self.conversation.chat
        for branch in chat.branches():
            name, turns = branch.name or f"#{branch.head}", counted(branch.turns, "turn")
            if branch.current:
                self._output.note(f'* {name}: {turns}, this one, last "{_short(branch.last)}"')
                continue
            fork = chat.difference(branch)
            if fork is None:
                self._output.note(f"  {name}: {turns}, all of them in this one too")
            else:
                turn, said = fork
                self._output.note(f'  {name}: {turns}, differs from turn {turn} on: "{_short(said)}"')

    def _file(self, rest: str) -> None:
        patterns = rest.split()
        self._attached = attach(patterns) if patterns else Attached()
        show_attached(self._output, self._attached)
        if not patterns:
            self._output.note("No file goes along.")

    def _image(self, rest: str) -> None:
        raise UsageError("images are not supported yet", hint="describe it in words; /file takes text files")

    def _set(self, rest: str) -> None:
        words = rest.removeprefix("parameter ").split(maxsplit=1)
        if not words:
            from llmrun.ui.views.sampling import show_sampling

            show_sampling(self._output, sampling_rows(*self.conversation.sampling()))
        elif words[0] == "system":
            self._system(words[1] if len(words) > 1 else "")
        elif len(words) == 1:
            raise UsageError(f"/set {words[0]} needs a value", hint="/set temp 0.5; /set lists them")
        else:
            name, value = read_value(words[0], words[1], "/set ")
            self.conversation.manner.session[name] = value
            self._output.note(f"{FLAGS[name][0]} is {shown_value(name, value)} from now on.")

    def _think(self, rest: str) -> None:
        think = read_think(rest, "/think")
        manner = self.conversation.manner
        manner.asked = replace(manner.asked, thinking=think.thinking, thinking_tokens=think.tokens)
        self._shown_as = replace(self._shown_as, think=think.shown)
        if not self.conversation.model.loaded.thinking_tags:
            self._output.note(f"{self.conversation.model.spec.name} is not a model that thinks first.")

    def _speculation(self, rest: str) -> None:
        drafting = self.conversation.model.drafting
        if rest not in ("", "on"):
            drafting.most = read_speculate(rest, "/speculation")
        elif rest == "on" and drafting.most == OFF:
            drafting.most = AUTO
        self._loading = replace(self._loading, speculate=drafting.most)  # of the models that come
        self._shown_as = replace(self._shown_as, tints=(self._shown_as.tints or rest == "on") and rest != "off")
        tints = "; those that were accepted are tinted" if self._shown_as.tints else ""
        self._output.note(f"Drafted tokens: {drafting.words}{tints}.")

    def _system(self, rest: str) -> None:
        chat = self.conversation.chat
        if rest:
            chat.set_system(rest.strip('"'))
        self._output.note(f"System prompt: {chat.system}" if chat.system else "There is no system prompt.")

    def _model(self, rest: str) -> None:
        conversation = self.conversation
        if not rest:
            self._output.note(f"{conversation.model.spec.name}: {conversation.model.path}")
            return
        before = conversation.model
        saves = self.store.folder is not None
        self._loading = replace(self._loading, draft=None)  # it was for the other one
        wanted = open_model(
            self._output, rest, self._loading, warm_up=True, keeps_states=saves, another=True, expected=A_CHAT
        )
        conversation.model = self._models.enter_context(wanted)
        before.close()
        conversation.last = None
        self._output.note(f"Going on with {conversation.model.spec.name}.")

    def _show(self, rest: str) -> None:
        from llmrun.cli.show import header_facts
        from llmrun.ui.views.model_facts import show_model

        show_model(self._output, header_facts(self.conversation.model.header), stderr=True)

    def _tools(self, rest: str) -> None:
        from llmrun.ui.views.tools import show_tools

        show_tools(self._output, self.tools.offered)
        if not self.tools.offered:
            self._output.note("There are none: llmrun chat --tools FILE.py")

    def _context(self, rest: str) -> None:
        from llmrun.ui.views.context import show_context

        messages = self.conversation.chat.messages()
        if not messages:
            self._output.note("Nothing fills the context window yet.")
            return
        show_context(self._output, messages, self.conversation.count(), self.conversation.model.loaded.n_ctx)

    def _stats(self, rest: str) -> None:
        answer = self.conversation.chat.last_answer
        if answer is None:
            self._output.note("There is no answer yet.")
        elif not answer.stats.completion_tokens:
            self._output.note("The last answer has no figures: llmrun or its engine died before its end.")
        else:
            from llmrun.ui.answer.meter import summary

            times = self.conversation.model.drafting.measured
            self._output.note(summary(Finished(0, answer.finish, answer.stats), times))

    def _why(self, rest: str) -> None:
        count = rest or "1"
        if not count.isdecimal() or not 1 <= int(count) <= REMEMBERED:
            raise UsageError(f"invalid /why {rest}", why=f"must be a number of tokens, 1 to {REMEMBERED}")
        self._refuse_old_answers()
        from llmrun.ui.views.sampling import least_certain, show_choice

        choices = self.conversation.model.explain(int(count) if rest else REMEMBERED, _CANDIDATES).choices
        for choice in choices if rest else (least_certain(choices),):
            show_choice(self._output, choice)

    def _explain(self, rest: str) -> None:
        self._refuse_old_answers()
        from llmrun.insight.explain import explain_answer
        from llmrun.ui.views.explain import show_explained

        show_explained(self._output, explain_answer(self.conversation.model))

    def _refuse_old_answers(self) -> None:
        """Raise UsageError where the last answer is not of this run."""
        if self.conversation.last is None:
            why = "only the last answer of this run can be explained: logits are not saved with a chat"
            raise UsageError("there is no answer to explain", why=why, hint="ask something, or /retry")

    def _save(self, rest: str) -> None:
        if not rest:
            raise UsageError("/save needs a name", hint="/save trip-to-rome; every turn is saved by itself anyway")
        chat = self.conversation.chat
        chat.rename(rest)
        self._output.note(f"This chat is {rest} now: llmrun chat --session {shlex.quote(chat.name)}")

    def _load(self, rest: str) -> None:
        if not rest:
            raise UsageError("/load needs a name", hint="/sessions lists them")
        chat = self.store.open(rest)
        if chat.open_elsewhere:
            raise UsageError(f"{chat.name} is open in another llmrun", hint="leave it there first")
        self.conversation.save_state()
        self.conversation.chat.release()
        self.conversation.chat = chat
        self.greet()

    def _sessions(self, rest: str) -> None:
        for facts in self.store.all()[:20]:
            self._output.note(f"  {facts.name}: {counted(facts.turns, 'turn')}, {_short(facts.first)}")

    def _export(self, rest: str) -> None:
        from llmrun.chat.store.export import export, format_for
        from llmrun.storage import write_whole

        form = format_for(rest)
        if form is None:
            raise UsageError("/export needs a file name with .md, .json or .jsonl", hint="/export chat.md")
        if self.conversation.chat.id is None:
            raise UsageError("there is nothing to export yet", hint="ask something first")
        path = Path(rest).expanduser()
        write_whole(path, export(self.conversation.chat.tree(), form))
        self._output.note(f"Written to {path}.")

    def _copy(self, rest: str) -> None:
        answer = self.conversation.chat.last_answer
        if answer is None:
            self._output.note("There is no answer yet.")
        elif self._output.to_clipboard(answer.content):
            self._output.note("The last answer is in the clipboard, if the terminal lets programs write it.")
        else:
            self._output.note("It is too long for the terminal's clipboard; /export writes a file.")

    def _multiline(self, rest: str) -> None:
        self._typed.multiline = not self._typed.multiline
        self._output.note(self._typed.multiline_hint)

    def _clear(self, rest: str) -> None:
        self.conversation.chat.clear()
        self._output.note("The conversation is forgotten. It stays saved: /branch shows where.")


def completions(chat: Chat) -> dict[str, Completion | None]:
    """What the Tab key offers behind each command."""
    from llmrun.cli.completion import complete_model

    offers: dict[str, Completion | None] = {name.split()[0]: None for name in (*HELP, *_OTHER_NAMES)}
    offers["/model"] = lambda words: complete_model(words[-1])
    offers["/load"] = lambda words: [facts.name for facts in chat.store.all()]
    offers["/set"] = lambda words: [Candidate(flag.lstrip("-"), _hint(name)) for name, (flag, _) in FLAGS.items()]
    offers["/think"] = lambda words: ["on", "off", "hide", "fold"]
    offers["/speculation"] = lambda words: ["on", "off", "auto"]
    offers["/branch"] = lambda words: [branch.name for branch in chat.conversation.chat.branches() if branch.name]
    offers["/file"] = offers["/export"] = file_names
    return offers


def _hint(parameter: str) -> str:
    """The bounds of a sampling parameter, and what it does."""
    low, high = BOUNDS.get(parameter, ("", ""))
    return f"{low} to {high}. {FLAGS[parameter][1]}" if parameter in BOUNDS else FLAGS[parameter][1]


def _short(text: str, most: int = 60) -> str:
    line = " ".join(text[: 4 * most].split())
    return line if len(line) <= most else line[: most - 1].rstrip() + "…"
