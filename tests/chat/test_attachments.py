"""Files that go along with a message: what is found, what is refused and in which words, and how they are set."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from llmrun.chat import attachments
from llmrun.chat.attachments import AttachedFile, Attachments, attach, estimated_tokens, read_text, without
from llmrun.errors import UsageError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put(name: str, content: str | bytes) -> str:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return name


def why(pattern: str) -> str:
    with pytest.raises(UsageError) as caught:
        attach([pattern])
    return f"{caught.value.what}: {caught.value.why} ({caught.value.hint})"


def test_a_file_stands_under_its_name_before_the_message() -> None:
    attached = attach([put("notes.txt", "one\ntwo\n")])
    assert attached.block == "notes.txt:\n```\none\ntwo\n```"
    assert attached.files == (AttachedFile("notes.txt", 8, "one\ntwo\n"),)
    assert attached.tokens == 2
    assert attached.before("What is this?") == f"{attached.block}\n\nWhat is this?"
    assert attached.before("") == attached.block
    assert Attachments().before("hi") == "hi"


def test_nothing_in_a_file_closes_its_fence() -> None:
    text = "a\n```py\nx\n```\n`````\nend"
    assert attach([put("a.md", text)]).block == f"a.md:\n``````\n{text}\n``````"
    assert attach([put("empty", "")]).block == "empty:\n```\n```"


def test_a_strange_name_stays_on_its_line() -> None:
    name = put("a\n``\x1b[2Jb", "x")
    attached = attach([name])
    assert attached.block.splitlines()[0] == "a????[2Jb:"
    assert attached.files[0].name == name


def test_patterns_are_sorted_and_hidden_files_left_out() -> None:
    for name in ("src/b.py", "src/a.py", "src/.hidden.py", "src/c.txt", "src/deep/d.py"):
        put(name, name)
    put("src/dir.py/inner.py", "x")
    assert [file.name for file in attach(["src/*.py"]).files] == ["src/a.py", "src/b.py"]
    recursive = attach(["src/**/*.py"]).files
    assert [file.name for file in recursive] == ["src/a.py", "src/b.py", "src/deep/d.py", "src/dir.py/inner.py"]
    assert [file.name for file in attach(["src/b.py", "src/*.py", "./src/b.py"]).files] == ["src/b.py", "src/a.py"]
    assert [file.name for file in attach(["src/.h*.py"]).files] == ["src/.hidden.py"], "who names them wants them"


def test_a_file_whose_name_looks_like_a_pattern() -> None:
    assert [file.name for file in attach([put("a[1].txt", "x")]).files] == ["a[1].txt"]


def test_the_home_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here))
    put("notes.txt", "x")
    assert attach(["~/notes.txt"]).n_bytes == attach(["~/*.txt"]).n_bytes == 1


def test_what_a_pattern_finds_that_is_no_text_is_noted() -> None:
    put("a.txt", "text")
    put("b.bin", b"\x7fELF\0\0\0")
    put("c.png", b"\x89PNG\r\n\x1a\n\0\0")
    attached = attach(["*"])
    assert [file.name for file in attached.files] == ["a.txt"]
    assert attached.notes == (
        "'b.bin' can't be attached: it is binary, not text; left out",
        "'c.png' can't be attached: it is an image, not text; left out",
    )
    assert "finds no text file: 'c.png' can't be attached" in why("*.png")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xef\xbb\xbfhi", "hi"),
        ("hi é 漢".encode("utf-16"), "hi é 漢"),
        (b"\xfe\xff" + "hé".encode("utf-16-be"), "hé"),
        (b"a\r\nb\rc\n", "a\nb\nc\n"),
        (b"BMI and BMW are words", "BMI and BMW are words"),
        (b"GIF is a format", "GIF is a format"),
        (b"PKZIP was a program", "PKZIP was a program"),
        (b"", ""),
    ],
)
def test_texts(data: bytes, text: str) -> None:
    assert read_text(put("file", data))[:2] == (text, len(data))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"a\0b", "it is binary, not text"),
        (b"\xff\xfe\0\0a\0\0\0", "it is binary, not text"),
        (b"\x80\0", "it is binary, not text"),
        ("Größe".encode("latin-1"), "it is not UTF-8 text, see byte 2 (iconv"),
        (b"\xff\xfea", "it is not UTF-16 text"),
        (b"\x89PNG\r\n\x1a\n", "it is an image, not text (--image FILE"),
        (b"\xff\xd8\xff\xe0", "it is an image"),
        (b"GIF89a", "it is an image"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "it is an image"),
        (b"BM\0\0", "it is an image"),
        (b"PK\x03\x04docx", "it is an archive or office document"),
        (b"GGUF\x03", "it is a model"),
    ],
)
def test_what_is_no_text_is_refused(data: bytes, words: str) -> None:
    assert words in why(put("file", data))


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("https://example.org/a.txt", "URLs are not fetched (download it, then -f FILE)"),
        ("FILE:///etc/passwd", "URLs are not fetched"),
        ("missing.txt", "'missing.txt' can't be attached: no such file"),
        ("*.missing", "'*.missing' finds no file"),
        ("a\0b", "no file can have that name"),
        ("/dev/null", "it is not a file"),
    ],
)
def test_what_is_no_file_is_refused(pattern: str, words: str) -> None:
    assert words in why(pattern)


def test_a_folder_is_refused_with_what_to_type() -> None:
    put("docs/a.txt", "x")
    assert "it is a folder ('docs/*' names its files)" in why("docs/")


def test_files_beside_files() -> None:
    first = attach([put("a.txt", "one"), put("b.txt", "two")]).files
    put("a.txt", "three")
    both = attach(["./a.txt"], beside=first)
    assert [(file.name, file.text) for file in both.files] == [("b.txt", "two"), ("./a.txt", "three")]
    assert attach([], beside=first).files == first
    with pytest.raises(UsageError, match="2 files are too large"):
        attach(["a.txt"], beside=first, max_total=7)


def test_files_are_taken_out() -> None:
    files = attach([put("src/a.txt", "1"), put("src/b.txt", "2"), put("c.md", "3")]).files

    def left(pattern: str) -> list[str]:
        return [file.name for file in without(files, pattern)]

    assert left("c.md") == ["src/a.txt", "src/b.txt"]
    assert left("a.txt") == ["src/b.txt", "c.md"]
    assert left("src/*") == ["c.md"]
    assert left("*") == []
    with pytest.raises(UsageError, match="is not attached") as caught:
        without(files, "d.txt")
    assert "src/a.txt, src/b.txt, c.md" in caught.value.why


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c"):
        put(f"{name}.txt", "x" * 10)
    assert attach(["*.txt"], max_bytes=10, max_total=30).n_bytes == 30
    with pytest.raises(UsageError, match="larger than 9 bytes"):
        attach(["a.txt"], max_bytes=9)
    with pytest.raises(UsageError, match="3 files are too large") as caught:
        attach(["*.txt"], max_total=29)
    assert "30 bytes, the limit is 29" in caught.value.why
    monkeypatch.setattr(attachments, "MAX_FILES", 2)
    with pytest.raises(UsageError, match="finds 3 files"):
        attach(["*.txt"])


@pytest.mark.skipif(os.name == "nt", reason="no pipes with names")
def test_what_the_shell_gives_for_a_command() -> None:
    os.mkfifo("pipe")
    writer = threading.Thread(target=lambda: Path("pipe").write_text("from a command\n"))
    writer.start()
    assert read_text("pipe")[:2] == ("from a command\n", 15)
    writer.join()


def test_estimates() -> None:
    assert estimated_tokens("") == 0
    assert estimated_tokens("word " * 70) == 100
    assert estimated_tokens("漢字") == 2


def test_utf_16_is_text_only_where_somebody_could_have_written_it(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    for encoding in ("utf-16", "utf-16-le", "utf-16-be"):
        mark = "" if encoding == "utf-16" else "\ufeff"
        file.write_bytes((mark + "Grüße, 漢字\r\n").encode(encoding))
        assert read_text(str(file))[0] == "Grüße, 漢字\n"
    for content, why in (
        (b"\xff\xfe" + b"\x03\x01\x05\x00" * 50, "binary"),
        ("no mark at the beginning".encode("utf-16-le"), "UTF-16 without a byte order mark"),
        (bytes(range(256)), "binary"),
    ):
        file.write_bytes(content)
        with pytest.raises(UsageError) as caught:
            read_text(str(file))
        assert why in caught.value.why
