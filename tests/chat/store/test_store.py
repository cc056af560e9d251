"""Saved chats: what is put in comes out again, forks keep everything, and a strange file is no disaster."""

from __future__ import annotations

import json
import os
import random
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from support.chats import add_turn
from support.effort import loops

from llmrun.chat.attachments import AttachedFile, Attachments
from llmrun.chat.passages import Passage
from llmrun.chat.store import store
from llmrun.chat.store.chat import SavedChat
from llmrun.chat.store.export import export, format_for, read_json
from llmrun.chat.store.rows import FILE, name_from
from llmrun.chat.store.store import Sessions, folder_in
from llmrun.chat.store.turns import SUMMARY, Answer, Question, Truncation, TurnEntry, in_window
from llmrun.chat.truncation import SUMMARY_QUESTION
from llmrun.errors import DiskFullError, LlmrunError, ResourceError, UsageError
from llmrun.models.fingerprint import ModelFingerprint
from llmrun.protocol.messages import Message, Stats
from llmrun.protocol.params import Limits, SamplingParams

pytestmark = pytest.mark.usefixtures("package_on_path")

FULL = Answer(
    "Rayleigh scattering.",
    "The user asks about light.",
    "length",
    ModelFingerprint("smollm2", "ab" * 32, "/models/s.gguf", 91_000_000, 1_700_000_000.5),
    SamplingParams(
        seed=7,
        temperature=0.3,
        top_k=3,
        dry_breakers=("x",),
        logit_bias=((2, -float("inf")), (3, 1.5)),
        order=("top_k",),
    ),
    Limits(100, ("\n\n",), ("as an AI",)),
    Stats(31, 20, 0.5, 8, 1.5, 0.25, 0.01, 0.02, 39, 2048, 1e-5, 7, 1),
    (Truncation("summarize", (1, 3), 500, "They talked."), Truncation("roll", (5,), 20)),
)


@pytest.fixture
def sessions(tmp_path: Path) -> Sessions:
    return Sessions(tmp_path / "kept")


def ask(talk: SavedChat, *words: str) -> None:
    for word in words:
        add_turn(talk, Question(word), Answer(word.upper()))


def said(talk: SavedChat) -> str:
    return " ".join(entry.part.content for entry in talk.entries)


def test_everything_about_a_turn_comes_back(sessions: Sessions, tmp_path: Path) -> None:
    talk = sessions.new("physics", system="Be brief.")
    add_turn(talk, Question("FILE\n\nWhy is the sky blue?", "Why is the sky blue?"), FULL)
    add_turn(talk, Question("\0 \ud800 é 漢 🙂\r\n"), Answer(""))
    with_file = talk.entries
    sessions.close()
    with Sessions(tmp_path / "kept") as again:
        talk = again.open("physics")
        assert talk.entries[:2] == with_file[:2]
        assert talk.entries[1].part == FULL
        assert talk.entries[0].part == Question("FILE\n\nWhy is the sky blue?", "Why is the sky blue?")
        assert talk.entries[2].part == Question("\0 ? é 漢 🙂\r\n")
        assert (talk.system, talk.name, talk.branch) == ("Be brief.", "physics", "main")
        facts = again.find()
        assert (facts.turns, facts.model, facts.first) == (2, "", "Why is the sky blue?")


def test_a_chat_is_saved_with_its_first_turn_and_named_by_it(sessions: Sessions) -> None:
    talk = sessions.new()
    assert (talk.id, talk.name, sessions.all()) == (None, "", [])
    ask(talk, "Why is the sky blue, and why is it not violet instead?")
    assert talk.name == "why-is-the-sky-blue-and-why-is-it-not"
    ask(sessions.new(), "Why is the sky blue, and why is it not violet?")
    assert sessions.find().name == "why-is-the-sky-blue-and-why-is-it-not-2"


def test_a_question_is_saved_before_its_answer(sessions: Sessions, tmp_path: Path) -> None:
    talk = sessions.new()
    add_turn(talk, Question("a"), Answer("A", model=ModelFingerprint("smollm2")))
    talk.add_question(Question("b"))
    with Sessions(tmp_path / "kept") as again:
        assert (again.find().turns, again.find().model) == (2, "smollm2")
        there = again.open()
        assert (said(there), there.is_answered) == ("a A b", False)
    assert [message.content for message in talk.messages()] == ["a", "A"], "the model sees answered turns"
    talk.add_question(Question("c"))
    assert said(talk) == "a A c", "what got no answer is an alternative"
    talk.add_answer(Answer("C"))
    assert [branch.last for branch in talk.branches()] == ["c", "b"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("", "chat"),
        ("???", "chat"),
        ("42", "chat-42"),
        ("Größe: 漢字", "größe-漢字"),
        ("x" * 99, "x" * 40),
        ("../../etc/passwd", "etc-passwd"),
        ("\x1b[31mred", "31mred"),
        ("--json", "json"),
    ],
)
def test_names_made_of_questions(sessions: Sessions, text: str, name: str) -> None:
    assert name_from(text) == name
    ask(sessions.new(), text)
    assert sessions.find(name).name == name


@pytest.mark.parametrize("name", ["  ", "7", "-x", "#3", "a\nb", "a\x1b[2J", "a\u202eb", "x" * 81])
def test_names_that_cannot_be(sessions: Sessions, name: str) -> None:
    with pytest.raises(UsageError, match="can't be a name"):
        sessions.new(name)


def test_finding_by_name_id_and_last(sessions: Sessions) -> None:
    with pytest.raises(UsageError, match="no saved chat yet"):
        sessions.find()
    for name in ("One", "two"):
        ask(sessions.new(name), "hi")
    assert sessions.find("one").id == 1
    assert sessions.find("2").name == "two"
    assert sessions.find().name == "two"
    ask(sessions.open("one"), "again")
    assert sessions.find().name == "One"
    with pytest.raises(UsageError, match="saved chat 'tow'") as caught:
        sessions.find("tow")
    assert "did you mean two?" in caught.value.hint
    with pytest.raises(UsageError, match="already a saved chat"):
        sessions.new("ONE")


def test_the_last_used_chat_is_the_last_one_though_the_clock_went_back(tmp_path: Path) -> None:
    now = [2_000_000_000.0]
    with Sessions(tmp_path, lambda: now[0]) as sessions:
        ask(sessions.new("future"), "hi")
        now[0] = 1_000_000_000.0
        ask(sessions.new("present"), "hi")
        assert sessions.find().name == "present"
        assert sessions.names() == [facts.name for facts in sessions.all()] == ["present", "future"]
        ask(sessions.open("future"), "again")
        now[0] = 1.0
        ask(sessions.open("present"), "again")
        assert sessions.find().name == "present"


def test_undo_retry_edit_and_back(sessions: Sessions) -> None:
    talk = sessions.new()
    assert talk.undo() is None
    with pytest.raises(UsageError, match="there is no question yet"):
        talk.add_answer(Answer("x"))
    ask(talk, "a", "b", "c")
    assert talk.undo() == Question("c")
    assert said(talk) == "a A b B"
    talk.add_answer(Answer("B2"))
    assert said(talk) == "a A b B2"
    talk.add_question(Question("b3"), beside=talk.last_question)
    talk.add_answer(Answer("B3"))
    assert said(talk) == "a A b3 B3"
    talk.add_question(Question("a4"), beside=talk.entries[0])
    talk.add_answer(Answer("A4"))
    assert said(talk) == "a4 A4"
    ends = [branch for branch in talk.branches() if not branch.name]
    assert [(end.turns, end.last) for end in ends] == [(3, "c"), (2, "b"), (2, "b3")], "nothing was deleted"
    talk.switch(f"#{ends[0].head}")
    assert (said(talk), talk.branch) == ("a A b B c C", "main-2")
    talk.switch("main")
    assert said(talk) == "a4 A4"
    assert sessions.find().turns == 1
    talk.clear()
    assert said(talk) == ""
    ask(talk, "new")
    assert said(talk) == "new NEW"
    assert [branch.name for branch in talk.branches()] == ["main", "main-2", "", "", ""]


def test_branches(sessions: Sessions, tmp_path: Path) -> None:
    talk = sessions.new()
    with pytest.raises(UsageError, match="nothing to branch off"):
        talk.make_branch("side")
    ask(talk, "a", "b")
    talk.make_branch("side")
    ask(talk, "c")
    with pytest.raises(UsageError, match="already a branch"):
        talk.make_branch("main")
    with pytest.raises(UsageError, match="no branch 'nope'") as caught:
        talk.switch("nope")
    assert "main, side" in caught.value.why
    talk.switch("main")
    ask(talk, "d")
    assert said(talk) == "a A b B d D"
    sessions.close()
    with Sessions(tmp_path / "kept") as again:
        talk = again.open()
        assert (talk.branch, said(talk)) == ("main", "a A b B d D")
        talk.switch("side")
        assert said(talk) == "a A b B c C"
        assert [(b.name, b.current) for b in talk.branches()] == [("main", False), ("side", True)]


def test_where_branches_differ(sessions: Sessions) -> None:
    talk = sessions.new()
    ask(talk, "a", "b")
    talk.make_branch("side")
    talk.add_answer(Answer("B2"))
    talk.make_branch("other")
    talk.add_question(Question("FILE c", "c"), beside=talk.last_question)
    differences = {branch.name: talk.difference(branch) for branch in talk.branches() if branch.name}
    assert differences == {"main": (2, "b"), "other": None, "side": (2, "b")}
    talk.switch("side")
    assert talk.difference(next(one for one in talk.branches() if one.name == "main")) == (2, "B")


def test_random_life_against_a_slow_twin(sessions: Sessions) -> None:
    """Every step, compared with lists of what was said; after each the file gives the same as the object."""
    chance = random.Random(11)
    talk = sessions.new()
    paths: dict[str, list[str]] = {"main": []}
    for step in range(300):
        path = paths[talk.branch]
        action = chance.choice(("append", "append", "append", "undo", "retry", "edit", "branch", "switch"))
        if action == "append" or not path:
            ask(talk, f"q{step}")
            path += [f"q{step}", f"Q{step}"]
        elif action == "undo":
            talk.undo()
            del path[-2:]
        elif action == "retry":
            talk.add_answer(Answer(f"r{step}"))
            path[-1] = f"r{step}"
        elif action == "edit":
            place = chance.randrange(0, len(path), 2)
            talk.add_question(Question(f"e{step}"), beside=talk.entries[place])
            talk.add_answer(Answer(f"E{step}"))
            path[place:] = [f"e{step}", f"E{step}"]
        elif action == "branch":
            paths[f"b{step}"] = list(path)
            talk.make_branch(f"b{step}")
        else:
            talk.switch(chance.choice(list(paths)))
        assert said(talk).split() == paths[talk.branch]
        before = talk.entries
        talk.reload()
        assert talk.entries == before
    tree = sessions.tree()
    assert {name: [e.part.content for e in tree.path(name)] for name in paths} == paths


def test_rename_system_and_delete(sessions: Sessions, tmp_path: Path) -> None:
    talk = sessions.new("one")
    ask(talk, "hello unmistakable words")
    ask(sessions.new("two"), "hi")
    talk.set_system("Be kind.")
    talk.rename("uno")
    sessions.rename("two", "dos")
    sessions.rename("dos", "DOS")
    with pytest.raises(UsageError, match="already"):
        sessions.rename("DOS", "uno")
    with pytest.raises(UsageError, match="already"):
        talk.rename("dos")
    assert sessions.open("uno").system == "Be kind."
    assert [hit.session for hit in sessions.search("unmistakable")] == ["uno", "uno"]
    sessions.delete("uno")
    assert [facts.name for facts in sessions.all()] == ["DOS"]
    assert sessions.search("unmistakable") == []
    kept = b"".join(path.read_bytes() for path in (tmp_path / "kept").iterdir())
    assert b"unmistakable" not in kept, "what is deleted is gone from the disk"
    sessions.close()
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["sessions.db", "sessions.lock"]


def test_search(sessions: Sessions) -> None:
    talk = sessions.new("sky")
    ask(talk, "Why is the sky blue?", "Und die Größe von 漢字?", '100% of _it_ "quoted" (and) AND NOT * near')
    ask(sessions.new("cats"), "why do cats purr? " + "filler " * 100 + "because")
    assert {(h.session, h.role, h.turn) for h in sessions.search("sky BLUE")} == {
        ("sky", "user", 1),
        ("sky", "assistant", 1),
    }
    assert {hit.session for hit in sessions.search("why")} == {"sky", "cats"}
    assert {hit.turn for hit in sessions.search("größe")} == {2}
    assert {hit.turn for hit in sessions.search("grosse")} == {2}, "GRÖSSE, whose accents do not matter"
    assert {hit.turn for hit in sessions.search("字")} == {2}, "a part of a text without spaces"
    assert {hit.session for hit in sessions.search("urr?")} == {"cats"}, "a part of a word, where no word begins so"
    assert {hit.turn for hit in sessions.search("100%")} >= {3}
    assert sessions.search('"quoted" (and) * NOT')
    assert sessions.search("*")
    assert sessions.search("sk_") == [], "_ is no wildcard"
    assert sessions.search("   ") == []
    assert len(sessions.search("why", limit=1)) == 1
    excerpts = [hit.excerpt for hit in sessions.search("because cats")]
    assert any(excerpt.startswith("why do cats purr? filler") and excerpt.endswith("…") for excerpt in excerpts)
    ask(talk, "newest")
    assert sessions.search("newe")[0].excerpt in {"newest", "NEWEST"}


def test_a_search_finds_what_was_typed_and_files_but_no_passages_of_documents(sessions: Sessions) -> None:
    attached = Attachments((AttachedFile("ice.txt", 9, "Ice is cold; a glacier is ice."),))
    passage = Passage("north.md", 1, 2, 0, "", "A glacier is a moraine's maker.")
    add_turn(sessions.new("ice"), Question.of("What is a glacier?", attached, (passage,)), Answer("Ice."))
    assert [hit.excerpt[:18] for hit in sessions.search("glacier")] == ["What is a glacier?"]
    assert [hit.role for hit in sessions.search("cold")] == ["user"]
    assert sessions.search("moraine") == []


def test_the_best_hit_of_a_search_is_first(sessions: Sessions) -> None:
    ask(sessions.new("often"), "tea, tea and more tea")
    ask(sessions.new("long"), "tea " + "and something else " * 50)
    ask(sessions.new("steam"), "steam")
    ask(sessions.new("again"), "tea, tea and more tea")
    assert [hit.session for hit in sessions.search("tea") if hit.role == "user"] == ["again", "often", "long"]


def test_the_index_of_an_older_file_goes_with_its_words(tmp_path: Path) -> None:
    with Sessions(tmp_path) as sessions:
        ask(sessions.new("one"), "unmistakable")
    file = tmp_path / FILE
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE marks(name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID")
        connection.execute("CREATE VIRTUAL TABLE words USING fts5(content, content='messages', content_rowid='id')")
        connection.execute("INSERT INTO words(words) VALUES('rebuild')")
        connection.execute("ALTER TABLE sessions DROP COLUMN documents")
        connection.execute("PRAGMA user_version=3")
    with Sessions(tmp_path) as sessions:
        assert len(sessions.search("unmistakable")) == 2
        sessions.delete("one")
    kept = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"unmistakable" not in kept
    assert b"fts5" not in kept


def another_llmrun(folder: Path, code: str) -> subprocess.Popen[bytes]:
    """Start a process that opens the `sessions`, and runs indented code."""
    begin = """import sys
from pathlib import Path
from llmrun.chat.store.store import Sessions
with Sessions(Path(sys.argv[1])) as sessions:
"""
    return subprocess.Popen(
        [sys.executable, "-c", begin + code, str(folder / "kept")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd="/",
    )


def test_two_chats_on_one(sessions: Sessions, tmp_path: Path) -> None:
    ask(sessions.new("one"), "a")
    other = """
    talk = sessions.open("one")
    print(talk.open_elsewhere, flush=True)
    sys.stdin.readline()
"""
    sessions.close()
    with (
        another_llmrun(tmp_path, other) as process,
        Sessions(tmp_path / "kept") as here,
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == b"False\n"
        talk = here.open("one")
        assert talk.open_elsewhere
        assert said(talk) == "a A"
        with pytest.raises(UsageError, match="open in another llmrun"):
            ask(talk, "b")
        with pytest.raises(UsageError, match="open in another llmrun"):
            here.delete("one")
        copy = here.copy("one")
        ask(copy, "b")
        assert (copy.name, said(copy)) == ("one-2", "a A b B")
        process.kill()
        process.wait()
        assert not here.open("one").open_elsewhere, "the lock goes with its process"


def test_the_last_chat_that_no_other_process_has_open(sessions: Sessions, tmp_path: Path) -> None:
    for name in ("oldest", "middle", "newest"):
        ask(sessions.new(name), "a")
    sessions.close()
    other = """
    opened = []
    for name in sys.stdin:
        opened.append(sessions.open(name.strip()))
        print("open", flush=True)
"""
    with (
        another_llmrun(tmp_path, other) as process,
        Sessions(tmp_path / "kept") as here,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        assert here.last_free()[0].name == "newest"
        for name, free in (("newest", "middle"), ("middle", "oldest"), ("oldest", "newest")):
            process.stdin.write(f"{name}\n".encode())
            process.stdin.flush()
            assert process.stdout.readline() == b"open\n"
            assert here.last_free()[0].name == free, "of three that are open, the last used"
            opened = here.open()
            assert (opened.name, opened.open_elsewhere) == (free, name == "oldest")
            opened.release()
        assert here.find().name == "newest"
        process.kill()


def test_a_released_chat_is_free_for_others(sessions: Sessions, tmp_path: Path) -> None:
    talk = sessions.new("one")
    ask(talk, "a")
    check = (
        "import sys; from pathlib import Path; from llmrun.chat.store.store import Sessions\n"
        "with Sessions(Path(sys.argv[1])) as s: print(s.open('one').open_elsewhere)"
    )
    command = [sys.executable, "-c", check, str(tmp_path / "kept")]
    assert subprocess.run(command, capture_output=True, check=True, cwd="/").stdout == b"True\n"
    talk.release()
    assert subprocess.run(command, capture_output=True, check=True, cwd="/").stdout == b"False\n"


def test_copy_has_everything_under_new_ids(sessions: Sessions) -> None:
    talk = sessions.new("one", system="S")
    ask(talk, "a", "b")
    talk.add_answer(replace(FULL, departures=(Truncation("roll", (talk.entries[0].id, SUMMARY), 9),)))
    talk.make_branch("side")
    copy = sessions.copy("one", "two")
    old, new = sessions.tree("one"), sessions.tree("two")
    assert [e.part.content for e in old.entries] == [e.part.content for e in new.entries]
    assert not {e.id for e in old.entries} & {e.id for e in new.entries}
    assert (copy.system, copy.branch, sorted(new.branches)) == ("S", "side", ["main", "side"])
    answer = copy.last_answer
    assert answer is not None
    assert answer.departures == (Truncation("roll", (new.entries[0].id, SUMMARY), 9),)


# ---- the window ------------------------------------------------------------------------------------


def path_of(*departures: tuple[Truncation, ...]) -> list[TurnEntry]:
    """One turn for each, questions' ids 1, 3, 5, ..."""
    path = []
    for number, gone in enumerate(departures):
        question, answer = 2 * number + 1, 2 * number + 2
        path.append(TurnEntry(question, question - 1 or None, 0.0, Question(f"q{question}")))
        path.append(TurnEntry(answer, question, 0.0, Answer(f"a{answer}", departures=gone)))
    return path


def test_what_left_the_window_stays_out_of_it() -> None:
    path = path_of((), (), (), (Truncation("roll", (1, 3), 9),), (Truncation("middle", (5,), 9),))
    assert [turn.question for turn in in_window(path[:6])] == [1, 3, 5]
    assert [turn.question for turn in in_window(path[:8])] == [5, 7]
    turns = in_window(path)
    assert [(turn.question, turn.number) for turn in turns] == [(7, 4), (9, 5)]
    assert turns[0].messages == (Message("user", "q7"), Message("assistant", "a8"))


def test_a_summary_stands_in_place_of_what_it_condensed() -> None:
    first, second = Truncation("summarize", (3, 5), 9, "One."), Truncation("summarize", (SUMMARY, 7), 9, "Two.")
    path = path_of((), (), (), (), (first,), (second,), (Truncation("roll", (SUMMARY,), 3),))
    assert [turn.question for turn in in_window(path[:10])] == [1, SUMMARY, 7, 9]
    summary = in_window(path[:12])[1]
    assert (summary.question, summary.number) == (SUMMARY, 0)
    assert summary.messages == (Message("user", SUMMARY_QUESTION), Message("assistant", "Two."))
    assert [turn.question for turn in in_window(path)] == [1, 9, 11, 13]


def test_undo_brings_back_what_left(sessions: Sessions) -> None:
    talk = sessions.new(system="S")
    ask(talk, "a", "b")
    add_turn(talk, Question("c"), Answer("C", departures=(Truncation("roll", (talk.entries[0].id,), 5),)))
    assert [m.content for m in talk.messages()] == ["S", "b", "B", "c", "C"]
    talk.undo()
    assert [m.content for m in talk.messages()] == ["S", "a", "A", "b", "B"]


# ---- export ----------------------------------------------------------------------------------------


def test_json_export_comes_back_whole(sessions: Sessions) -> None:
    talk = sessions.new("one", system="S")
    add_turn(talk, Question("F\nq", "q"), replace(FULL, departures=(Truncation("roll", (1,), 9),)))
    ask(talk, "b")
    talk.add_answer(Answer("B2"))
    talk.make_branch("side")
    tree = sessions.tree("one")
    assert read_json(export(tree, "json")) == tree
    sessions.add(read_json(export(tree, "json")))
    again = sessions.tree("one-2")
    assert [e.part for e in again.path()][2:] == [e.part for e in tree.path()][2:]
    json.loads(export(tree, "json"), parse_constant=pytest.fail)


def test_markdown_is_for_people(sessions: Sessions) -> None:
    talk = sessions.new("sky", system="Be brief.")
    add_turn(talk, Question("Why?"), replace(FULL, content="```py\nx = 1", reasoning="Hm.\n\nLight."))
    add_turn(talk, Question("Stop"), Answer("I", finish="cancelled"))
    text = export(sessions.tree(), "markdown")
    for part in ("# sky\n", "## System prompt\n\nBe brief.", "## You\n\nWhy?", "> Hm.\n>\n> Light.", "## smollm2\n"):
        assert part in text
    assert "```py\nx = 1\n```\n\n*cut off: no more tokens were allowed*" in text, "an open code block is closed"
    assert text.endswith("I\n\n*stopped*\n")


def test_lines_are_openai_messages(sessions: Sessions) -> None:
    talk = sessions.new("one", system="S")
    add_turn(talk, Question("q"), FULL)
    talk.make_branch("side")
    ask(talk, "more")
    lines = [json.loads(line) for line in export(sessions.tree(), "jsonl", "main").splitlines()]
    assert [(line["role"], line["content"]) for line in lines] == [
        ("system", "S"),
        ("user", "q"),
        ("assistant", FULL.content),
    ]
    assert (lines[2]["model"]["sha256"], lines[2]["sampling"]["top_k"], lines[2]["stats"]["seed"]) == ("ab" * 32, 3, 7)
    (line,) = export(sessions.tree(), "openai").splitlines()
    messages = json.loads(line)["messages"]
    assert [list(message) for message in messages] == [["role", "content"]] * 5
    with pytest.raises(UsageError, match="no branch 'nope'"):
        export(sessions.tree(), "jsonl", "nope")
    assert [format_for(name) for name in ("a.MD", "b.json", "c.jsonl", "d.txt")] == ["markdown", "json", "jsonl", None]


def test_hostile_imports_are_refused(sessions: Sessions) -> None:
    ask(sessions.new("one"), "a", "b")
    good = json.loads(export(sessions.tree(), "json"))
    changes = [
        ("name", "a\x1b[2J"), ("name", 3), ("created", float("inf")), ("created", 1e300), ("branch", "nope"),
        ("branches", {"main": 99}), ("branches", []), ("messages", None), ("version", 99), ("version", "x"),
        ("format", "other"), ("branches", {"main": 4, "\x1b]0;": 4}),
    ]  # fmt: skip
    messages = [
        (0, "role", "system"), (0, "role", "assistant"), (1, "role", "user"), (1, "parent", 4), (1, "parent", 1.5),
        (0, "content", 3), (1, "id", 1), (0, "id", -1), (1, "sampling", {"temperature": -5}),
        (1, "sampling", {"temperature": "x"}), (1, "stats", {"seed": "x"}), (1, "departures", [{"policy": "roll"}]),
        (1, "model", 7), (0, "parent", 0),
    ]  # fmt: skip
    documents = [{**good, name: value} for name, value in changes]
    for index, name, value in messages:
        changed = json.loads(json.dumps(good))
        changed["messages"][index][name] = value
        documents.append(changed)
    texts = [json.dumps(document) for document in documents]
    for text in (*texts, "", "[]", "{", "[" * 100_000, "null", '{"format": "llmrun-chat"}'):
        with pytest.raises(UsageError):
            read_json(text)
    assert read_json(json.dumps(good)).name == "one"


def test_an_export_of_another_version_of_ours_is_read(sessions: Sessions) -> None:
    """Facts that were not known then are the defaults, those that are not known now are left out."""
    ask(sessions.new("one"), "a")
    document = json.loads(export(sessions.tree(), "json"))
    answer = document["messages"][1]
    answer["sampling"] = {"temperature": 1, "invented_later": 3}
    del answer["stats"]
    answer["mood"] = "good"
    part = read_json(json.dumps(document)).entries[1].part
    assert isinstance(part, Answer)
    assert part.sampling == SamplingParams(temperature=1.0)
    assert part.stats == Stats()


# ---- the file --------------------------------------------------------------------------------------


@pytest.mark.skipif(os.name == "nt", reason="no POSIX modes")
def test_only_the_owner_can_read(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    folder.mkdir(mode=0o755)
    before = os.umask(0)
    try:
        with Sessions(folder) as sessions:
            ask(sessions.new(), "secret")
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert modes == dict.fromkeys(("sessions.db", "sessions.db-wal", "sessions.db-shm", "sessions.lock"), 0o600)


@pytest.mark.parametrize("damage", ["garbage", "header", "truncated", "page", "other"])
def test_a_damaged_file_is_moved_aside(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "kept"
    with Sessions(folder) as sessions:
        talk = sessions.new()
        for _ in range(30):
            ask(talk, "word " * 300)
    file = folder / "sessions.db"
    content = file.read_bytes()
    if damage == "other":
        file.unlink()
        connection = sqlite3.connect(file)
        connection.execute("CREATE TABLE others(x)")
        connection.execute(f"PRAGMA user_version={len(store.SCHEMA.migrations)}")
        connection.close()
        content = file.read_bytes()
    else:
        content = {
            "garbage": b"not a database at all " * 1000,
            "header": b"X" * 16 + content[16:],
            "truncated": content[: len(content) // 2],
            "page": content[:4096] + b"\xff" * 4096 * 8 + content[9 * 4096 :],
        }[damage]
        file.write_bytes(content)
    with Sessions(folder) as sessions:
        assert "damaged" in sessions.note
        (aside,) = folder.glob("sessions.damaged-*.db")
        assert str(aside) in sessions.note
        assert aside.read_bytes() == content, "nothing is deleted"
        ask(sessions.new(), "on it goes")
    with Sessions(folder) as sessions:
        assert (sessions.note, len(sessions.all())) == ("", 1)


def test_damage_that_is_found_later_is_explained(sessions: Sessions) -> None:
    ask(sessions.new("one"), "a")
    with pytest.raises(ResourceError, match="damaged") as caught, sessions._database.explained():
        raise sqlite3.DatabaseError("database disk image is malformed")
    assert caught.value.hint


def test_a_newer_file_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    with Sessions(folder) as sessions:
        sessions._connection.execute("PRAGMA user_version=99")
    before = (folder / "sessions.db").read_bytes()
    with pytest.raises(UsageError, match="newer llmrun") as caught:
        Sessions(folder)
    assert "99" in caught.value.why
    assert (folder / "sessions.db").read_bytes() == before


def test_an_older_file_is_migrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "kept"
    with Sessions(folder) as sessions:
        ask(sessions.new("one"), "a")
    newer = (*store.SCHEMA.migrations, ("ALTER TABLE sessions ADD COLUMN mood TEXT NOT NULL DEFAULT 'good'",))
    monkeypatch.setattr(store, "SCHEMA", replace(store.SCHEMA, migrations=(*newer, ("BROKEN",))))
    with pytest.raises(LlmrunError):
        Sessions(folder)
    monkeypatch.setattr(store, "SCHEMA", replace(store.SCHEMA, migrations=newer))
    with Sessions(folder) as sessions:
        assert sessions._connection.execute("SELECT name, mood FROM sessions").fetchall() == [("one", "good")]
        assert sessions._connection.execute("PRAGMA user_version").fetchone() == (len(newer),)
        ask(sessions.open("one"), "b")


def test_a_full_disk_changes_nothing_and_says_so(sessions: Sessions) -> None:
    talk = sessions.new("one")
    ask(talk, "a")
    pages = sessions._connection.execute("PRAGMA page_count").fetchone()[0]
    sessions._connection.execute(f"PRAGMA max_page_count={pages + 1}")
    with pytest.raises(DiskFullError, match="can't write"):
        ask(talk, "word " * 20_000)
    assert said(talk) == "a A"
    sessions._connection.execute("PRAGMA max_page_count=100000")
    ask(talk, "b")
    talk.reload()
    assert said(talk) == "a A b B"


def test_a_folder_that_cannot_be_written_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LlmrunError, match="can't read or write") as caught:
        Sessions(tmp_path / "file" / "kept")
    assert "LLMRUN_HOME" in caught.value.hint


def test_many_processes_begin_at_once(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from llmrun.chat.store.store import Sessions\n"
        "from llmrun.chat.store.turns import Question, Answer\n"
        "with Sessions(Path(sys.argv[1])) as s:\n"
        "    for n in range(5): c = s.new(); c.add_question(Question('same name')); c.add_answer(Answer('x'))\n"
        "    assert not s.note, s.note"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "kept")]
    processes = [subprocess.Popen(command, cwd="/", stderr=subprocess.PIPE) for _ in range(6)]
    for process in processes:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors.decode()
    with Sessions(tmp_path / "kept") as sessions:
        assert len({facts.name for facts in sessions.all()}) == 30


def test_opening_is_quick(tmp_path: Path) -> None:
    with Sessions(tmp_path / "kept") as sessions:
        talk = sessions.new()
        for _ in range(100):
            ask(talk, "word " * 200)
    assert loops(lambda: Sessions(tmp_path / "kept").close(), times=10) < 2


def test_sqlite_is_imported_when_a_chat_is_opened() -> None:
    code = "import sys, llmrun.chat.store.store, llmrun.chat.store.export; assert 'sqlite3' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")


def test_a_store_in_memory_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Sessions(None) as store, Sessions(None) as other:
        chat = store.new()
        add_turn(chat, Question("a secret"), Answer("yes"))
        assert [facts.turns for facts in store.all()] == [1]
        assert other.all() == []
    assert list(tmp_path.iterdir()) == []
