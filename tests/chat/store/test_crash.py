"""No turn that was shown as finished is lost: not when the process is killed, not when the power fails."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.chats import add_turn
from support.power_loss import Operation, after_power_loss, recording

from llmrun.chat.store.store import Sessions
from llmrun.chat.store.turns import Answer, Question
from llmrun.errors import LlmrunError

KILLS = 200

pytestmark = [
    pytest.mark.usefixtures("package_on_path"),
    pytest.mark.skipif(os.name == "nt", reason="needs fork and SIGKILL"),
]

# For each line on stdin a fork that chats as fast as it can, and says what it has shown. Imports are done once.
WRITERS = """
import os, sys
from pathlib import Path
from llmrun.errors import LlmrunError
from llmrun.chat.store.store import Sessions
from llmrun.chat.store.turns import Answer, Question
import sqlite3

def chat(run):
    sessions = Sessions(Path(sys.argv[1]))
    talk = sessions.new(f"run {run}") if run % 10 == 0 or not sessions.all() else sessions.open()
    os.write(1, f"{os.getpid()} opened {talk.open_elsewhere} {sessions.note!r}\\n".encode())
    number = 0
    while True:
        question = f"question {run}/{number}"
        talk.add_question(Question(question))
        talk.add_answer(Answer(f"answer {run}/{number} " + "word " * (number % 700)))
        os.write(1, f"{os.getpid()} shown {question}\\n".encode())
        number += 1

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        chat(int(line))
    os.write(1, f"{pid} began\\n".encode())
    os.waitpid(pid, 0)
    os.write(1, f"{pid} ended\\n".encode())
"""


def questions(sessions: Sessions) -> set[str]:
    """Every question that is in a path that goes on, whose answer is whole."""
    found = set()
    for facts in sessions.all():
        entries = sessions.tree(str(facts.id)).path()
        for question, answer in zip(entries[::2], entries[1::2], strict=False):  # the last one may have no answer yet
            asked = question.part.content.removeprefix("question ")
            number = int(asked.partition("/")[2])
            assert answer.part.content == f"answer {asked} " + "word " * (number % 700)
            found.add(question.part.content)
    return found


@pytest.fixture
def writers(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", WRITERS, str(tmp_path / "kept")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        cwd="/",
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)


def test_kill_at_200_random_moments(tmp_path: Path, writers: subprocess.Popen[str]) -> None:
    chance = random.Random(5)
    assert writers.stdin is not None
    assert writers.stdout is not None
    shown: set[str] = set()
    during_start = 0
    for run in range(KILLS):
        writers.stdin.write(f"{run}\n")
        pid = next(line for line in writers.stdout if line.endswith(" began\n")).split()[0]
        # The moment is a number of turns and a little more, so that a busy machine sees the same ones.
        turns = chance.choice((0, 0, 2, 4))
        opened, killed, line = False, False, ""
        while not killed or line != f"{pid} ended\n":
            if not turns and not killed:
                time.sleep(chance.choice((0.001, 0.004, 0.02)) * chance.random())
                os.kill(int(pid), signal.SIGKILL)
                killed = True
            line = writers.stdout.readline()
            assert line.startswith(pid), line
            if line == f"{pid} ended\n":
                continue
            if " opened " in line:
                assert line.endswith(" opened False ''\n"), "neither a lock nor a damaged file is left by a kill"
                opened = True
            else:
                shown.add(line.split(" shown ")[1].strip())
                turns = max(0, turns - 1)
        during_start += not opened
    assert during_start > KILLS // 50, "some die while they open the file"
    assert len(shown) > KILLS, "most die while they write"
    with Sessions(tmp_path / "kept") as sessions:
        assert sessions.note == ""
        assert questions(sessions) >= shown
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["sessions.db", "sessions.lock"]


def script(folder: Path, mark: object, *, synchronous: str = "") -> None:
    """A life: a new file, turns, leaving and coming back, undo, retry, a deleted chat."""

    def life(start: int) -> None:
        with Sessions(folder) as sessions:
            if synchronous:
                sessions._connection.execute(f"PRAGMA synchronous={synchronous}")
            talk = sessions.open() if start else sessions.new()
            for number in range(start, start + 4):
                add_turn(
                    talk, Question(f"question 1/{number}"), Answer(f"answer 1/{number} " + "word " * (number % 700))
                )
                mark(f"shown {number}")  # type: ignore[operator]
            add_turn(talk, Question("question 1/800"), Answer("taken back"))
            talk.undo()
            talk.add_answer(Answer(f"answer 1/{start + 3} " + "word " * ((start + 3) % 700)))
            other = sessions.new("other")
            add_turn(other, Question("question 1/0"), Answer("answer 1/0 "))
            sessions.delete("other")

    life(0)
    life(4)


def survives(folder: Path, files: dict[str, bytes], shown: int) -> bool:
    """Whether every turn that was shown is there after a power failure, and the chat goes on."""
    folder.mkdir(mode=0o700)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / "sessions.db").touch()
    try:
        with Sessions(folder) as sessions:
            if sessions.note or not {f"question 1/{number}" for number in range(shown)} <= questions_shown(sessions):
                return False
            sessions._connection.execute("PRAGMA synchronous=OFF")  # what is written from here on is not the question
            assert sessions._connection.execute("PRAGMA quick_check").fetchall() == [("ok",)]
            add_turn(sessions.new("next"), Question("and now?"), Answer("on it goes"))
    except LlmrunError:  # damaged
        return False
    left = {path.name for path in folder.iterdir()}
    shutil.rmtree(folder)
    return left == {"sessions.db", "sessions.lock"}


def questions_shown(sessions: Sessions) -> set[str]:
    return {entry.part.content for facts in sessions.all() for entry in sessions.tree(str(facts.id)).path()[::2]}


def replays(tmp_path: Path, times: int, *, synchronous: str = "") -> Iterator[bool]:
    """For power failures after each write, in several random ways: whether nothing was lost."""
    try:
        with recording() as recorder:
            script(tmp_path / "recorded", recorder.mark, synchronous=synchronous)
    except (OSError, AttributeError):
        pytest.skip("this Python's SQLite is built in: its writes can't be watched")
    operations = recorder.operations
    assert {"write", "sync", "truncate"} <= {operation.kind for operation in operations}
    shown = 0
    for end in range(1, len(operations) + 1):
        shown += operations[end - 1].kind.startswith("shown")
        for seed in range(times):
            files = after_power_loss(operations[:end], random.Random(1000 * end + seed))
            yield survives(tmp_path / f"{end}-{seed}", files, shown)


@pytest.mark.slow
def test_power_loss_at_every_write(tmp_path: Path) -> None:
    """Every write and fsync that SQLite asks of the system is recorded; the power then fails after each of them.

    What was synced is there; of what was not, any 512 bytes are there or not, in several random ways for each moment.
    This takes SQLite's own calls for the truth, below our code and above the kernel. What it can't see: a disk that
    lies about having written, and the fsync of the folder, with which SQLite's unix VFS follows a new log's first sync.
    """
    survived = list(replays(tmp_path, 3))
    assert len(survived) > 500
    assert all(survived)


def test_the_replay_sees_what_is_not_synced(tmp_path: Path) -> None:
    """The same with SQLite told not to wait for the disk: turns are lost, so the test above can fail."""
    assert not all(replays(tmp_path, 1, synchronous="OFF"))


def test_every_turn_is_synced_before_its_steps_return(tmp_path: Path) -> None:
    try:
        with recording() as recorder, Sessions(tmp_path / "kept") as sessions:
            talk = sessions.new()
            for _ in range(5):
                add_turn(talk, Question("a"), Answer("b"))
                recorder.mark("shown")
    except (OSError, AttributeError):
        pytest.skip("this Python's SQLite is built in: its writes can't be watched")
    before = [recorder.operations[index - 1] for index, one in enumerate(recorder.operations) if one.kind == "shown"]
    assert before == [Operation("sync", "sessions.db-wal")] * 5


def test_the_file_waits_for_the_disk(tmp_path: Path) -> None:
    with Sessions(tmp_path / "kept") as sessions:
        values = [
            sessions._connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")
        ]
    assert values == ["wal", 2]


def test_a_log_cut_anywhere_gives_the_turns_before(tmp_path: Path) -> None:
    """Needs nothing but files: the log is cut within what the last turn wrote, as if that had only half arrived."""
    kept = tmp_path / "kept"
    lengths = []
    with Sessions(kept) as sessions:
        talk = sessions.new()
        for number in range(3):
            add_turn(talk, Question(f"question 1/{number}"), Answer(f"answer 1/{number} " + "word " * number))
            lengths.append((kept / "sessions.db-wal").stat().st_size)
        database, log = (kept / "sessions.db").read_bytes(), (kept / "sessions.db-wal").read_bytes()
    for cut in [*range(lengths[1], lengths[2], 307), lengths[2] - 1, lengths[2]]:
        folder = tmp_path / str(cut)
        folder.mkdir()
        (folder / "sessions.db").write_bytes(database)
        (folder / "sessions.db-wal").write_bytes(log[:cut])
        with Sessions(folder) as sessions:
            assert len(questions(sessions)) == (3 if cut == lengths[2] else 2)
        shutil.rmtree(folder)


def test_a_file_killed_while_it_was_made_is_finished(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "sessions.db").touch()
    with Sessions(kept) as sessions:
        add_turn(sessions.new("one"), Question("a"), Answer("b"))
    connection = sqlite3.connect(kept / "sessions.db")
    assert connection.execute("SELECT count(*) FROM messages").fetchone() == (2,)
    connection.close()
