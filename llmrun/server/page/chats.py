"""The saved chats as the page sees them: the store of the terminal's chats, in a thread of its own.

Owns which chat is being answered, and what is saved of an answer and of the files that come with a question; must not
know HTTP. SQLite's connections belong to one thread, and a slow disk must not hold up the event loop.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from llmrun.chat.attachments import AttachedFile, Attachments, read_media
from llmrun.chat.media import MediaCache, MediaFile, MediaReader
from llmrun.chat.notes import system_messages
from llmrun.chat.passages import FolderIndex, Passage, passages_block, passages_for, passages_line
from llmrun.chat.store.chat import SavedChat
from llmrun.chat.store.export import export
from llmrun.chat.store.rows import name_from
from llmrun.chat.store.store import MEDIA, Sessions, folder_in
from llmrun.chat.store.turns import Answer, Question, Tree, TurnEntry, WindowTurn, in_window, path_to
from llmrun.errors import UsageError
from llmrun.protocol.media import FORMATS, modality_of, must_be_converted, other_audio
from llmrun.protocol.messages import Message
from llmrun.server.protocols.fields import Fields
from llmrun.storage import write_whole
from llmrun.system import user_path

_UNSAFE = re.compile(r"[^\w.() -]|^\.+")
_LONGEST_NAME = 200  # bytes; a file system has 255, and a file being written a few more in its name


class Upload(NamedTuple):
    """One file."""

    name: str
    data: bytes


class Uploads(NamedTuple):
    """The files of one question."""

    texts: tuple[Upload, ...] = ()  # in UTF-8
    media: tuple[Upload, ...] = ()


NO_UPLOADS = Uploads()


def read_uploads(fields: Fields) -> Uploads:
    """Return the files in a request: {"files": [{"name", "text"}], "media": [{"name", "data" in base64}]}.

    Raises:
        UsageError: an image or an audio file is not one that the engine can decode.
    """
    texts = [
        Upload(_name(each), each.needed_text("text").encode("utf-8", "replace")) for each in fields.objects("files")
    ]
    media = tuple(map(read_upload, fields.objects("media")))
    for each in media:
        if modality_of(each.data) is None:
            what = f"{each.name} can't be attached"
            if other_audio(each.data):
                raise must_be_converted(each.data, each.name, what)
            raise UsageError(what, why=f"images must be {FORMATS['image']}, audio {FORMATS['audio']}")
    return Uploads(tuple(texts), media)


def read_upload(fields: Fields) -> Upload:
    """Return a file: {"name", "data" in base64}. Raises UsageError if it is not in base64."""
    try:
        data = base64.b64decode(fields.needed_text("data"), validate=True)
    except ValueError:  # also for other than ASCII
        raise UsageError(f"invalid {fields.name('data')}", why="must be a file in base64") from None
    return Upload(_name(fields), data)


def save_media(media: tuple[Upload, ...], folder: Path) -> list[Path]:
    """Write images and audio to a folder, each in one named after its hash, and return the files."""
    files = [folder / hashlib.sha256(each.data).hexdigest() / each.name for each in media]
    for file, each in zip(files, media, strict=True):
        if not file.exists():
            write_whole(file, each.data, makes_folder=True)
    return files


def _name(upload: Fields) -> str:
    """Return the name of a file without folders."""
    name = upload.needed_text("name").replace("\\", "/").rpartition("/")[2]
    return _UNSAFE.sub("_", name).encode()[:_LONGEST_NAME].decode(errors="ignore") or "file"


_Result = TypeVar("_Result")
Said = list[tuple[Message, tuple[MediaFile, ...]]]
"""Messages, each with its images and audio, which are read for every request."""

OnFile = Callable[[str, int, int], None]
"""Called with a file, the number of files done, and of those to do."""
_BY_WORDS = "words"  # folder of indexes without vectors, beside those of --docs
_MOST_HITS = 100
_MARKUP = re.compile(r"^\s{0,3}(?:#{1,6} |> |[-*+] |```.*)|\*\*|`", re.MULTILINE)
_LONGEST_TITLE = 60  # characters
_MOST_SHOWN = 2000  # characters of the text files of a question


@dataclass
class OpenQuestion:
    """A question that is being answered."""

    saved: SavedChat
    entry: int
    question: Question
    before: list[WindowTurn]
    beginning: list[Message]  # of the prompt: the system prompt, and notes
    n_answers: int = 1  # being decoded


class PageChats:
    """The saved chats of this user. Every method runs in the store's thread.

    Args:
        state_dir: folder with the store, see config.Settings; it is opened, and its code loaded, by the first request.
        index: of documents; passages of them go along with each question.
    """

    def __init__(self, state_dir: Path, index: FolderIndex | None = None) -> None:
        self._state_dir, self._index = state_dir, index
        self._folders: dict[str, FolderIndex] = {}  # of chats, by the path; those that this server has read
        self._thread = ThreadPoolExecutor(1, "saved chats")
        self._store: Sessions | None = None
        self._answering: dict[int, OpenQuestion] = {}

    async def run(self, work: Callable[[], _Result]) -> _Result:
        """Call a method of this object in the store's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def close(self) -> None:
        """Close the store."""
        if self._store is not None:
            await self.run(self._store.close)
        self._thread.shutdown(wait=False)

    @property
    def _sessions(self) -> Sessions:
        if self._store is None:
            self._store = Sessions(folder_in(self._state_dir))
        return self._store

    def all(self) -> list[dict[str, Any]]:
        """Return all chats, the one used last first."""
        return [{**asdict(facts), "title": _title(facts.name, facts.firsts)} for facts in self._sessions.all()]

    def search(self, text: str) -> list[dict[str, Any]]:
        """Return the chats with messages that contain every word of a text, best first, with the text around."""
        found: dict[str, str] = {}
        for hit in self._sessions.search(text, _MOST_HITS):
            found.setdefault(hit.session, hit.excerpt)
        by_name = {facts["name"]: facts for facts in self.all()}
        return [{**by_name[name], "excerpt": excerpt} for name, excerpt in found.items() if name in by_name]

    def rename(self, chat: int, name: str) -> None:
        """Rename a chat. Raises UsageError for an invalid or taken name."""
        self._sessions.rename(self._sessions.tree(str(chat)).name, name)

    def delete(self, chat: int) -> None:
        """Delete a chat. Raises UsageError if it is being answered, or open in another llmrun."""
        if chat in self._answering:
            raise UsageError("this chat is being answered", hint="stop the answer first")
        self._sessions.delete(str(chat))

    def read(self, chat: int) -> dict[str, Any]:
        """Return the current branch of a chat."""
        return {"id": chat, "is_answering": chat in self._answering, **_conversation(self._sessions.tree(str(chat)))}

    def media(self, chat: int, entry: int, number: int) -> bytes:
        """Return the bytes of an image or audio file of a question. Raises UsageError if they are no longer there."""
        found = next((each.part for each in self._sessions.tree(str(chat)).entries if each.id == entry), None)
        media = found.media[number : number + 1] if isinstance(found, Question) else ()
        for file in media:
            with suppress(OSError):
                data = Path(file.path).read_bytes()
                if hashlib.sha256(data).hexdigest() == file.sha256:
                    return data
        raise UsageError("this file is not there any more, or has changed")

    def export(self, chat: int, form: str) -> str:
        """Return a chat in one of the formats of `llmrun sessions export`."""
        return export(self._sessions.tree(str(chat)), "json" if form == "json" else "markdown")

    def ask(
        self,
        chat: int | None,
        text: str,
        *,
        after: int | None = None,
        beside: int | None = None,
        system: str = "",
        documents: str = "",
        uploads: Uploads = NO_UPLOADS,
    ) -> dict[str, Any]:
        """Save a question in a new chat or at the end of one, and return the chat.

        Args:
            chat: None for a new one.
            after: the last entry that the page shows.
            beside: an earlier question that this one replaces, on a new branch.
            system: prompt of a new chat.
            documents: folder of a new chat, see index_folder().
            uploads: files that come with the question; an edited one keeps its own.

        Raises:
            UsageError: the chat is in use, or has other entries than the page shows; a file is too large.
        """
        new = partial(self._sessions.new, system=system, documents=documents)
        with _released(new() if chat is None else self._opened(chat)) as saved:
            last = saved.entries[-1].id if saved.entries else None
            if after != last:
                raise UsageError("this chat has gone on in another window", hint="reload the page")
            edited = None if beside is None else _entry(saved, beside)
            passages = self._passages(text, saved, edited)
            question = (
                self._question(text, uploads, passages or ())
                if edited is None
                else _question(edited).reworded(text, passages)
            )
            saved.add_question(question, beside=edited)
        assert saved.id is not None
        return self.read(saved.id)

    def _passages(self, text: str, saved: SavedChat, edited: TurnEntry | None) -> tuple[Passage, ...] | None:
        """Return the passages that go along with a question; None without documents."""
        index = self._index
        if saved.documents:
            index = self._folders.get(saved.documents) or self.index_folder(saved.documents)
        if index is None:
            return None
        before = saved.entries if edited is None else saved.entries[: saved.entries.index(edited)]
        asked = [each.part.shown for each in before if isinstance(each.part, Question)]
        return passages_for(index, text, asked[-1] if asked else "", 0)

    def index_folder(self, folder: str, on_progress: OnFile = lambda file, done, total: None) -> FolderIndex:
        """Read what is new in a folder, in any thread, and return its index, which finds passages by their words.

        Raises:
            UsageError: it is not a folder, or has too many files.
        """
        index = FolderIndex(user_path(folder), self._state_dir / _BY_WORDS)
        index.refresh(on_progress=on_progress)
        self._folders[folder] = index
        return index

    def set_documents(self, chat: int, folder: str) -> None:
        """Change the folder of a chat's documents, "" for none."""
        with _released(self._opened(chat)) as saved:
            saved.set_documents(folder)

    def _question(self, text: str, uploads: Uploads, passages: tuple[Passage, ...]) -> Question:
        """Return a question with its files; images and audio are written into a folder of the store."""
        folder = self._sessions.folder
        assert folder is not None
        files = tuple(AttachedFile(name, len(data), data.decode()) for name, data in uploads.texts)
        media = (read_media(str(file)) for file in save_media(uploads.media, folder / MEDIA))
        return Question.of(text, Attachments(files, media=tuple(media)), passages)

    def open_question(self, chat: int, question: int, *, together: bool = False) -> OpenQuestion:
        """Go back to a question, hold its chat until close_question(), and return it with the turns before it.

        Args:
            together: another answer to this question may be on its way.

        Raises:
            UsageError: the chat is in use, or has no such question.
        """
        current = self._answering.get(chat)
        if together and current is not None and current.entry == question:
            current.n_answers += 1
            return current
        saved = self._opened(chat)
        try:
            asked = _entry(saved, question)
            while saved.last_question is not None and saved.last_question.id != asked.id:
                saved.undo()
            before, beginning = saved.window_before_question(), system_messages(saved.system)
            opened = OpenQuestion(saved, question, _question(asked), before, beginning)
        except BaseException:
            saved.release()
            raise
        self._answering[chat] = opened
        return opened

    def replayed(self, chat: int, answer: int) -> tuple[Said, Answer]:
        """Return the conversation before an answer of any branch, and the answer."""
        tree = self._sessions.tree(str(chat))
        entries = {entry.id: entry for entry in tree.entries}
        found = entries.get(answer)
        if found is None or not isinstance(found.part, Answer):
            raise UsageError("the answer is not in this chat", hint="reload the page")
        if found.part.rounds:
            raise UsageError("an answer with calls of tools can't be computed again")
        *before, question = path_to(found.parent, entries)
        return _said(tree.system, in_window(before), question), found.part

    def said(self, chat: int) -> tuple[Said, Answer | None]:
        """Return the messages of the current branch that the model still sees, and the answer that ends it, if any."""
        tree = self._sessions.tree(str(chat))
        path = tree.path()
        last = path[-1].part if path else None
        return _said(tree.system, in_window(path)), last if isinstance(last, Answer) else None

    def close_question(self, chat: int, answer: Answer | None) -> None:
        """Save an answer to the open question, if any; let the chat go with the last one."""
        current = self._answering[chat]
        current.n_answers -= 1
        try:
            if answer is not None:
                current.saved.add_answer(answer)
        finally:
            if not current.n_answers:
                del self._answering[chat]
                current.saved.release()

    def answers(self, chat: int, question: int) -> list[dict[str, Any]]:
        """Return all answers to a question."""
        tree = self._sessions.tree(str(chat))
        return [_entry_data(entry) for entry in tree.entries if entry.parent == question]

    def go(self, chat: int, entry: int) -> dict[str, Any]:
        """Go to the newest branch with an entry, and return the chat."""
        with _released(self._opened(chat)) as saved:
            tree = saved.tree()
            parents = {each.id: each.parent for each in tree.entries}
            ends = [branch for branch in saved.branches() if entry in _ancestors(branch.head, parents)]
            if not ends:
                raise UsageError("the message is not in this chat", hint="reload the page")
            end = max(ends, key=lambda branch: branch.head or 0)
            saved.switch(end.name or f"#{end.head}")
        return self.read(chat)

    def head(self, chat: int) -> dict[str, Any]:
        """Return what tells whether a chat has changed: its last entry, and whether it is being answered."""
        return {"last": self._sessions.head(chat), "is_answering": chat in self._answering}

    def undo(self, chat: int) -> dict[str, Any]:
        """Go back to before the last question, and return the chat with the "undone" text."""
        with _released(self._opened(chat)) as saved:
            question = saved.undo()
        if question is None:
            raise UsageError("there is nothing to undo")
        return {**self.read(chat), "undone": question.shown}

    def branches(self, chat: int) -> list[dict[str, Any]]:
        """Return the continuations of a chat, each with the number of the first turn that differs, and its text."""
        current = self._answering.get(chat)
        saved = current.saved if current else self._sessions.open(str(chat))
        try:
            found = [{**asdict(branch), "differs": saved.difference(branch)} for branch in saved.branches()]
        finally:
            if current is None:
                saved.release()
        return found

    def switch(self, chat: int, branch: str) -> dict[str, Any]:
        """Go to a branch, or to an end without a name, "#" and its id; return the chat."""
        with _released(self._opened(chat)) as saved:
            saved.switch(branch)
        return self.read(chat)

    def set_system(self, chat: int, system: str) -> dict[str, Any]:
        """Change the system prompt of a chat, and return the chat."""
        with _released(self._opened(chat)) as saved:
            saved.set_system(system)
        return self.read(chat)

    def _opened(self, chat: int) -> SavedChat:
        """Open a chat for a change."""
        if chat in self._answering:
            raise UsageError("this chat is being answered in another window", hint="wait for the end, or stop it there")
        saved = self._sessions.open(str(chat))
        if saved.open_elsewhere:
            raise UsageError(f"{saved.name} is open in another llmrun", hint="leave that chat first")
        return saved


@contextmanager
def _released(saved: SavedChat) -> Iterator[SavedChat]:
    """Let a chat go afterwards."""
    try:
        yield saved
    finally:
        saved.release()


def _entry(saved: SavedChat, wanted: int) -> TurnEntry:
    found = next((entry for entry in saved.entries if entry.id == wanted), None)
    if found is None:
        raise UsageError("this chat has gone on in another window", hint="reload the page")
    return found


def _question(entry: TurnEntry) -> Question:
    if not isinstance(entry.part, Question):
        raise UsageError("this message is not a question")
    return entry.part


def _said(system: str, turns: Sequence[WindowTurn], asked: TurnEntry | None = None) -> Said:
    """Return the messages of a request, each with its files: the turns in the context window, then the question."""
    said: Said = [(message, ()) for message in system_messages(system)]
    for turn in turns:
        first, *others = turn.messages
        said += [(first, turn.media), *((message, ()) for message in others)]
    if asked is not None:
        question = _question(asked)
        said.append((Message("user", question.content), question.media))
    return said


def with_media(said: Said, model: MediaReader) -> tuple[tuple[Message, ...], list[str]]:
    """Return messages with their files read, and notes about those that can't be sent; see chat.media.MediaCache."""
    notes: list[str] = []
    cache = MediaCache(notes.append)
    return tuple(cache.show(message, files, model) for message, files in said), notes


def _ancestors(head: int | None, parents: dict[int, int | None]) -> set[int]:
    """Return an entry and all before it."""
    found = set()
    while head is not None:
        found.add(head)
        head = parents[head]
    return found


def _conversation(tree: Tree) -> dict[str, Any]:
    """Return the current branch of a chat as JSON data, each entry with its alternatives."""
    alternatives: dict[int | None, list[int]] = {}
    for entry in tree.entries:
        alternatives.setdefault(entry.parent, []).append(entry.id)
    entries = [{**_entry_data(entry), "alternatives": alternatives[entry.parent]} for entry in tree.path()]
    return {
        "name": tree.name,
        "title": _title(tree.name, tree.first_questions),
        "system": tree.system,
        "documents": tree.documents,
        "branch": tree.branch,
        "entries": entries,
    }


def _title(name: str, firsts: Sequence[str]) -> str:
    """Return the name that the user gave a chat, or else its first question, cut at a word.

    Args:
        firsts: all versions of the first question; the chat was named after one of them.
    """
    if not any(re.fullmatch(re.escape(name_from(first)) + r"(-\d+)?", name) for first in firsts):
        return name
    line = " ".join(_MARKUP.sub("", firsts[-1]).split())
    if len(line) <= _LONGEST_TITLE:
        return line
    return f"{line[:_LONGEST_TITLE].rpartition(' ')[0] or line[: _LONGEST_TITLE - 1]}…"


def _entry_data(entry: TurnEntry) -> dict[str, Any]:
    if isinstance(entry.part, Question):
        question = entry.part
        files = question.content.removesuffix(question.shown).removeprefix(passages_block(question.passages)).rstrip()
        return {
            "id": entry.id,
            "role": "user",
            "text": question.shown,
            "media": [file.name for file in question.media],
            "files": files if len(files) <= _MOST_SHOWN else f"{files[:_MOST_SHOWN]} …",
            "passages": [{**each._asdict(), "place": each.place} for each in question.passages],
            "passages_line": passages_line(question.passages),
        }
    answer = entry.part
    return {
        "id": entry.id,
        "role": "assistant",
        "text": answer.content,
        "reasoning": answer.reasoning,
        "finish": answer.finish,
        "model": answer.model.name,
        "stats": asdict(answer.stats),
        "rounds": [
            {
                "text": each.content,
                "calls": [
                    {"name": call.name, "arguments": call.arguments, "result": result}
                    for call, result in zip(each.calls, each.results, strict=True)
                ],
            }
            for each in answer.rounds
        ],
    }
