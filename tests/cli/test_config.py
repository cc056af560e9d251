"""`llmrun config`: values with their origins, and changes of one value in a file that people write too."""

from __future__ import annotations

import contextlib
import io
import json
import re
import stat
from pathlib import Path

import pytest
from support.stand_in_web import stand_in_web

from llmrun.cli.app import call
from llmrun.cli.settings_file import read_file, with_value
from llmrun.cli.tools import ToolOptions, toolbox
from llmrun.config import config_file, load_settings, model_aliases, model_folders
from llmrun.errors import LlmrunError, UsageError
from llmrun.protocol.messages import ToolCall
from llmrun.ui.terminal.output import Output


@pytest.fixture(autouse=True)
def config(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The settings file, in a folder that does not exist yet."""
    monkeypatch.setenv("LLMRUN_CONFIG", str(tmp_path / "new" / "config.toml"))
    return tmp_path / "new" / "config.toml"


def shown(capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[object, str]]:
    capsys.readouterr()
    call(["config", "--json"])
    return {row["key"]: (row["value"], row["from"]) for row in json.loads(capsys.readouterr().out)}


def test_each_value_has_its_origin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(capsys)["model"] == (None, "not set")
    for key, value in (("model", "smollm2"), ("serve.port", "81"), ("models.qwen3-0.6b.temp", "0.3")):
        call(["config", "set", key, value])
    monkeypatch.setenv("LLMRUN_HOST", "::1")
    monkeypatch.setenv("LLMRUN_CTX", "512")
    found = shown(capsys)
    assert found["model"] == ("smollm2", "settings file")
    assert found["serve.port"] == (81, "settings file")
    assert found["serve.host"] == ("::1", "environment: LLMRUN_HOST")
    assert found["serve.parallel"] == (8, "default")
    assert found["models.qwen3-0.6b.temp"] == (0.3, "settings file")
    assert found["ctx"] == (512, "environment: LLMRUN_CTX")


def test_the_table_names_the_file(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    call(["config"])
    told = capsys.readouterr()
    assert "serve.port" in told.out
    assert "does not exist yet" in told.err


def test_other_lines_stay(config: Path) -> None:
    config.parent.mkdir()
    config.write_text("# mine\nmodel = 'a'  # the best\n\n[serve] # here\n# port\nport = 1\n\n[models.a]\nctx = 512\n")
    call(["config", "set", "serve.parallel", "2"])
    call(["config", "set", "models.a.ctx", "1024"])
    call(["config", "unset", "serve.port"])
    assert config.read_text() == (
        "# mine\nmodel = 'a'  # the best\n\n[serve] # here\n# port\nparallel = 2\n\n[models.a]\nctx = 1024\n"
    )


@pytest.mark.parametrize("name", ["smollm2", "qwen3-0.6b", "owner/repo:Q4_K_M", 'a "b"', "ä"])
def test_every_name_of_a_model_can_have_a_preset(name: str) -> None:
    for value in ("Be brief.", 'a "quote"\n\\'):
        call(["config", "set", f"models.{name}.system", value])
        assert read_file() == {f"models.{name}.system": value}
    call(["config", "unset", f"models.{name}.system"])
    assert read_file() == {}


@pytest.mark.parametrize(
    ("before", "key", "after"),
    [
        ("models.a.system = 'a'  # the best\n", "models.a.system", 'models.a.system = "7"  # the best\n'),
        ('[serve]\n"port" = 8080 # mine\n', "serve.port", '[serve]\n"port" = 7 # mine\n'),
        ("serve.port = 8080\n", "serve.port", "serve.port = 7\n"),
        ("serve = {port = 1, host = 'x'}\n", "serve.port", "serve = {port = 7, host = 'x'}\n"),
        ("[models.'a']\nctx = 512\n", "models.a.ctx", "[models.'a']\nctx = 7\n"),
        ("[models]\na = {ctx = 512}\n", "models.a.ctx", "[models]\na = {ctx = 7}\n"),
        ('[models.a]\nsystem = """\none\ntwo"""\n', "models.a.system", '[models.a]\nsystem = "7"\n'),
        (
            "[models.a]\nctx = 1\n[serve]\nport = 1\n[models.b]\nctx = 1\n",
            "models.b.ctx",
            "[models.a]\nctx = 1\n[serve]\nport = 1\n[models.b]\nctx = 7\n",
        ),
    ],
)
def test_every_form_of_toml_can_be_changed(config: Path, before: str, key: str, after: str) -> None:
    config.parent.mkdir()
    config.write_text(before)
    call(["config", "set", key, "7"])
    assert config.read_text() == after
    call(["config", "unset", key])
    assert key not in read_file()


def test_a_table_between_others_gets_a_new_preset(config: Path) -> None:
    config.parent.mkdir()
    config.write_text("[models.a]\nctx = 1\n[serve]\nport = 1\n[models.b]\nctx = 1\n")
    call(["config", "set", "models.c.ctx", "512"])
    assert read_file() == {"models.a.ctx": 1, "serve.port": 1, "models.b.ctx": 1, "models.c.ctx": 512}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["set", "servr.port", "1"], "there is no setting 'servr.port'"),
        (["set", "serve.port", "x"], r"invalid serve\.port x"),
        (["set", "serve.port", "99999"], r"invalid serve\.port 99999: must be between 0 and 65,535"),
        (["set", "serve.parallel", "0"], r"invalid serve\.parallel 0: must be between 1 and 128"),
        (["set", "serve.keep", "3x"], r"invalid serve\.keep 3x: must be a time"),
        (["set", "models.a.max-tokens", "0"], r"invalid models\.a\.max-tokens 0: must be between 1"),
        (["set", "models.a.temp", "-1"], r"invalid models\.a\.temp -1"),
        (["unset", "serve.port"], r"serve\.port is not set"),
        (["unset", "nothing"], "there is no setting"),
    ],
)
def test_mistakes(words: list[str], said: str, config: Path) -> None:
    with pytest.raises(UsageError, match=said):
        call(["config", *(["set", "--", *words[1:]] if words[0] == "set" else words)])
    assert not config.exists()


@pytest.mark.parametrize(
    ("key", "meant"), [("modl", "model"), ("serve.prot", "serve.port"), ("models.a.ctxx", "models.a.ctx")]
)
def test_a_hint_names_the_key_to_type(key: str, meant: str, config: Path) -> None:
    with pytest.raises(UsageError) as caught:
        call(["config", "set", key, "1"])
    assert re.match(rf"did you mean {re.escape(meant)}\b", caught.value.hint)
    assert not config.exists()


def test_an_edited_file_must_be_valid(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nprintf \'%s\\n\' "$TEXT" > "$1"\n')
    editor.chmod(editor.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("VISUAL", str(editor))
    monkeypatch.setenv("TEXT", 'model = "a"')
    call(["config", "edit"])
    assert read_file() == {"model": "a"}
    monkeypatch.setenv("TEXT", "modle = 1")
    with pytest.raises(UsageError, match="modle"):
        call(["config", "edit"])
    assert read_file() == {"model": "a"}


def test_a_mistake_is_edited_again_instead_of_lost(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    editor = tmp_path / "editor"
    lines = "test $(basename $1) = config.toml && if grep -q modle $1; then echo 'model = \"a\"' > $1;"
    editor.write_text(f"#!/bin/sh\n{lines} else echo 'modle = 1' > $1; fi\n")
    editor.chmod(editor.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("VISUAL", str(editor))
    for answer, read in (("n\n", {}), ("\n", {"model": "a"})):
        stderr = Terminal()
        output = Output(stdin=Terminal(answer), stderr=stderr, environment={})
        monkeypatch.setattr("llmrun.cli.config.Output", lambda output=output: output)
        call(["config", "edit"])
        assert "there is no setting 'modle'" in stderr.getvalue()
        assert (read_file() if config.exists() else {}) == read


def test_the_place_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLMRUN_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("LLMRUN_HOME", str(tmp_path / "all"))
    assert config_file() == tmp_path / "all" / "config.toml", "with the chats"
    assert config_file().parent == load_settings().state_dir
    monkeypatch.delenv("LLMRUN_HOME")
    assert config_file() == tmp_path / "llmrun" / "config.toml"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    assert config_file() == Path("~/.config/llmrun/config.toml").expanduser()


def test_a_value_goes_before_the_first_table() -> None:
    assert with_value("[serve]\nport = 1\n", "model", "a") == 'model = "a"\n\n[serve]\nport = 1\n'


def test_a_default_model_must_be_one(config: Path) -> None:
    with pytest.raises(LlmrunError, match="smolm2") as refused:
        call(["config", "set", "model", "smolm2"])
    assert "smollm2" in refused.value.hint
    assert not config.exists()
    call(["config", "set", "model", "owner/a-repository-of-the-hub"])
    assert read_file()["model"] == "owner/a-repository-of-the-hub"


def test_folders_of_models(config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (config.parents[1] / "gguf").mkdir()
    monkeypatch.chdir(config.parents[1])
    call(["config", "set", "models.folders", '["gguf", "~/gone"]'])
    gone = Path("~/gone").expanduser()
    assert f"warning: {gone} is not there" in capsys.readouterr().err
    call(["config", "set", "models.smollm2.ctx", "4096"])
    assert read_file() == {"models.folders": [str(Path("gguf").absolute()), str(gone)], "models.smollm2.ctx": 4096}
    assert model_folders() == [Path("gguf").absolute(), gone]
    assert model_aliases() == {}
    monkeypatch.setenv("LLMRUN_FOLDERS", "/other")
    assert shown(capsys)["models.folders"] == (["/other"], "environment: LLMRUN_FOLDERS")
    assert model_folders() == [Path("/other")]
    monkeypatch.delenv("LLMRUN_FOLDERS")
    call(["config", "unset", "models.folders"])
    assert read_file() == {"models.smollm2.ctx": 4096}
    assert model_folders() == []


def test_folders_beside_presets_that_are_there(config: Path) -> None:
    config.parent.mkdir()
    config.write_text("[models.a]\nalias = 'b'\nctx = 512\n")
    call(["config", "set", "models.folders", "/data"])
    assert read_file() == {"models.folders": ["/data"], "models.a.alias": "b", "models.a.ctx": 512}
    assert model_aliases() == {"b": "a"}


def test_help_of_the_commands_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        call(["config", "--help"])
    assert "e.g." not in capsys.readouterr().out


def test_the_search_server_of_the_web_tools(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, package_on_path: None
) -> None:
    assert "tools.search" not in shown(capsys)
    for wrong in ("search.example", "ftp://search.example", "https://"):
        with pytest.raises(UsageError, match=r"invalid tools\.search"):
            call(["config", "set", "tools.search", wrong])
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    options = ToolOptions(("web",), (), 600.0)
    with toolbox(options) as box:
        assert box is not None
        assert [tool.name for tool in box.tools()] == ["read_url"]
        assert "llmrun config set tools.search URL" in box.notes[0]
    with stand_in_web() as web:
        web.pages["/search"] = (200, {}, b'{"results": [{"title": "Tea", "url": "https://tea.example"}]}')
        call(["config", "set", "tools.search", web.url("/")])
        assert shown(capsys)["tools.search"] == (web.url("/"), "settings file")
        with toolbox(options) as box:
            assert box is not None
            assert [tool.name for tool in box.tools()] == ["read_url", "search_web"]
            found = box.call(ToolCall("id", "search_web", '{"query": "tea"}'))
        assert (found.text, found.failed) == ("1. Tea\nhttps://tea.example", False)
    monkeypatch.setenv("LLMRUN_SEARCH", "https://other.example")
    assert shown(capsys)["tools.search"] == ("https://other.example", "environment: LLMRUN_SEARCH")
