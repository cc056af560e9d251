"""Damaged chats: one is named and left out, all others work, and a damaged file is kept."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from support.damaged_chats import DEEP, HURT, NAMES, ROWS, flip, hurt, make_chats, rows_by_chat

from llmrun.chat.store.rows import FILE, MIGRATIONS, examine
from llmrun.chat.store.store import Sessions
from llmrun.errors import LlmrunError, ResourceError

SOUND = [name for name in reversed(NAMES) if name != NAMES[HURT - 1]]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file of five chats."""
    folder = tmp_path_factory.mktemp("chats")
    make_chats(folder)
    return (folder / FILE).read_bytes()


@pytest.fixture
def folder(chats: bytes, tmp_path: Path) -> Path:
    (tmp_path / FILE).write_bytes(chats)
    return tmp_path


def test_sound_chats_are_not_called_damaged(folder: Path) -> None:
    told: list[str] = []
    with Sessions(folder, on_damage=told.append) as sessions:
        assert [facts.name for facts in sessions.all()] == list(reversed(NAMES))
    assert examine(folder / FILE) == (len(NAMES), [])
    assert told == []


@pytest.mark.parametrize("damage", ROWS)
def test_a_damaged_chat_is_named_and_left_out(folder: Path, damage: str) -> None:
    statement, said = ROWS[damage]
    hurt(folder, statement)
    told: list[str] = []
    with Sessions(folder, on_damage=told.append) as sessions:
        assert [facts.name for facts in sessions.all()] == SOUND
        assert {hit.session for hit in sessions.search("question")} == set(SOUND)
        for name in SOUND:
            assert len(sessions.tree(name).path()) == 6
        assert len(told) == 1, "once"
        assert said in told[0]
        assert f"id {HURT}" in told[0]
        with pytest.raises(ResourceError, match="is damaged") as caught:
            sessions.tree(str(HURT))
        assert said in str(caught.value)
        assert f"llmrun sessions rm {HURT}" in caught.value.hint
        with pytest.raises(ResourceError, match="is damaged"):
            sessions.open(str(HURT))
        sessions.delete(str(HURT))
        assert [facts.name for facts in sessions.all()] == SOUND


@pytest.mark.parametrize("damage", {**ROWS, **DEEP})
def test_a_damaged_chat_is_told_and_can_be_deleted(folder: Path, damage: str) -> None:
    statement, said = {**ROWS, **DEEP}[damage]
    hurt(folder, statement)
    n_chats, (line,) = examine(folder / FILE) or (0, [])
    assert n_chats == len(NAMES)
    assert said in line
    assert f"id {HURT}" in line
    with Sessions(folder) as sessions:
        facts = sessions.find(str(HURT))
        assert said in facts.first
        sessions.delete(str(facts.id))
        assert [each.name for each in sessions.all()] == SOUND
    assert examine(folder / FILE) == (len(SOUND), [])


@pytest.mark.parametrize("damage", {**ROWS, **DEEP})
def test_the_newest_sound_chat_goes_on(folder: Path, damage: str) -> None:
    hurt(folder, {**ROWS, **DEEP}[damage][0])
    columns, values = "session, turn, role, content, typed, created", f"{HURT}, 1, 'user', 'hi', '', 1e9"
    hurt(folder, f"INSERT INTO messages({columns}) VALUES({values})")  # which makes it the last used chat
    told: list[str] = []
    with Sessions(folder, on_damage=told.append) as sessions:
        assert sessions.open().name == SOUND[0]
        assert sessions.tree().name == SOUND[0]
    assert len(told) == 1


def test_the_models_of_all_chats_may_be_damaged(folder: Path) -> None:
    hurt(folder, "UPDATE models SET size = 'x' WHERE name = 'second'")
    with Sessions(folder) as sessions:
        assert [facts.name for facts in sessions.all()] == SOUND


@pytest.mark.parametrize("content", [b"no database " * 1000, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_file_that_is_no_database_is_kept(folder: Path, content: bytes) -> None:
    (folder / FILE).write_bytes(content)
    n_chats, damage = examine(folder / FILE) or (1, [""])
    assert n_chats == 0
    assert "can't be read" in damage[0]
    with Sessions(folder) as sessions:
        assert "It is kept as" in sessions.note
        assert sessions.all() == []
    (aside,) = folder.glob("sessions.damaged-*.db")
    assert aside.read_bytes() == content


@pytest.mark.parametrize("page", range(2, 20))
def test_a_lost_page_costs_no_other_chat(chats: bytes, tmp_path: Path, page: int) -> None:
    (tmp_path / FILE).write_bytes(chats[: (page - 1) * 4096] + b"\xee" * 4096 + chats[page * 4096 :])
    check(chats, tmp_path)


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_random_bytes_cost_no_other_chat(chats: bytes, tmp_path: Path, first: int) -> None:
    for seed in range(first, first + 20):
        folder = tmp_path / str(seed)
        folder.mkdir()
        (folder / FILE).write_bytes(flip(chats, seed))
        check(chats, folder)


def check(chats: bytes, folder: Path) -> None:
    """Use a damaged file in every way: only errors of ours, and what SQLite can read of a chat is listed."""
    (folder / "sound").write_bytes(chats)
    before, now = rows_by_chat(folder / "sound"), rows_by_chat(folder / FILE)
    sound = {NAMES[session - 1] for session, rows in before.items() if rows == now.get(session)}
    examine(folder / FILE)
    try:
        sessions = Sessions(folder)
    except LlmrunError:
        assert not sound or not is_ours(folder / FILE)
        return
    with sessions:
        listed = {facts.name for facts in sessions.all()}
        assert sound <= listed
        for which in (*listed, *map(str, range(1, 6))):
            for use in (sessions.tree, sessions.find):
                try:
                    use(which)
                except LlmrunError:
                    assert which not in sound
        assert {hit.session for hit in sessions.search("question", 100)} >= sound
        assert {facts.name for facts in sessions.all()} >= sound


def is_ours(path: Path) -> bool:
    """Whether the header of the file still says that this llmrun wrote it."""
    connection = sqlite3.connect(path)
    try:
        return bool(connection.execute("PRAGMA user_version").fetchone()[0] == len(MIGRATIONS))
    except (sqlite3.Error, UnicodeDecodeError):
        return False
    finally:
        connection.close()
