"""`llmrun launch`: the settings of each agent, and errors. tests/model/test_real_launch.py starts one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tomllib

from llmrun.cli import launch
from llmrun.cli.agent_window import ModelWindow
from llmrun.cli.agents import AGENTS, AgentSettings, Endpoint
from llmrun.cli.app import call
from llmrun.cli.launch import Target, _print
from llmrun.config import load_settings
from llmrun.errors import LlmrunError, UsageError
from llmrun.planning.preferences import LoadPreferences
from llmrun.server.registry import RunningServer, registered
from llmrun.ui.terminal.output import Output

SERVER = Endpoint("http://127.0.0.1:8080", "", "owner/model:Q4_0", 65_536)


def settings(name: str, server: Endpoint = SERVER, folder: str = "FOLDER", described: str = "") -> AgentSettings:
    return AGENTS[name].settings(server, folder, described)


def codex_config(found: AgentSettings) -> dict[str, object]:
    """The TOML that `codex -c NAME=VALUE ...` means."""
    assert found.arguments[::2] == ("-c",) * (len(found.arguments) // 2)
    return tomllib.loads("\n".join(found.arguments[1::2]))


def test_claude_code_has_one_model_in_all_tiers() -> None:
    variables = settings("claude").environment
    models = {name: value for name, value in variables.items() if name.endswith("_MODEL")}
    assert len(models) == 7
    assert set(models.values()) == {SERVER.model}
    assert variables["ANTHROPIC_BASE_URL"] == SERVER.address
    assert variables["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    assert "CLAUDE_CODE_AUTO_COMPACT_WINDOW" not in variables  # below 100k it only warns


def test_codex() -> None:
    found = settings("codex")
    assert codex_config(found) == {
        "model": SERVER.model,
        "model_provider": "llmrun",
        "model_context_window": 65_536,
        "model_auto_compact_token_limit": 49_152,
        "model_providers": {
            "llmrun": {
                "name": "llmrun",
                "base_url": "http://127.0.0.1:8080/v1",
                "wire_api": "responses",
                "env_key": "LLMRUN_AGENT_KEY",
            }
        },
    }
    assert found.environment["LLMRUN_AGENT_KEY"]


def test_codex_gets_a_catalog_made_of_its_own_one() -> None:
    """An entry that lacks a field of Codex's version, or has one that it does not know, could end it."""
    own = {
        "models": [
            {"slug": "gpt-9", "tool_mode": "code_mode_only", "base_instructions": "Code!"},
            {
                "slug": "gpt-5", "base_instructions": "Help!", "context_window": 9, "input_modalities": ["text"],
                "supported_reasoning_levels": [], "shell_type": "unified_exec", "apply_patch_tool_type": None,
                "upgrade": {"model": "gpt-9"},
            },
        ]
    }  # fmt: skip
    found = settings("codex", SERVER._replace(thinks=True), described=json.dumps(own))
    assert codex_config(found)["model_catalog_json"] == "FOLDER/codex-models.json"
    [entry] = json.loads(found.files["codex-models.json"])["models"]
    assert entry.keys() == own["models"][1].keys()
    assert (entry["slug"], entry["context_window"], entry["base_instructions"]) == (SERVER.model, 65_536, "Help!")
    assert (entry["input_modalities"], entry["apply_patch_tool_type"], entry["upgrade"]) == (["text"], "freeform", None)
    assert [each["effort"] for each in entry["supported_reasoning_levels"]] == ["low", "medium", "high"]
    for strange in ("", "[]", "{}", '{"models": [1]}', json.dumps({"models": own["models"][:1]})):
        assert "model_catalog_json" not in codex_config(settings("codex", described=strange))


@pytest.mark.parametrize(
    ("n_ctx", "longest"), [(16_384, 4096), (49_152, 4096), (65_536, 4096), (131_072, 8192), (1_048_576, 32_000)]
)
def test_claude_code_leaves_room_for_the_conversation(n_ctx: int, longest: int) -> None:
    found = settings("claude", SERVER._replace(n_ctx=n_ctx)).environment
    assert found["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == str(longest)


@pytest.mark.parametrize(("n_ctx", "told"), [(49_152, 69_864), (65_536, 82_152), (262_144, 262_144)])
def test_qwen_code_is_told_a_window_in_which_it_summarizes_late(n_ctx: int, told: int) -> None:
    """It does so when 33,000 tokens are left, or 15 %: three quarters of the real window are in use then, or more."""
    found = settings("qwen", SERVER._replace(n_ctx=n_ctx))
    assert found.environment["QWEN_CODE_SYSTEM_DEFAULTS_PATH"] == "FOLDER/qwen-defaults.json"
    defaults = json.loads(found.files["qwen-defaults.json"])
    assert defaults["model"]["generationConfig"]["contextWindowSize"] == told
    assert n_ctx * 3 // 4 <= min(told - 33_000, told * 0.85) <= n_ctx * 0.88


@pytest.mark.parametrize(
    ("n_ctx", "tokens", "characters"), [(49_152, 6144, 18_432), (65_536, 8192, 24_576), (262_144, 25_000, 30_000)]
)
def test_a_result_takes_an_eighth_of_claude_codes_window(n_ctx: int, tokens: int, characters: int) -> None:
    found = settings("claude", SERVER._replace(n_ctx=n_ctx)).environment
    assert found["CLAUDE_CODE_FILE_READ_MAX_OUTPUT_TOKENS"] == found["MAX_MCP_OUTPUT_TOKENS"] == str(tokens)
    assert found["BASH_MAX_OUTPUT_LENGTH"] == str(characters)


@pytest.mark.parametrize("n_ctx", [32_768, 49_152, 65_536, 131_072, 262_144])
def test_claude_code_summarizes_when_one_more_result_and_the_summary_still_fit(n_ctx: int) -> None:
    """It does so when the longest answer and 13,000 tokens are left of the window that it is told."""
    found = settings("claude", SERVER._replace(n_ctx=n_ctx)).environment
    told, answer, result = (
        int(found[f"CLAUDE_CODE_{name}"])
        for name in ("MAX_CONTEXT_TOKENS", "MAX_OUTPUT_TOKENS", "FILE_READ_MAX_OUTPUT_TOKENS")
    )
    fill = told - answer - 13_000
    assert fill + result + 1500 + answer == n_ctx
    assert fill >= n_ctx * 0.7
    assert ("CLAUDE_CODE_DISABLE_WORKFLOWS" in found) == (n_ctx < 131_072)


def test_a_name_with_quotes_stays_one_value() -> None:
    assert codex_config(settings("codex", SERVER._replace(model='a"b\\c')))["model"] == 'a"b\\c'


def test_opencode() -> None:
    config = json.loads(settings("opencode").environment["OPENCODE_CONFIG_CONTENT"])
    provider = config["provider"]["llmrun"]
    assert config["model"] == config["small_model"] == f"llmrun/{SERVER.model}"
    assert provider["options"]["baseURL"] == "http://127.0.0.1:8080/v1"
    assert provider["models"][SERVER.model]["limit"]["context"] == 65_536


FILES = [
    ("aider", "model-metadata.json"), ("crush", "crush.json"), ("continue", "continue.yaml"), ("cline", "cline.json"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "file"), FILES)
def test_files_lie_in_the_temporary_folder(name: str, file: str) -> None:
    found = settings(name)
    assert list(found.files) == [file]
    assert "65536" in found.files[file]
    assert any("FOLDER" in word for word in (*found.arguments, *found.environment.values()))


def test_aider_keeps_a_quarter_of_the_window_of_earlier_edits() -> None:
    arguments = settings("aider").arguments
    assert arguments[arguments.index("--max-chat-history-tokens") + 1] == str(SERVER.n_ctx // 4)


def test_crush_finds_its_settings_where_it_keeps_the_chosen_models() -> None:
    """Those in its data folder come before those in its configuration."""
    assert settings("crush").environment["CRUSH_GLOBAL_DATA"] == "FOLDER"


def test_continue() -> None:
    found = settings("continue")
    [model] = json.loads(found.files["continue.yaml"])["models"]
    assert found.arguments == ("--config", "FOLDER/continue.yaml")
    assert (model["model"], model["apiBase"]) == (SERVER.model, "http://127.0.0.1:8080/v1")
    assert model["apiKey"] == "${{ secrets.LLMRUN_AGENT_KEY }}"
    # It leaves twice as many tokens free, and a fifth of the rest at least: 70 % of the window are in use before.
    assert model["defaultCompletionOptions"] == {"contextLength": 65_536, "maxTokens": 8192}
    assert found.environment["LLMRUN_AGENT_KEY"]


def test_copilot_keeps_room_for_the_answer() -> None:
    variables = settings("copilot").environment
    assert (variables["COPILOT_MODEL"], variables["COPILOT_OFFLINE"]) == (SERVER.model, "true")
    assert variables["COPILOT_PROVIDER_BASE_URL"] == "http://127.0.0.1:8080/v1"
    limits = (variables["COPILOT_PROVIDER_MAX_PROMPT_TOKENS"], variables["COPILOT_PROVIDER_MAX_OUTPUT_TOKENS"])
    assert limits == ("57344", "8192")


def test_goose() -> None:
    variables = settings("goose").environment
    assert (variables["OPENAI_HOST"], variables["GOOSE_MODEL"]) == (SERVER.address, SERVER.model)
    assert variables["GOOSE_CONTEXT_LIMIT"] == "65536"


@pytest.mark.parametrize("name", AGENTS)
def test_a_key_is_in_the_environment_alone(name: str) -> None:
    found = settings(name, SERVER._replace(key="sesame"))
    assert "sesame" in "".join(found.environment.values())
    assert "sesame" not in "".join((*found.arguments, *found.files.values()))


@pytest.mark.parametrize("name", AGENTS)
def test_an_unknown_window_is_not_named(name: str) -> None:
    found = settings(name, SERVER._replace(n_ctx=0))
    values = (*found.environment.values(), *found.arguments, *found.files.values())
    assert not any("context" in value.lower() and "window" in value.lower() for value in values)


def test_no_agent_lists_them(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert call(["launch"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown and agent.install in shown for name, agent in AGENTS.items())


@pytest.mark.parametrize(
    ("model", "is_weak"),
    [
        ("qwen2.5-coder-7b:Q8_0", True),
        ("bartowski/Qwen2.5-Coder-7B-Instruct-GGUF:Q6_K", True),
        ("qwen3-8b", False),
        ("far/away", False),
    ],
)
def test_a_model_that_is_weak_as_an_agent_is_warned_about(
    capsys: pytest.CaptureFixture[str], model: str, is_weak: bool
) -> None:
    launch._check(Output(), "claude", Target(SERVER._replace(model=model)), LoadPreferences(), any_window=False)
    assert ("weak as a coding agent" in capsys.readouterr().err) is is_weak


def test_an_unknown_agent_has_a_hint() -> None:
    with pytest.raises(UsageError, match="there is no agent 'claud'") as caught:
        call(["launch", "claud"])
    assert "claude" in caught.value.hint


def test_an_agent_that_is_missing_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match="Codex is not installed") as caught:
        call(["launch", "codex", "smollm2"])
    assert caught.value.hint == "npm install -g @openai/codex"


def test_print_starts_nothing(home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert call(["launch", "codex", "owner/model", "--print", "--ctx", "70000", "--", "exec", "two words"]) == 0
    shown = capsys.readouterr().out
    assert "export LLMRUN_AGENT_KEY=llmrun" in shown
    assert "model_context_window=70000" in shown
    assert shown.rstrip().endswith("exec 'two words'")


@pytest.mark.parametrize("name", AGENTS)
def test_the_printed_script_hides_the_key_and_does_what_a_start_does(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    agent, key = AGENTS[name], "s3cret-`key`$1"
    monkeypatch.setattr(launch, "_described", lambda _: "")  # Codex may be installed
    server = Endpoint("http://big-box:8080", key, "owner/model", 70_000)
    _print(Output(), agent, Target(server), ["two words", "$HOME `x`"])
    script = capsys.readouterr().out
    assert key not in script
    for home in tmp_path / "a", tmp_path / "b":  # each run has a private folder of its own
        (home / "bin").mkdir(parents=True)
        program = home / "bin" / agent.executable
        program.write_text(
            f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([dict(os.environ), sys.argv[1:]]))\n"
        )
        program.chmod(0o700)
        environment = {"PATH": f"{home / 'bin'}:{os.environ['PATH']}", "TMPDIR": str(home), "LLMRUN_SERVER_KEY": key}
        ran = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True, check=True)
        seen, arguments = json.loads(ran.stdout)
        folders = [path for path in home.iterdir() if path.name != "bin"]
        folder = folders[0] if folders else home
        settings = agent.settings(server, str(folder), "")
        assert {name: seen[name] for name in settings.environment} == settings.environment
        assert arguments == [*settings.arguments, "two words", "$HOME `x`"]
        assert {path.name for path in folder.iterdir()} == set(settings.files) or not settings.files
        for file, text in settings.files.items():
            assert comparable((folder / file).read_text()) == comparable(text)
        assert not folders or folder.stat().st_mode & 0o077 == 0
    without = subprocess.run(["sh", "-c", script], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    assert without.returncode
    assert "must be the key of http://big-box:8080" in without.stderr


def comparable(text: str) -> object:
    """Return the value of JSON, whose indentation may differ, and any other text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


@pytest.mark.parametrize(("n_ctx", "told"), [(32_768, 49_152), (65_536, 65_536)])
def test_pi_keeps_the_users_settings_and_does_not_summarize_at_each_step(n_ctx: int, told: int) -> None:
    found = settings("pi", SERVER._replace(n_ctx=n_ctx))
    assert "PI_CODING_AGENT_DIR" not in found.environment
    assert found.arguments[:2] == ("--extension", "FOLDER/llmrun.js")
    assert f'"contextWindow": {told}' in found.files["llmrun.js"]


def test_print_as_json(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["launch", "crush", "owner/model", "--print", "--json", "--ctx", "70000"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["command"] == ["crush"]
    assert json.loads(shown["files"]["crush.json"])["models"]["large"]["model"] == "owner/model"


def test_a_window_that_is_too_small_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started = list[Target]()
    monkeypatch.setenv("PATH", str(executable_in(tmp_path, "claude")))
    monkeypatch.setattr(launch, "_running", lambda *_: None)
    monkeypatch.setattr(launch, "find_model", lambda *_, **__: None)
    monkeypatch.setattr(launch, "window_of", lambda name, _: ModelWindow(name, 32_768, 8))
    monkeypatch.setattr(launch, "refusal", lambda *_, **__: UsageError("too small"))
    monkeypatch.setattr(launch, "_serving", lambda output, target, folder: serving(started, target))
    with pytest.raises(UsageError, match="too small"):
        call(["launch", "claude", "owner/model"])
    assert not started
    assert call(["launch", "claude", "owner/model", "--any-window"]) == 0
    assert [target.start for target in started] == [("serve", "owner/model", "--ctx", "32768")]


def executable_in(folder: Path, name: str) -> Path:
    """Write a program that does nothing; return its folder."""
    program = folder / name
    program.write_text("#!/bin/sh\n")
    program.chmod(0o700)
    return folder


@contextmanager
def serving(started: list[Target], target: Target) -> Iterator[Endpoint]:
    started.append(target)
    yield target.server


def test_the_start_of_a_server_has_what_its_window_was_planned_with() -> None:
    preferences = LoadPreferences(kv_type_k="q8_0", kv_type_v="q8_0")
    planned = launch._planned(ModelWindow("m", 70_656, 2), preferences)
    wanted = ("serve", "m", "--ctx", "70656", "--parallel", "2", "-ctk", "q8_0", "-ctv", "q8_0")
    assert (planned.start, planned.is_running) == (wanted, False)


def test_a_running_server_is_found_by_the_models_file(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A server calls it by the file's name, the user by a path; --ctx takes any server whose window is as large."""
    monkeypatch.setattr(launch, "_endpoint", lambda server, name: SERVER._replace(model=name))
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF")
    address = "http://127.0.0.1:8123"
    with registered(load_settings().state_dir, address) as entry:
        assert entry is not None
        entry.write(RunningServer(os.getpid(), address, 8123, 0.0, ("a", "tiny"), files=("/a.gguf", str(file))))
        found = launch._running(str(file), LoadPreferences())
        assert found is not None
        assert (found.server.model, found.port, found.is_running) == ("tiny", 8123, True)
        assert launch._running(str(tmp_path / "other.gguf"), LoadPreferences()) is None
        smaller = launch._running("tiny", LoadPreferences(n_ctx=50_000))
        assert smaller is not None
        assert smaller.server.n_ctx == 50_000
        assert launch._running("tiny", LoadPreferences(n_ctx=70_000)) is None


def test_print_says_whether_a_server_runs_and_the_window_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    for target, words in (
        (Target(SERVER), "65,536 tokens, enough"),
        (Target(SERVER._replace(n_ctx=32_768)), "32,768 tokens, too small"),
        (
            Target(SERVER, is_running=False, start=("serve", "m")),
            "# No running server has this model with this window. To start one:\n#   llmrun serve m\n",
        ),
        (Target(SERVER, is_running=False), "# This server does not answer now."),
    ):
        _print(Output(), AGENTS["claude"], target, [])
        shown = capsys.readouterr().out
        assert words in shown
        assert ("No running server" in shown) == bool(target.start)
    _print(Output(json=True), AGENTS["claude"], Target(SERVER, is_running=False, start=("serve", "m")), [])
    facts = json.loads(capsys.readouterr().out)
    assert (facts["is_running"], facts["start"], facts["n_ctx"]) == (False, ["llmrun", "serve", "m"], 65_536)
    assert (facts["first_prompt"], facts["smallest_window"], facts["fits"]) == (11_100, 49_152, True)


def test_the_list_says_which_agents_fit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_expected", lambda *_: Target(SERVER._replace(n_ctx=32_768)))
    assert call(["launch", "--json"]) == 0
    facts = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert (facts["pi"]["fits"], facts["qwen"]["fits"], facts["crush"]["fits"]) == (True, False, None)
    windows = [each["smallest_window"] for each in facts.values() if each["smallest_window"]]
    assert windows == sorted(windows)
    for n_ctx, is_told in ((32_768, False), (8192, True)):
        monkeypatch.setattr(launch, "_expected", lambda *_, n_ctx=n_ctx: Target(SERVER._replace(n_ctx=n_ctx)))
        assert call(["launch"]) == 0
        assert ("llmrun show MODEL" in capsys.readouterr().err) == is_told
    monkeypatch.setattr(launch, "_expected", no_model)
    assert call(["launch"]) == 0
    assert "FITS:" not in capsys.readouterr().err


def test_print_says_how_a_window_that_is_refused_gets_larger(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Target(SERVER._replace(n_ctx=8192), port=8080)
    monkeypatch.setattr(launch, "_expected", lambda *_: small)
    assert call(["launch", "claude", "--print"]) == 0
    shown = capsys.readouterr()
    assert "llmrun launch refuses this window: llmrun stop --port 8080" in shown.err
    assert "llmrun stop" not in shown.out
    assert call(["launch", "claude", "--print", "--any-window"]) == 0
    assert "refuses" not in capsys.readouterr().err


def no_model(*_: object) -> Target:
    raise LlmrunError("there is none")
