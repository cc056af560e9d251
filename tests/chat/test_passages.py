"""Passages of documents: where they are cut, which are embedded again, which are found, and their place in a turn."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.chats import add_turn
from support.pdfs import pdf
from support.word_vectors import WordEmbedder

from llmrun.chat import passages
from llmrun.chat.attachments import AttachedFile, Attachments, FileText, estimated_tokens
from llmrun.chat.passages import FolderIndex, FolderState, Passage, cut, passages_block, passages_for, passages_line
from llmrun.chat.store.export import export, read_json
from llmrun.chat.store.store import Sessions
from llmrun.chat.store.turns import Answer, Question
from llmrun.errors import UsageError
from llmrun.storage import Database


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "documents"
    for name, text in {
        "rivers.md": "# Danube\n\nIt rises in the Black Forest.\n\n# Nile\n\nIt is 6,650 km long.\n",
        "office/hours.txt": "The office closes at five on Fridays.\n",
        "office/tea.txt": "Tea is in the kitchen.\n",
    }.items():
        (found / name).parent.mkdir(parents=True, exist_ok=True)
        (found / name).write_text(text)
    return found


def found(index: FolderIndex, question: str) -> list[str]:
    return [passage.place for passage in index.search(question)]


# ---- cutting


def test_a_passage_names_its_lines_and_its_heading() -> None:
    long = " ".join(["word"] * 60)
    text = f"# One\n\n{long}\n\n## Two\n{long}\n{long}\n\n\n"
    one, two = cut(text, "a.md")
    assert (one.place, one.heading, one.text) == ("a.md, lines 1-3", "One", f"# One\n\n{long}")
    assert (two.place, two.heading, two.text) == ("a.md, lines 5-7", "Two", f"## Two\n{long}\n{long}")
    (line,) = cut("\n\nalone\n", "a.txt")
    assert line.place == "a.txt, line 3"
    assert list(cut(" \n\n\t\n", "a.txt")) == []


def test_short_sections_share_a_passage() -> None:
    (whole,) = cut("# One\na\n# Two\nb\n", "a.md")
    assert whole.text == "# One\na\n# Two\nb"


def test_a_page_of_a_pdf_is_never_in_one_passage_with_another() -> None:
    first, second = cut("[page 2]\nalpha\n\n[page 3]\nbeta", "a.pdf")
    assert [(each.place, each.text) for each in (first, second)] == [
        ("a.pdf, page 2", "alpha"),
        ("a.pdf, page 3", "beta"),
    ]
    (plain,) = cut("Look:\n[page 2]\nalpha", "a.txt")
    assert plain.text == "Look:\n[page 2]\nalpha"


@pytest.mark.parametrize("character", ["a", "字", " ", "a. "])
def test_no_passage_is_too_long(character: str) -> None:
    """Lines without any end, of letters, of ideographs, of sentences: nothing of them is lost."""
    text = "\n".join(["start", character * 5000, "end " * 3000, "stop"])
    made = list(cut(text, "a.txt"))
    assert max(estimated_tokens(each.text) for each in made) <= passages.PASSAGE_TOKENS + 1
    assert sum(each.text.count("end") for each in made) >= 3000
    assert sum(each.text.count(character.strip() or "start") for each in made) >= (5000 if character.strip() else 1)
    assert all(a.last <= b.first + 1 for a, b in pairwise(made))


def test_a_paragraph_ends_a_passage_where_it_can() -> None:
    sentence = "This is one of many sentences in a row. "
    paragraph = "\n".join([sentence * 2] * 6)
    made = list(cut("\n\n".join([paragraph] * 4), "a.txt"))
    assert len(made) > 1
    assert all(each.text.count(sentence.strip()) % 12 == 0 for each in made), "whole paragraphs"


def test_a_cut_inside_a_paragraph_repeats_its_last_lines() -> None:
    lines = [f"line number {number} of a long list" for number in range(100)]
    first, second, *_ = cut("\n".join(lines), "a.txt")
    assert first.last >= second.first
    assert first.text.splitlines()[-1] in second.text


# ---- the index


def test_only_what_changed_is_embedded_again(folder: Path, tmp_path: Path) -> None:
    embed = WordEmbedder()
    index = FolderIndex(folder, tmp_path / "state")
    assert index.refresh(embed, "m") == FolderState(3, 3, 3, ())
    assert embed.n_documents == 3
    again = FolderIndex(folder, tmp_path / "state")
    assert again.refresh(embed, "m") == FolderState(3, 3, 0, ())
    os.utime(folder / "rivers.md", ns=(1, 1))  # another time, the same bytes
    assert again.refresh(embed, "m").read == 1
    assert embed.n_documents == 3
    (folder / "office/tea.txt").write_text("Tea is in the cellar, with the coffee.\n")
    (folder / "office/hours.txt").unlink()
    (folder / "new.txt").write_text("Umbrellas are by the door.\n")
    assert again.refresh(embed, "m") == FolderState(3, 3, 2, ())
    assert embed.n_documents == 5
    assert found(again, "Where is the coffee?")[0] == "office/tea.txt, line 1"
    assert found(again, "Where are the umbrellas?")[0] == "new.txt, line 1"
    assert "hours.txt" not in " ".join(found(again, "office closes Fridays"))


def test_another_model_embeds_all_again(folder: Path, tmp_path: Path) -> None:
    embed = WordEmbedder()
    for model, n_documents in (("m", 3), ("m", 3), ("other", 6), ("m", 9)):
        FolderIndex(folder, tmp_path / "state").refresh(embed, model)
        assert embed.n_documents == n_documents


def test_an_interrupted_indexing_goes_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passages, "_COMMIT_PASSAGES", 1)
    embed = WordEmbedder()

    def stop(file: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        FolderIndex(folder, tmp_path / "state").refresh(embed, "m", stop)
    assert embed.n_documents == 2
    assert FolderIndex(folder, tmp_path / "state").refresh(embed, "m") == FolderState(3, 3, 1, ())
    assert embed.n_documents == 3


def synonyms(texts: Iterable[str], role: str) -> Iterator[Any]:
    return WordEmbedder()((text.replace("drink", "tea kitchen") for text in texts), role)


def test_words_find_what_vectors_do_not_and_the_other_way_round(folder: Path, tmp_path: Path) -> None:
    (folder / "codes.txt").write_text("Error E4711 means that the paper is empty.\n")
    index = FolderIndex(folder, tmp_path / "state")
    index.refresh()  # words alone
    assert found(index, "E4711") == ["codes.txt, line 1"]
    assert found(index, "umbrella") == []
    assert found(index, "?!") == []
    index.refresh(synonyms, "synonyms")
    assert found(index, "drink")[0] == "office/tea.txt, line 1"
    assert found(index, "E4711")[0] == "codes.txt, line 1"
    (best, *_) = index.search("The office closes at five on Fridays.")
    assert best.file == "office/hours.txt"
    assert 0.5 < best.score <= 1.0


def test_a_question_with_the_syntax_of_fts5_is_only_words(folder: Path, tmp_path: Path) -> None:
    index = FolderIndex(folder, tmp_path / "state")
    index.refresh()
    for question in ('tea" OR "x', "tea NEAR(kitchen)", "text:tea", "tea*", "tea AND NOT", "-tea ^tea"):
        assert found(index, question)[0] == "office/tea.txt, line 1"


def test_what_is_no_text_is_named_and_what_is_hidden_is_not(folder: Path, tmp_path: Path) -> None:
    (folder / "photo.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (folder / ".git").mkdir()
    (folder / ".git/config").write_text("Tea tea tea.\n")
    (folder / ".secret").write_text("Tea tea tea.\n")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__/x.txt").write_text("Tea tea tea.\n")
    (folder / "empty.txt").write_text("")
    (folder / "gone.txt").symlink_to(folder / "nowhere")
    if hasattr(os, "mkfifo"):
        os.mkfifo(folder / "pipe")  # whose reading would never end
    index = FolderIndex(folder, tmp_path / "state")
    state = index.refresh()
    pipe = ("pipe: it is not a file",) if hasattr(os, "mkfifo") else ()
    named = ("gone.txt: no such file or directory", "photo.png: it is an image, not text", *pipe)
    assert (state.files, state.left_out) == (3, named)
    assert found(index, "tea") == ["office/tea.txt, line 1"]
    assert index.refresh().left_out == state.left_out, "it is known, and not read again"


def test_a_file_that_failed_is_tried_again_when_the_cause_may_be_gone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "report.pdf").write_bytes(pdf("Harvest."))
    (folder / "scan.pdf").write_bytes(pdf(""))
    (folder / "closed.txt").write_text("closed")
    index = FolderIndex(folder, tmp_path / "state")
    tried = list[str]()
    read_text = passages.read_text

    def counted(name: str) -> FileText:
        tried.append(Path(name).name)
        if name.endswith("report.pdf"):  # as without the package
            raise passages.DocumentError("x", why="PDFs need a package", hint="pip install it", is_lasting=False)
        if name.endswith("closed.txt"):
            raise PermissionError(13, "Permission denied")
        return read_text(name)

    with monkeypatch.context() as patched:
        patched.setattr(passages, "read_text", counted)
        state = index.refresh()
        assert state.left_out == (
            "closed.txt: permission denied",
            "report.pdf: PDFs need a package (pip install it)",
            "scan.pdf: it has no text: its pages are pictures",
        )
        tried.clear()
        again = index.refresh()
        assert (again.left_out, again.read) == (state.left_out, 0), "nothing is new, and what is missing is said again"
        assert tried == ["closed.txt", "report.pdf"], "the scan's bytes are the cause"
        tried.clear()
        patched.setattr(passages, "readers", lambda: "others")
        index.refresh()
        assert "scan.pdf" in tried, "other readers may find a text"
    healed = index.refresh()
    assert ([line.partition(":")[0] for line in healed.left_out], healed.read) == (["scan.pdf"], 2)
    assert found(index, "harvest") == ["report.pdf, page 1"]


@pytest.mark.skipif(os.name == "nt" or not os.getuid(), reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_named(folder: Path, tmp_path: Path) -> None:
    (folder / "office").chmod(0)
    try:
        state = FolderIndex(folder, tmp_path / "state").refresh()
    finally:
        (folder / "office").chmod(0o755)
    assert (state.files, state.left_out) == (1, ("office: permission denied",))


def test_what_is_read_but_not_whole_is_noted(folder: Path, tmp_path: Path) -> None:
    (folder / "old.txt").write_bytes("Die Größe der Straße.".encode("cp1252"))
    state = FolderIndex(folder, tmp_path / "state").refresh()
    assert (state.files, state.left_out, state.notes) == (4, (), ("old.txt: read as windows-1252",))


@pytest.mark.parametrize(
    ("text", "questions"),
    [
        ("灯塔的密码是果酱。", ["密码是什么？", "灯塔的密码", "请问灯塔在哪里"]),
        ("灯台のパスワードはジャムです。", ["パスワードは何ですか", "灯台"]),
        ("등대의 비밀번호는 잼입니다.", ["비밀번호가 뭐예요?"]),
        ("รหัสผ่านของประภาคารคือแยม", ["รหัสผ่านคืออะไร"]),
        ("我们采用itgc标准，见第42章。", ["itgc", "什么是ITGC标准?", "第42章"]),
        ("猫", ["猫"]),
    ],
)
def test_words_are_found_in_scripts_without_blanks(text: str, questions: list[str], tmp_path: Path) -> None:
    (tmp_path / "documents").mkdir()
    texts = (
        text,
        "港口的房子很小。",
        "山の上に古い家があります。",
        "바다가 푸릅니다.",
        "แมวนอนบนเสื่อ",
        "The heron nests in reeds.",
    )
    for number, each in enumerate(texts):
        (tmp_path / f"documents/{number}.txt").write_text(each, encoding="utf-8")
    index = FolderIndex(tmp_path / "documents", tmp_path / "state")
    index.refresh()
    for question in questions:
        assert found(index, question)[:1] == ["0.txt, line 1"], question
    assert found(index, "全然别的事") == []


def test_names_in_scripts_without_blanks_are_found(tmp_path: Path) -> None:
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents/会议记录.md").write_text("# 春季预算\n12,000\n", encoding="utf-8")
    index = FolderIndex(tmp_path / "documents", tmp_path / "state")
    index.refresh()
    assert [len(found(index, question)) for question in ("会议", "预算", "snake_case")] == [1, 1, 0]


def test_an_index_of_before_is_made_anew(folder: Path, tmp_path: Path) -> None:
    old = replace(passages._SCHEMA, migrations=passages._SCHEMA.migrations[:1], probes=())
    index = FolderIndex(folder, tmp_path / "state")
    with closing(Database(index._path, old)) as database:
        for statement in (
            "CREATE TABLE files(id INTEGER PRIMARY KEY)",
            "CREATE TABLE passages(id INTEGER PRIMARY KEY, file INTEGER REFERENCES files ON DELETE CASCADE, text TEXT)",
            "CREATE VIRTUAL TABLE words USING fts5(text, content='passages', content_rowid='id')",
            "CREATE TRIGGER passage_added AFTER INSERT ON passages BEGIN "
            "INSERT INTO words(rowid, text) VALUES(new.id, new.text); END",
            "INSERT INTO files VALUES(1)",
            "INSERT INTO passages VALUES(1, 1, 'old')",
        ):
            database.connection.execute(statement)
    assert index.refresh() == FolderState(3, 3, 3, ())


def test_a_folder_has_limits(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passages, "MOST_FILES", 2)
    with pytest.raises(UsageError, match="more than 2 files"):
        FolderIndex(folder, tmp_path / "state").refresh()
    for path, why in ((folder / "rivers.md", "it is a file"), (folder / "nowhere", "it does not exist")):
        with pytest.raises(UsageError, match="is not a folder") as caught:
            FolderIndex(path, tmp_path / "state")
        assert caught.value.why == why


def test_an_empty_folder_has_no_passages(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    index = FolderIndex(tmp_path / "empty", tmp_path / "state")
    assert index.refresh(WordEmbedder(), "m") == FolderState(0, 0, 0, ())
    assert index.search("anything") == []


def test_two_processes_may_use_one_index(folder: Path, tmp_path: Path) -> None:
    one, two = FolderIndex(folder, tmp_path / "state"), FolderIndex(folder, tmp_path / "state")
    one.refresh(WordEmbedder(), "m")
    (folder / "office/tea.txt").unlink()
    two.refresh(WordEmbedder(), "m")
    assert "office/tea.txt, line 1" not in found(one, "Where is the tea?"), "the other process has removed it"
    assert found(one, "office hours")[0] == "office/hours.txt, line 1"


def test_the_index_is_the_users_alone(folder: Path, tmp_path: Path) -> None:
    FolderIndex(folder, tmp_path / "state").refresh()
    (file,) = (tmp_path / "state" / passages.FOLDER).glob("*.db")
    assert os.name == "nt" or file.stat().st_mode & 0o777 == 0o600


# ---- a question


def test_passages_keep_to_a_budget(tmp_path: Path) -> None:
    (tmp_path / "documents").mkdir()
    for number in range(9):
        (tmp_path / f"documents/{number}.txt").write_text(f"tea {number} " + "word " * 150)
    index = FolderIndex(tmp_path / "documents", tmp_path / "state")
    index.refresh()
    size = estimated_tokens(index.search("tea")[0].text)
    assert len(passages_for(index, "tea", "", 0)) == passages.MOST_FOUND
    assert len(passages_for(index, "tea", "", 4 * 2 * size)) == 2, "a quarter of the context window"
    assert passages_for(index, "tea", "", 256) == ()


def test_a_short_question_is_searched_for_with_the_one_before(folder: Path, tmp_path: Path) -> None:
    index = FolderIndex(folder, tmp_path / "state")
    index.refresh()
    before = "How long is the Nile?"
    assert passages_for(index, "And why so?", before, 0)[0].file == "rivers.md"
    assert passages_for(index, "And why so?", "", 0) == ()
    assert passages_for(index, "Where do you keep the tea in here?", before, 0)[0].file == "office/tea.txt"
    assert passages_for(index, "我们把茶叶放在什么地方？", before, 0) == (), "it is no short one, without any blank"


PASSAGES = (
    Passage("a.md", 1, 3, 0, "One", "alpha\n```\ncode\n```", 0.5),
    Passage("b.pdf", 7, 9, 4, "", "beta", 0.25),
    Passage("b.pdf", 1, 2, 5, "", "gamma", 0.125),
)


def test_passages_stand_before_files_and_the_text_of_a_turn() -> None:
    question = Question.of("Why?", Attachments((AttachedFile("f.txt", 3, "own"),)), PASSAGES)
    assert question.content.startswith(passages_block(PASSAGES))
    assert question.content.endswith("f.txt:\n```\nown\n```\n\nWhy?")
    assert "[1] a.md, lines 1-3:\n````\nalpha" in question.content
    assert "[2] b.pdf, page 4:\n```\nbeta" in question.content
    assert question.shown == "Why?"
    assert passages_line(PASSAGES) == "3 passages of 2 files"
    assert passages_line(PASSAGES[:1]) == "1 passage of 1 file"
    plain = Question.of("Why?", Attachments())
    assert (plain.content, plain.typed, plain.passages) == ("Why?", "", ())


@pytest.mark.parametrize("attached", [Attachments(), Attachments((AttachedFile("f.txt", 3, "own"),))])
def test_a_reworded_question_keeps_its_passages_or_gets_others(attached: Attachments) -> None:
    question = Question.of("Why?", attached, PASSAGES)
    assert question.reworded("Who?") == Question.of("Who?", attached, PASSAGES)
    assert question.reworded("Who?", PASSAGES[:1]) == Question.of("Who?", attached, PASSAGES[:1])
    assert question.reworded("Who?", ()) == Question.of("Who?", attached)
    assert Question.of("Why?", attached).reworded("Who?", PASSAGES) == Question.of("Who?", attached, PASSAGES)


def test_what_went_along_is_saved_with_the_turn(tmp_path: Path) -> None:
    question = Question.of("Why?", Attachments(), PASSAGES)
    with Sessions(tmp_path) as sessions:
        chat = sessions.new("tea")
        add_turn(chat, question, Answer("Because."))
        chat.release()
    with Sessions(tmp_path) as sessions:
        tree = sessions.tree("tea")
        assert tree.entries[0].part == question
        assert read_json(export(tree, "json")) == tree
        copied = sessions.copy("tea")
        assert copied.entries[0].part == question
        assert replace(tree, name=copied.name).entries[0].part == question
        copied.release()
