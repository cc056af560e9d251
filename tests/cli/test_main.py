"""The command line: what is typed, what it means, and how errors end. No model, no network."""

from __future__ import annotations

import inspect
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

from llmrun.cli.app import app, call
from llmrun.cli.commands import ALIASES, BASICS, BENCH_COMMANDS, COMMANDS, OPTION_TOPICS, PANELS
from llmrun.cli.help import EXIT_CODES, TOPICS, topic
from llmrun.cli.options import answer_options, template_text, with_options
from llmrun.cli.pages import OPTIONS, _panels, _start_page
from llmrun.cli.run import conversation, read_prompt
from llmrun.cli.sampling import SAMPLING_OPTIONS, sampling_flags, sampling_rows
from llmrun.cli.slash import SLASH_COMMANDS
from llmrun.errors import BY_CODE, UsageError
from llmrun.planning.speculation import DRAFT_BOUNDS
from llmrun.protocol.messages import Message
from llmrun.protocol.params import BOUNDS, DEFAULTS, PARAMETERS, Limits, SamplingParams
from llmrun.ui.terminal.output import Output

README = Path(__file__).parents[2] / "README.md"


def llmrun(*arguments: str, tmp_path: Path, stdin: str | None = "") -> subprocess.CompletedProcess[str]:
    """Run the command with an empty cache."""
    return subprocess.run(
        [sys.executable, "-m", "llmrun", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "LLMRUN_DEBUG": "", "COLUMNS": "80"},
        cwd=tmp_path,
    )


def test_bare_command_shows_a_start_page(tmp_path: Path) -> None:
    done = llmrun(tmp_path=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert 'llmrun run smollm2 "Why is the sky blue?"' in done.stdout


def test_the_start_page_on_a_narrow_terminal() -> None:
    rows = _start_page(40).split("\n")
    assert all(len(row) <= 40 for row in rows if not row.startswith("  llmrun"))
    assert '  llmrun run smollm2 "Why is the sky blue?"' in rows, "a command is one line, to be copied"
    assert _start_page(0) == _start_page(80) == _start_page(120)


@pytest.mark.skipif(sys.platform == "win32", reason="no signal ends a process there")
def test_ctrl_c_during_the_imports_prints_no_traceback(tmp_path: Path, package_on_path: None) -> None:
    program = """
import os, signal, sys
from llmrun.__main__ import main

class Slow:
    def find_spec(self, name, *rest):
        if name == "llmrun.cli.main":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Slow())
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_version_names_both(tmp_path: Path) -> None:
    done = llmrun("--version", tmp_path=tmp_path)
    assert re.fullmatch(r"llmrun \S+ \(llama-cpp-python 0\.3\.36\)\n", done.stdout)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("run", "smolm", "hi"), 3, "did you mean smollm2"),
        (("run", "./missing.gguf", "hi"), 3, "missing.gguf"),
        (("run", "smollm2"), 2, "there is no prompt\n  try: llmrun run MODEL"),
        (("explain", "smollm2"), 2, "there is no prompt\n  try: llmrun explain MODEL"),
        (("run", "smollm2", "hi", "--temp", "nan"), 2, "invalid --temp nan"),
        (("run", "smollm2", "hi", "--top-k", "-2"), 2, "invalid --top-k -2"),
        (("run", "smollm2", "hi", "--sampler-order", "top_k,topp"), 2, "--sampler-order: 'topp' is not a step"),
        (("run", "smollm2", "hi", "--ban", ""), 2, "invalid --ban"),
        (("run", "smollm2", "hi", "--grammar", "missing.gbnf"), 2, "--grammar missing.gbnf can't be read"),
        (("run", "smollm2", "hi", "--grammar", "/dev/null"), 7, "grammar"),
        (("run", "smollm2", "hi", "--json-schema", "{"), 7, "line 1, column 2"),
        (("run", "smollm2", "hi", "--json-schema", "{}", "--grammar", "g"), 2, "can't be used together"),
        (("run", "smollm2", "hi", "--max-tokens", "0"), 2, "invalid --max-tokens 0"),
        (("run", "smollm2", "hi", "--template", "missing.jinja"), 2, "missing.jinja"),
        (("run", "smollm2", "hi", "--logit-bias", "x"), 2, "--logit-bias 'x'"),
        (("run", "smollm2", "hi"), 5, "HF_HUB_OFFLINE"),
        (("help", "nonsense"), 2, "no help on 'nonsense'"),
        (("run", "http://example.org/x.gguf", "hi"), 2, "http"),
    ],
)
def test_errors_end_with_their_status_and_say_why(
    arguments: tuple[str, ...], status: int, words: str, tmp_path: Path
) -> None:
    done = llmrun(*arguments, tmp_path=tmp_path)
    assert done.returncode == status, done.stderr
    assert words in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    for arguments in (["--debug", "run", "smolm", "hi"], ["run", "smolm", "hi", "--debug"], ["list", "--x", "--debug"]):
        assert "Traceback" in llmrun(*arguments, tmp_path=tmp_path).stderr
    assert "Traceback" not in llmrun("run", "smolm", "--", "--debug", tmp_path=tmp_path).stderr


def test_errors_as_json(tmp_path: Path) -> None:
    done = llmrun("run", "smolm", "hi", "--json", tmp_path=tmp_path)
    assert done.stderr.startswith('{"error": {"code": "model-not-found"')


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_said(unbuffered: str, tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "llmrun"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            cwd=tmp_path,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert done.returncode == 6
    assert done.stderr == "error: the output can't be written\n  why: the disk is full\n"


def test_an_empty_cache_lists_nothing(tmp_path: Path) -> None:
    done = llmrun("list", tmp_path=tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    assert llmrun("list", "--json", tmp_path=tmp_path).stdout == "[]\n"


def test_exit_codes_are_those_of_the_errors(tmp_path: Path) -> None:
    assert {0, *(error.exit_status for error in BY_CODE.values())} == set(EXIT_CODES)
    shown = llmrun("help", "exit-codes", tmp_path=tmp_path).stdout
    assert [int(line.split()[0]) for line in shown.splitlines()] == list(EXIT_CODES)


def test_speculation_is_explained_on_a_usual_terminal(tmp_path: Path) -> None:
    lines = llmrun("help", "speculation", tmp_path=tmp_path).stdout.splitlines()
    assert max(map(len, lines)) < 80
    told = {" ".join(line.split()[:2]) for line in lines}
    modes = (f"--speculate {mode}" for mode in ("auto", "off", "N"))
    assert {"draft Tokens", "verify One", "acceptance The", *modes} <= told
    assert f"{DRAFT_BOUNDS[0]} to {DRAFT_BOUNDS[1]}" in "\n".join(lines)


def test_help_has_every_command_in_its_panel_and_the_readme_every_command(tmp_path: Path) -> None:
    text = llmrun("--help", tmp_path=tmp_path).stdout
    assert text == llmrun("help", tmp_path=tmp_path).stdout == llmrun("-h", tmp_path=tmp_path).stdout
    assert {len(line) for line in text.splitlines() if line.startswith(("│", "╭", "╰"))} == {80}
    shown = re.split(r"^╭─ (.+?) ─+╮$", text, flags=re.MULTILINE)
    panels = dict(zip(shown[1::2], shown[2::2], strict=True))
    assert list(panels) == ["Options", *PANELS]
    readme = README.read_text(encoding="utf-8")
    for name, entry in COMMANDS.items():
        if name != "help":
            assert re.search(rf"^│ {name} +\w", panels[entry.panel], re.MULTILINE), name
        assert f"llmrun {name}" in readme or f"`{name}`" in readme, name


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_all_is_what_each_says_itself(name: str) -> None:
    entry = COMMANDS[name]
    command = entry.load()
    own = command.info.help if isinstance(command, typer.Typer) else inspect.getdoc(command)
    assert entry.help == own.splitlines()[0]


def test_options_of_the_root_are_those_it_takes(tmp_path: Path) -> None:
    taken = {name for option in typer.main.get_command(app).params for name in option.opts}
    assert {name for names in OPTIONS for name in names.split(", ")} == {*taken, "--help", "-h"}


def options_of(*words: str) -> dict[str, str]:
    """Every option of a command, by its long name, and its panel."""
    root = typer.main.get_command(app)
    command: Any = root.get_command(None, words[0])  # type: ignore[attr-defined]
    for word in words[1:]:
        command = command.commands[word]
    parameters = [each for each in command.params if each.param_type_name == "option" and not each.hidden]
    return {next(name for name in each.opts if name.startswith("--")): each.rich_help_panel for each in parameters}


def listed(text: str) -> set[str]:
    """Options that a help page lists."""
    return set(re.findall(r"^│ (?:-\w+, )?(--[\w-]+)", text, re.MULTILINE))


def shown_by(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert call(arguments) == 0
    return capsys.readouterr().out


NAMES = [*([name] for name in (*COMMANDS, *BENCH_COMMANDS)), ["sessions", "search"], ["watermark", "detect"]]


@pytest.mark.parametrize("words", NAMES)
def test_help_fits_a_screen_and_all_of_it_has_every_option(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    short, full = (shown_by(capsys, *" ".join(words).split(), option) for option in ("--help", "--help-all"))
    assert len(short.splitlines()) <= 45
    options = options_of(*words)
    assert set(options) - listed(full) <= {"--help-all"}
    left_out = [name for name in options if name not in listed(short)]
    if words[0] in BASICS:
        assert f"{len(left_out)} more options: llmrun {words[0]} --help-all" in short
        assert set(BASICS[words[0]].split()) <= listed(short)
    else:
        assert (left_out, short) == (["--help-all"], full)
    assert not re.findall(r"\[default|\(default|by default", " ".join(full.split()))
    root = typer.main.get_command(app)
    command = root.get_command(typer.Context(root), words[0])  # type: ignore[attr-defined]
    texts = [text for rows in _panels(typer.Context(command), command.params).values() for text in rows.values()]
    assert not [text for text in texts if text.count("Default:") > 1], "a default is told once"


@pytest.mark.parametrize("name", OPTION_TOPICS)
def test_help_on_a_subject_lists_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, panel = OPTION_TOPICS[name]
    options = [option for option, where in options_of(command).items() if where == panel]
    text = shown_by(capsys, "help", name)
    assert options
    assert set(options) == listed(text)


def test_what_bench_does_with_earlier_results_has_a_help_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown_by(capsys, "bench", "history", "--help")
    assert "Usage: llmrun bench history " in text
    assert "--n-prompt" not in text
    assert text == shown_by(capsys, "help", "bench", "history")


@pytest.mark.parametrize("words", [[name] for name in (*COMMANDS, *ALIASES)] + [["sessions", "export"]])
def test_help_covers_every_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["help", *words]) == 0
    shown = capsys.readouterr().out
    assert f"Usage: llmrun {' '.join(words)} " in shown
    assert call([*words, "--help"]) == 0
    assert shown == capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_only_the_root_installs_completion(name: str) -> None:
    command = typer.main.get_command(app).get_command(None, name)
    for each in (command, *getattr(command, "commands", {}).values()):
        assert not [parameter.name for parameter in each.params if "completion" in parameter.name]


def test_inference_is_explained_on_two_pages_with_commands_that_exist(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = shown_by(capsys, "help", "inference")
    lines = text.splitlines()
    assert len(lines) < 2 * 40
    assert max(map(len, lines)) < 80
    for name, rest in re.findall(r"llmrun ([a-z]+)(.*)", text):
        if name != "help":
            known = shown_by(capsys, name, "--help-all")
            for option in re.findall(r"(?<= )--?[a-z][a-z-]*", rest.partition(",")[0].partition(";")[0]):
                assert re.search(rf"{option}\b", known), f"{name} {option}"
    spoken = set(re.findall(r"(?<= )/[a-z]+", text))
    assert spoken
    assert spoken <= {each.split()[0] for each in SLASH_COMMANDS}


@pytest.mark.parametrize("name", TOPICS)
def test_help_covers_every_topic(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text, _, options = shown_by(capsys, "help", name).partition("\n╭─")
    assert text == topic(name) + "\n"
    assert bool(options) == (name in OPTION_TOPICS)


def test_an_unknown_topic_is_answered_with_all(tmp_path: Path) -> None:
    said = llmrun("help", "nonsense", tmp_path=tmp_path).stderr
    assert [name for name in TOPICS if name not in said] == []


WRONG_ARGUMENTS = [
    (["nonsense"], "there is no command 'nonsense'", "", "llmrun --help shows all"),
    (["rnu", "x"], "there is no command 'rnu'", "", "did you mean run? llmrun --help shows all"),
    (["--nonsense"], "there is no option --nonsense", "", "llmrun --help"),
    (["show", "--nonsense"], "there is no option --nonsense", "", "llmrun show --help"),
    (["show"], "MODEL is missing", "", "llmrun show --help"),
    (["tune", "x", "--depth", "x"], "invalid --depth x", "must be a whole number", "llmrun tune --help"),
    (["batch", "x", ""], "invalid IN", "it is empty", "llmrun batch --help"),
    (["evaluate", ""], "'' is not the name of a model", "", "see `llmrun list --all`"),
    (["tokenize", "", "hi"], "'' is not the name of a model", "", "see `llmrun list --all`"),
    (["sessions", "rm"], "NAME... is missing", "", "llmrun sessions rm --help"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "what", "why", "hint"), WRONG_ARGUMENTS)
def test_wrong_arguments_end_as_every_error(
    arguments: list[str], what: str, why: str, hint: str, tmp_path: Path
) -> None:
    done = llmrun(*arguments, "--json", tmp_path=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert json.loads(done.stderr) == {"error": {"code": "usage", "what": what, "why": why, "hint": hint}}


@pytest.mark.parametrize(("arguments", "what", "why", "hint"), [WRONG_ARGUMENTS[0], WRONG_ARGUMENTS[5]])
def test_wrong_arguments_are_said_in_words(
    arguments: list[str], what: str, why: str, hint: str, tmp_path: Path
) -> None:
    lines = [f"error: {what}", *([f"  why: {why}"] if why else []), f"  try: {hint}"]
    assert llmrun(*arguments, tmp_path=tmp_path).stderr.splitlines() == lines


def test_an_option_without_its_value_leads_to_the_commands_help(tmp_path: Path) -> None:
    assert llmrun("run", "x", "--temp", tmp_path=tmp_path).stderr.splitlines()[-1] == "  try: llmrun run --help"


def test_every_sampling_parameter_has_a_flag() -> None:
    @with_options(flags=SAMPLING_OPTIONS)
    def command(name: str, *, flags: dict[str, Any]) -> None: ...

    names = list(inspect.signature(command).parameters)
    assert names[0] == "name"
    assert set(names[1:]) == {field.name for field in fields(SamplingParams)}


EDGES = [(name, outside) for name, (low, high) in BOUNDS.items() for outside in (low - 2, high + 1, math.nan, math.inf)]


@pytest.mark.parametrize(("name", "value"), EDGES)
def test_every_bound_is_refused_by_its_flag(name: str, value: float) -> None:
    flag = PARAMETERS[name].flag
    with pytest.raises(UsageError) as caught:
        sampling_flags(**{name: value})
    assert caught.value.what == f"invalid {flag} {value:.12g}"
    assert "between" in caught.value.why


def test_a_sampler_order_is_read_as_ours_and_as_llama_cpp_writes_it() -> None:
    expected = {"order": ("temperature", "top_k")}
    assert sampling_flags(order="temperature,top_k") == sampling_flags(order="temperature; top_k") == expected


def test_defaults_are_shown_as_the_flags_take_them() -> None:
    rows = {flag: value for flag, value, _ in sampling_rows(DEFAULTS, dict.fromkeys(PARAMETERS, "default"))}
    assert rows["--seed"] == "random"
    assert rows["--temp"] == "0.8"
    assert sampling_flags(order=rows["--sampler-order"]) == {"order": DEFAULTS.order}


def test_only_what_was_typed_is_given() -> None:
    seen: dict[str, Any] = {}

    def command(*, flags: dict[str, Any]) -> None:
        seen.update(flags)

    app = typer.Typer()
    app.command()(with_options(flags=SAMPLING_OPTIONS)(command))
    app(["--top-k", "3", "--dry-breaker", "a", "--dry-breaker", "b", "--logit-bias", "5=-inf"], standalone_mode=False)
    assert seen == {"top_k": 3, "dry_breakers": ("a", "b"), "logit_bias": ((5, -float("inf")),)}
    assert sampling_flags(top_k=None, dry_breakers=[]) == {}


def test_templates_and_limits(tmp_path: Path) -> None:
    assert template_text(None) is None
    assert template_text("chatml") == "chatml"
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages }}")
    assert template_text(str(file)) == "{{ messages }}"
    assert answer_options().request.limits.stop == ()
    assert answer_options(max_tokens=3, stop=["x"], ban=["y"]).request.limits == Limits(3, ("x",), ("y",))
    with pytest.raises(UsageError):
        answer_options(stop=[""])


def test_system_prompt_comes_first() -> None:
    assert conversation(None, "hi") == [Message("user", "hi")]
    assert conversation("be brief", "hi") == [Message("system", "be brief"), Message("user", "hi")]


@pytest.mark.parametrize(
    ("piped", "words", "prompt"),
    [
        ("", ["hello", "world"], "hello world"),
        ("a file\n", ["explain"], "a file\n\nexplain"),
        ("a file\n", [], "a file"),
        ("a file\n", ["-"], "a file"),
        ("a file\n", ["-", "explain"], "a file\n\nexplain"),
        (" \n", ["hello"], "hello"),
    ],
)
def test_prompt_of_stdin_and_words(piped: str, words: list[str], prompt: str, tmp_path: Path) -> None:
    file = tmp_path / "stdin"
    file.write_text(piped)
    with file.open() as stdin:
        assert read_prompt(Output(stdin=stdin), words) == prompt


def test_bytes_of_another_encoding_are_guessed_and_that_is_said(tmp_path: Path) -> None:
    file, stderr = tmp_path / "stdin", io.StringIO()
    file.write_bytes(b"caf\xe9")
    with file.open() as stdin:
        assert read_prompt(Output(stdin=stdin, stderr=stderr), []) == "caf\u00e9"
    assert "stdin: read as windows-1252" in stderr.getvalue()
    file.write_bytes(b"caf\0\xe9")
    with file.open() as stdin, pytest.raises(UsageError, match="it is binary, not text"):
        read_prompt(Output(stdin=stdin), [])
    file.write_text("caf\u00e9", encoding="utf-16")
    with file.open() as stdin:
        assert read_prompt(Output(stdin=stdin), []) == "caf\u00e9"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_commands_help_fits_the_terminal(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for columns in (40, 80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert call([name, "--help"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert {len(line) for line in lines if line.startswith(("│", "╭", "╰"))} == {columns}
        assert not [line for line in lines if re.search("<[a-z ]+>", line)], "Typer's own name of a type"


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["run"]])
def test_the_interpreter_has_nothing_to_collect_at_the_end(words: list[str], tmp_path: Path) -> None:
    """Its last collections would take longer than many commands themselves."""
    program = (
        "import atexit, gc, sys; atexit.register(lambda: print(len(gc.get_objects())));"
        f"sys.argv[1:] = {words}; from llmrun.__main__ import main; main()"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path), "LLMRUN_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert int(done.stdout.splitlines()[-1]) < 1000
