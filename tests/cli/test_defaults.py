"""The default model, presets, and the order flag > environment > preset > tuned > model > default."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.commands import filled
from support.gguf_writer import runnable_model, tiny_model, write
from support.served import CHAT, LiveServer

from llmrun.cli import defaults, sampling, serve, settings_file
from llmrun.cli.app import call
from llmrun.cli.completion import complete_model
from llmrun.cli.help import topic
from llmrun.errors import UsageError
from llmrun.models.registry import load_catalogue
from llmrun.planning.preferences import LoadPreferences
from llmrun.planning.tuned import TunableSettings
from llmrun.protocol.loading import Load
from llmrun.protocol.messages import AnswerRequest
from llmrun.protocol.params import resolve_sampling
from llmrun.server.pool import completed

FRONT = Path(__file__).parents[1] / "support/front.py"
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The settings file, which does not exist yet."""
    for name in [name for name in os.environ if name.startswith("LLMRUN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LLMRUN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("LLMRUN_CONFIG", str(tmp_path / "config.toml"))
    return tmp_path / "config.toml"


@pytest.fixture
def run(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package_on_path: None) -> Run:
    """run(word, ...): the command over the fake engine, which says Hello."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "tiny.gguf", tiny_model())
    path = os.environ["PYTHONPATH"] + os.pathsep + str(FRONT.parents[1])

    def make(*words: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        every = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path, **environment}
        command = [sys.executable, str(FRONT), "normal", *words]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, env=every, timeout=300)

    return make


@pytest.mark.parametrize("words", [["run", "Why is it so?"], ["run"], ["chat"], ["chat", "--session", "new"]])
def test_without_any_model_three_of_the_catalogue_are_proposed(words: list[str], config: Path) -> None:
    with pytest.raises(UsageError, match="there is no model") as caught:
        call(words)
    lines = [shlex.split(line) for line in caught.value.hint.split(" or ")]
    assert 1 <= len(lines) <= 3
    assert all(line[3:] == words[1:2] for line in lines if words == ["run", "Why is it so?"])
    assert {line[2] for line in lines} <= {
        name for name, entry in load_catalogue().entries.items() if entry.kind == "chat"
    }


def test_the_last_used_model_is_the_default(run: Run, tmp_path: Path) -> None:
    assert run("run", "./tiny.gguf", "hi").stdout == "Hello\n"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for words, stdin in ((["run", "Why is it so?"], ""), (["run"], "hi"), (["run", "-p", "hi"], ""), (["chat"], "hi")):
        done = run(*words, stdin=stdin)
        assert (done.returncode, "Hello" in done.stdout) == (0, True), (words, done.stderr)


@pytest.mark.skipif(sys.platform == "win32", reason="has no pseudo-terminals")
@pytest.mark.parametrize(("key", "end"), [("\r", "no model is chosen"), ("x1", "error: ")])
def test_one_key_chooses_a_model_where_there_is_none(key: str, end: str, config: Path, package_on_path: None) -> None:
    import pexpect

    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TERM": "xterm",
        "NO_COLOR": "1",
        "LLMRUN_PYPI": "http://127.0.0.1:9",
    }
    environment["PYTHONPATH"] += os.pathsep + str(FRONT.parents[1])
    words = [str(FRONT), "normal", "run", "Why is it so?"]
    child = pexpect.spawn(sys.executable, words, env=environment, encoding="utf-8", timeout=300, dimensions=(24, 80))
    child.expect("Which one.*] ")
    child.send(key)
    child.expect(pexpect.EOF)
    assert end in child.before
    assert "there is no model" not in child.before


def test_one_word_beside_a_text_is_the_prompt(run: Run, config: Path, tmp_path: Path) -> None:
    """Without a default model, models are proposed for this prompt; a name that is nearly a model's stays one."""
    (tmp_path / "notes.txt").write_text("Hallo")
    done = run("run", "Translate", stdin="Hallo")
    assert (done.returncode, "error: there is no model\n" in done.stderr) == (2, True), done.stderr
    assert done.stderr.rstrip().endswith(" Translate")
    config.write_text('model = "./tiny.gguf"\n')
    for words, stdin in (
        (["Translate"], "Hallo"),
        (["Summarize:", "-f", "notes.txt"], ""),
        (["-f", "notes.txt", "Übersetze"], ""),
    ):
        done = run("run", *words, stdin=stdin)
        assert (done.returncode, done.stdout) == (0, "Hello\n"), done.stderr
        assert "./tiny.gguf (settings file) answers" in done.stderr
    for name in ("smolm2", "llama9", "phi-5", "notes.gguf", "smollm2:q9", "./notes.txt"):
        assert run("run", name, stdin="Hallo").returncode in (3, 7), name


def test_the_model_of_the_settings_comes_before_the_last_used_one(config: Path) -> None:
    defaults.remember_model("used")
    assert defaults.default_model({}) == ("used", defaults.LAST_USED)
    assert defaults.default_model({"model": "named"}) == ("named", defaults.SETTINGS_FILE)


def test_the_environment_names_a_model(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRUN_MODEL", "here")
    assert defaults.default_model({"model": "named"}) == ("here", defaults.ENVIRONMENT)


def test_a_path_with_blanks_is_no_prompt(config: Path) -> None:
    assert filled("run", model="./my model.gguf")[0]["model"] == "./my model.gguf"
    assert filled("run", model="TCP/IP is what?")[0] == {"model": "", "prompt": ("TCP/IP is what?",)}


def test_flag_environment_preset_default(run: Run, config: Path) -> None:
    def origin(*flags: str, **environment: str) -> list[str]:
        told = run("run", "tiny.gguf", "hi", "--explain-sampling", *flags, **environment).stderr
        return next(line.split()[1:] for line in told.splitlines() if line.startswith("--temp "))

    assert origin() == ["0.8", "default"]
    config.write_text('[models."tiny.gguf"]\ntemp = 0.4\n')
    assert origin() == ["0.4", "preset"]
    assert origin(LLMRUN_TEMP="0.3") == ["0.3", "environment"]
    assert origin("--temp", "0.2", LLMRUN_TEMP="0.3") == ["0.2", "flag"]


@pytest.mark.parametrize(
    ("given", "others", "chosen"),
    [
        ({"kv_type_k": "f16"}, {}, "f16"),  # flag > tuned, though it is the default
        ({}, {"LLMRUN_CACHE_TYPE_K": "f16"}, "f16"),  # environment > tuned
        ({}, {"preset": "f16"}, "f16"),  # preset > tuned
        ({}, {}, "q8_0"),  # tuned > default
        ({"kv_type_k": "q8_0"}, {"LLMRUN_CACHE_TYPE_K": "f16"}, "q8_0"),  # flag > environment
        ({}, {"LLMRUN_CACHE_TYPE_K": "f16", "preset": "q8_0"}, "f16"),  # environment > preset
        ({"kv_type_k": "f16"}, {"preset": "q8_0"}, "f16"),  # flag > preset
        ({"flash_attention": "auto"}, {}, "f16"),  # it was tuned together with flash attention
    ],
)
def test_tuned_settings_come_after_the_users(
    given: dict[str, str], others: dict[str, str], chosen: str, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if preset := others.pop("preset", ""):
        config.write_text(f'[models.a]\ncache-type-k = "{preset}"\n')
    for name, value in others.items():
        monkeypatch.setenv(name, value)
    _, found, _ = filled("run", model="a", **given)
    preferences = LoadPreferences(**{**found, **given})  # type: ignore[arg-type]
    load = Load("a.gguf", 512, threads=2)
    load = replace(load, **preferences.attention)
    tuned = replace(TunableSettings.of(load), kv_type_k="q8_0", kv_type_v="q8_0", flash_attention="on")
    assert tuned.applied_within(load, preferences, without_flash=True).kv_type_k == chosen


def test_the_model_file_comes_before_defaults() -> None:
    params, origins = resolve_sampling(("flag", {}), ("model", {"temperature": 0.9}))
    assert (params.temperature, origins["temperature"], origins["top_k"]) == (0.9, "model", "default")


def test_an_alias_names_a_model_everywhere(run: Run, config: Path, tmp_path: Path) -> None:
    config.write_text(f'model = "fast"\n[models."{tmp_path}/tiny.gguf"]\nalias = "fast"\ntemp = 0.4\n')
    for words in (["run", "fast", "hi"], ["run", "Why is it so?"], ["batch", "--dry-run", "-m", "fast", "rows.txt"]):
        (tmp_path / "rows.txt").write_text("one\n")
        done = run(*words)
        assert done.returncode == 0, (words, done.stderr)
    assert "0.4" in run("run", "fast", "hi", "--explain-sampling").stderr
    assert "tiny" in run("show", "fast").stdout
    assert defaults.default_model({})[0].endswith("tiny.gguf"), "the last used model is not an alias"
    assert "fast" in complete_model("fa")


def test_presets_of_other_commands(config: Path) -> None:
    config.write_text('[models.a]\nctx = 512\nsystem = "x"\ncache-type-k = "q8_0"\ntemp = 0.5\n')
    for command in ("explain", "batch", "embed", "score"):
        assert filled(command, model="a")[1] == {"n_ctx": 512, "system": "x", "kv_type_k": "q8_0", "temperature": 0.5}
    found = defaults.with_preset("a", LoadPreferences(threads=3))
    assert found == LoadPreferences(n_ctx=512, threads=3, kv_type_k="q8_0")


def test_presets_say_how_a_model_is_loaded(config: Path) -> None:
    config.write_text(
        '[models.a]\nthreads = 3\ngpu-layers = -1\ncache-type-v = "q8_0"\n[presets.quick]\nmodel = "a"\nthreads = 2\n'
    )
    assert filled("chat", model="a")[1] == {"threads": 3, "gpu_layers": -1, "kv_type_v": "q8_0"}
    assert filled("chat", preset="quick", model=None)[1] == {"threads": 2, "gpu_layers": -1, "kv_type_v": "q8_0"}
    served, whole = serve.served_defaults()("a"), LoadPreferences(threads=3, gpu_layers=-1, kv_type_v="q8_0")
    assert LoadPreferences().completed(served) == defaults.with_preset("a", LoadPreferences()) == whole
    typed = LoadPreferences(threads=1, gpu_layers=0)
    assert defaults.with_preset("a", typed) == typed.completed(served) == replace(whole, threads=1, gpu_layers=0)


def test_every_command_with_presets_reads_the_settings(run: Run, config: Path) -> None:
    config.write_text('[models."tiny.gguf"]\nctx = 5\n')
    for words in (["explain", "tiny.gguf", "a"], ["batch", "tiny.gguf", "rows.txt"], ["embed", "tiny.gguf", "a"],
                  ["score", "tiny.gguf", "a"], ["rerank", "tiny.gguf", "a", "b"]):  # fmt: skip
        done = run(*words)
        assert (done.returncode, "--ctx 5" in done.stderr or "invalid" in done.stderr) == (2, True), done.stderr


def test_a_preset_comes_before_the_model_file() -> None:
    params, origins = resolve_sampling(("flag", {"temperature": 0.4}), ("model", {"temperature": 0.9}))
    rows = sampling.sampling_rows(params, origins, {"temperature": "preset"})
    row = next(row for row in rows if row[0] == "--temp")
    assert row == ("--temp", "0.4", "preset")


def test_a_preset_is_of_every_quant_unless_one_has_its_own(config: Path) -> None:
    config.write_text('[models.a]\nctx = 512\nsystem = "x"\n[models."a:q8_0"]\nctx = 1024\n')
    assert filled("chat", model="a")[1] == {"n_ctx": 512, "system": "x"}
    assert filled("run", model="a:q4_0")[1] == {"n_ctx": 512, "system": "x"}
    assert filled("run", model="a:q8_0")[1] == {"n_ctx": 1024, "system": "x"}
    assert filled("run", model="b")[1] == {}


def test_a_remote_server_gets_no_options_of_loading(config: Path) -> None:
    config.write_text('[models.a]\nctx = 512\ncache-type-k = "q8_0"\ntemp = 0.5\n')
    assert filled("run", model="a", at="http://127.0.0.1:1")[1] == {"temperature": 0.5}
    assert filled("run", model="Why is it so?", at="http://127.0.0.1:1")[0]["model"] == "default"


def test_options_of_the_server(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text("[serve]\nport = 81\nparallel = 2\n[models.a]\nctx = 512\n")
    monkeypatch.setenv("LLMRUN_PORT", "82")
    assert filled("serve", models=("a", "b"))[1] == {"port": 82, "parallel": 2}
    assert filled("serve", models=("a",), parent=1)[1] == {}, "of `llmrun launch`"


@pytest.fixture
def ask_served(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """ask_served(model, path, **fields): the settings that an engine was asked with, by a server of two models."""
    names = [str(write(tmp_path / f"{name}.gguf", runnable_model())) for name in ("a", "b")]
    config.write_text(
        f"[models.{json.dumps(names[0])}]\nalias = 'fast'\nsystem = 'Be brief.'\n"
        "max-tokens = 9\ntemp = 0.25\nctx = 512\n"
        f"[models.{json.dumps(names[1])}]\nsystem = 'Be long.'\ncache-type-k = 'q8_0'\n"
    )
    options = {"names": (*names,), "aliases": {"fast": names[0]}, "n_ctx": None}
    with LiveServer(tmp_path, ("reporting",), defaults=serve.served_defaults(), **options) as server:

        def ask(model: str, path: str = CHAT, **fields: Any) -> Any:
            answer = server.post(path, {"model": model, "messages": [{"role": "user", "content": "Hi"}], **fields}).json
            return json.loads(
                answer["choices"][0]["message"]["content"] if "choices" in answer else answer["message"]["content"]
            )

        yield ask


def test_a_server_applies_the_preset_of_each_model(ask_served: Callable[..., Any], tmp_path: Path) -> None:
    first, second = str(tmp_path / "a.gguf"), str(tmp_path / "b.gguf")
    found = ask_served(first)
    assert found == ask_served("fast") == ask_served(first, "/api/chat", stream=False)
    assert found | {"cache": 0} == {
        "system": ["Be brief."],
        "max_tokens": 9,
        "temperature": 0.25,
        "ctx": 512,
        "cache": 0,
    }
    other = ask_served(second)
    assert (other["system"], other["max_tokens"], other["cache"][0]) == (["Be long."], None, "q8_0")
    assert other["temperature"] != 0.25
    assert other["ctx"] != 512


def test_a_request_comes_before_the_preset(ask_served: Callable[..., Any], tmp_path: Path) -> None:
    said = [{"role": "system", "content": "Be odd."}, {"role": "user", "content": "Hi"}]
    found = ask_served(str(tmp_path / "a.gguf"), messages=said, max_tokens=3, temperature=1.5)
    assert (found["system"], found["max_tokens"], found["temperature"]) == (["Be odd."], 3, 1.5)


def test_earlier_reasoning_flag_request_preset(config: Path) -> None:
    config.write_text("[models.a]\nkeep-reasoning = false\n")
    assert filled("run", model="a")[1]["keep_reasoning"] is False
    server, keeping = serve.served_defaults(), serve.served_defaults({"keep_reasoning": True})
    asked = AnswerRequest(prompt="Hi")
    assert completed(asked, server("a")).keep_reasoning is False
    assert completed(asked, server("b")).keep_reasoning is None
    assert completed(replace(asked, keep_reasoning=True), server("a")).keep_reasoning is True
    assert completed(asked, keeping("a")).keep_reasoning is True
    config.write_text("[models.a]\nkeep-reasoning = 'maybe'\n")
    with pytest.raises(UsageError, match="must be true or false"):
        filled("run", model="a")


def test_a_flag_and_the_environment_come_before_the_preset_of_a_served_model(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text("[models.a]\ntemp = 0.25\nctx = 512\n")
    monkeypatch.setenv("LLMRUN_TEMP", "0.75")
    monkeypatch.setenv("LLMRUN_CTX", "1024")
    found = serve.served_defaults()
    assert found("a") == found("b") == {"temperature": (0.75, "environment"), "n_ctx": (1024, "environment")}
    assert LoadPreferences(n_ctx=256).completed(found("a")) == LoadPreferences(n_ctx=256)
    assert LoadPreferences().completed(found("a")) == LoadPreferences(n_ctx=1024)
    monkeypatch.setenv("LLMRUN_TEMP", "hot")
    with pytest.raises(UsageError, match="LLMRUN_TEMP"):
        serve.served_defaults()


def test_help_needs_no_sound_settings_file(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text("][")
    call(["run", "--help"])
    assert "Usage:" in capsys.readouterr().out
    with pytest.raises(UsageError, match="not TOML"):
        call(["run", "a", "hi"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("modle = 'a'", "there is no setting 'modle'"),
        ("[serve]\nport = 'x'", r"invalid serve\.port in .*: x"),
        ("[serve]\nport = -1", r"invalid serve\.port"),
        ("[models.a]\ntemp = -1", r"invalid models\.a\.temp"),
        ("[models.a]\ncache-type-k = 'q9'", r"invalid models\.a\.cache-type-k"),
        ("[models.a]\nctx = [1]", r"invalid models\.a\.ctx"),
        ("[models.a]\nctx = -1", r"invalid models\.a\.ctx"),
        ("[models.a]\nthreads = 0", r"invalid models\.a\.threads"),
        ("[models.a]\ngpu-layers = -2", r"invalid models\.a\.gpu-layers"),
        ("[models]\nctx = 1", r"there is no setting 'models\.ctx'"),
        ("[serve.more]\nport = 1", "there is no setting"),
        ("[models.a]\nalias = 'a b'", r"invalid models\.a\.alias"),
        ("[models.a]\nalias = 'x'\n[models.b]\nalias = 'x'", "two models have the alias x"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(text: str, words: str, config: Path) -> None:
    config.write_text(text)
    with pytest.raises(UsageError, match=words):
        settings_file.read_file()


def test_a_variable_is_named_in_its_error(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRUN_CTX", "many")
    with pytest.raises(UsageError, match="invalid LLMRUN_CTX many"):
        filled("run", model="a")


def test_every_key_is_an_option_of_its_commands() -> None:
    import typer

    from llmrun.cli.app import RootCommand

    root = RootCommand(name="llmrun")
    for command, keys in (
        ("run", settings_file.PRESET),
        ("chat", settings_file.PRESET),
        ("serve", settings_file.SERVE),
        *((name, settings_file.LOADING) for name in ("batch", "explain")),
        *((name, {"ctx": settings_file.LOADING["ctx"]}) for name in ("embed", "rerank", "score")),
    ):
        options = {each.name: each.opts for each in root.get_command(typer.Context(root), command).params}
        for name, key in keys.items():
            assert f"--{name}" in options[key.parameter]


def test_the_help_has_the_order_as_a_table() -> None:
    order = topic("settings").partition("Order")[2].partition("\n\n")[0]
    assert [line.split()[1] for line in order.splitlines()] == [
        "flag",
        "--preset",
        "environment",
        "preset",
        "tuned",
        "model",
        "default",
    ]
    assert all(name in topic("settings") for name in settings_file.SERVE)


def test_flat_keys_of_names_with_dots(config: Path) -> None:
    config.write_text('model = "qwen3-0.6b"\n[models."qwen3-0.6b"]\nctx = 1024\ntemp = 1\n')
    found = settings_file.read_file()
    assert found == {"model": "qwen3-0.6b", "models.qwen3-0.6b.ctx": 1024, "models.qwen3-0.6b.temp": 1.0}
    assert json.dumps(found)


def test_a_preset_yields_to_what_was_typed(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text('[models.a]\ntemp = 0.0\nmirostat = 2\nrepeat-penalty = 1.5\ncache-type-v = "q8_0"\n')
    monkeypatch.setenv("LLMRUN_TOP_K", "5")
    plain = {"temperature": 0.0, "mirostat": 2, "repeat_penalty": 1.5, "kv_type_v": "q8_0", "top_k": 5}
    assert filled("run", model="a")[1] == plain

    def without(*names: str) -> dict[str, Any]:
        return {name: value for name, value in plain.items() if name not in names}

    assert filled("run", model="a", beams=2)[1] == without("temperature", "mirostat", "top_k")
    assert filled("run", model="a", watermark="green:2")[1] == without("mirostat")
    assert filled("run", model="a", flash_attention="off")[1] == without("kv_type_v")


def test_beams_with_a_preset_is_no_conflict(run: Run, config: Path) -> None:
    config.write_text('[models."tiny.gguf"]\ntemp = 0.5\n')
    assert "can't be used together" not in run("run", "tiny.gguf", "hi", "--beams", "2").stderr
    assert (
        "--beams and --top-k can't be used together"
        in run("run", "tiny.gguf", "hi", "--beams", "2", "--top-k", "3").stderr
    )
