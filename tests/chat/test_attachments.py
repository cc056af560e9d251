"""Files that go along with a message: what is found, what is refused and in which words, and how they are set."""

from __future__ import annotations

import base64
import os
import threading
from pathlib import Path

import pytest

from llmrun.chat import attachments
from llmrun.chat.attachments import (
    AttachedFile,
    Attachments,
    attach,
    attach_media,
    estimated_tokens,
    read_media,
    read_text,
)
from llmrun.errors import UsageError

PNG = b"\x89PNG\r\n\x1a\n\0\0"
WAV = b"RIFF\x24\0\0\0WAVEfmt "
FLAC = b"fLaC\0\0"


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
        (b"ID3 is a tag", "ID3 is a tag"),
        ("Größe der Straße".encode("latin-1"), "Größe der Straße"),
        ("Größe, kein Zeichen".encode("utf-16-le"), "Größe, kein Zeichen"),
        (b"OggS and FORM are words", "OggS and FORM are words"),
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
        (b"\xff\xfea", "it is not UTF-16 text"),
        (b"II*\0", "it is an image, not text (save it as PNG)"),
        (b"PK\x03\x04docx", "it is an archive or office document"),
        (b"GGUF\x03", "it is a model"),
    ],
)
def test_what_is_no_text_is_refused(data: bytes, words: str) -> None:
    assert words in why(put("file", data))


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("FILE:///etc/passwd", "only addresses with http:// or https:// are fetched"),
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
    first = attach([put("a.txt", "one"), put("b.txt", "two")])
    put("a.txt", "three")
    both = attach(["./a.txt"], beside=first)
    assert [(file.name, file.text) for file in both.files] == [("b.txt", "two"), ("./a.txt", "three")]
    assert attach([], beside=first) == first
    with pytest.raises(UsageError, match="2 files are too large"):
        attach(["a.txt"], beside=first, max_total=7)


def test_files_are_taken_out() -> None:
    attached = attach([put("src/a.txt", "1"), put("src/b.txt", "2"), put("c.md", "3"), put("d.flac", FLAC)])
    assert attached.without("c.md").names == ["src/a.txt", "src/b.txt", "d.flac"]
    assert attached.without("a.txt").names == ["src/b.txt", "c.md", "d.flac"]
    assert attached.without("src/*").names == ["c.md", "d.flac"]
    assert attached.without("d.*").modalities == frozenset()
    assert attached.without("*").names == []
    with pytest.raises(UsageError, match="is not attached") as caught:
        attached.without("d.txt")
    assert "src/a.txt, src/b.txt, c.md, d.flac" in caught.value.why


@pytest.mark.parametrize(
    ("data", "modality"),
    [
        (PNG, "image"),
        (b"\xff\xd8\xff\xe0", "image"),
        (b"GIF89a", "image"),
        (b"BM\0\0", "image"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "image"),
        (WAV, "audio"),
        (FLAC, "audio"),
        (b"ID3\4\0\0\0\0", "audio"),
        (b"\xff\xfb\x90\0", "audio"),
        (b"\xff\xf3\x90\0", "audio"),
    ],
)
def test_images_and_audio_are_known_by_their_beginning(data: bytes, modality: str) -> None:
    attached = attach([put("file", data)])
    assert attached.names == ["file"]
    assert attached.modalities == {modality}
    assert base64.b64decode(attached.sent[0].data) == data
    assert attached.before("What is it?") == "What is it?"


def test_each_option_takes_its_kind() -> None:
    put("a.png", PNG)
    put("a.wav", WAV)
    put("notes.txt", "x")
    attached = attach_media(["a.wav"], "audio", attach_media(["a.png"], "image"))
    assert [each.modality for each in attached.media] == ["image", "audio"]
    again = attach_media(["./a.wav"], "audio", attached)
    assert again.names == ["a.png", "./a.wav"]
    for name, modality, words in (
        ("a.png", "audio", "it is not a WAV, MP3 or FLAC file (--image FILE takes it)"),
        ("a.wav", "image", "it is not a PNG, JPEG, GIF, BMP or WebP image (--audio FILE takes it)"),
        ("notes.txt", "audio", "(-f FILE takes text files)"),
        ("notes.txt", "image", "(-f FILE takes text files; other images can be saved as PNG)"),
    ):
        with pytest.raises(UsageError) as caught:
            read_media(name, modality)  # type: ignore[arg-type]
        assert words in f"{caught.value.why} ({caught.value.hint})"


def test_other_recordings_are_refused_with_what_to_type() -> None:
    put("my talk.ogg", b"OggS\0\2")
    said = "it is Ogg; audio must be WAV, MP3 or FLAC (ffmpeg -i 'my talk.ogg' -ac 1 -ar 16000 'my talk-16k.flac')"
    assert said in why("my talk.ogg")
    with pytest.raises(UsageError, match="it is Ogg"):
        read_media("my talk.ogg", "audio")
    assert "it is MP4" in why(put("a.m4a", b"\0\0\0\x20ftypM4A \0"))
    assert "it is WebM or Matroska" in why(put("a.webm", b"\x1aE\xdf\xa3\0"))


def test_images_and_audio_have_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    put("a.wav", WAV)
    put("b.wav", WAV + b"1")
    monkeypatch.setattr(attachments, "MAX_MEDIA_BYTES", 2 * len(WAV))
    with pytest.raises(UsageError, match="2 images and audio files are too large"):
        attach(["a.wav", "b.wav"])
    monkeypatch.setitem(attachments._MAX_BYTES, "audio", len(WAV))
    with pytest.raises(UsageError, match=f"larger than {len(WAV)} bytes") as caught:
        attach(["b.wav"])
    assert "ffmpeg -i b.wav" in caught.value.hint


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


def test_a_page_is_text_and_its_source_is_a_command_away() -> None:
    page = "<!doctype html><title>Lamp</title><nav><a>Home</a></nav><p>It is <b>5 cm</b> high.<script>no()</script>"
    attached = attach([put("my page.html", page)])
    assert attached.files[0].text == "Lamp\n\nIt is **5 cm** high."
    assert attached.notes == (
        "my page.html: its text without markup; `llmrun run MODEL < 'my page.html'` sends the source",
    )
    assert "its scripts write it" in why(put("app.html", "<!doctype html><div id=root></div><script>app()</script>"))


def test_a_guessed_encoding_is_said() -> None:
    assert attach([put("old.txt", "5 € für Gäste".encode("cp1252"))]).notes == ("old.txt: read as windows-1252",)
    damaged = attach([put("log.txt", "für Gäste, größer, schöner".encode() + b"\xff")])
    assert damaged.notes == ("log.txt: read as UTF-8; 1 invalid byte sequence shown as \ufffd",)


def test_utf_16_is_text_only_where_somebody_could_have_written_it(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    for encoding in ("utf-16", "utf-16-le", "utf-16-be"):
        mark = "" if encoding == "utf-16" else "\ufeff"
        file.write_bytes((mark + "Grüße, 漢字\r\n").encode(encoding))
        assert read_text(str(file))[0] == "Grüße, 漢字\n"
    for content, why in (
        (b"\xff\xfe" + b"\x03\x01\x05\x00" * 50, "binary"),
        (bytes(range(256)), "binary"),
    ):
        file.write_bytes(content)
        with pytest.raises(UsageError) as caught:
            read_text(str(file))
        assert why in caught.value.why
