"""`llmrun run` in pipes, with the real model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.installed import WITHOUT_END, Installed
from support.plain_llama import assert_greedy, smollm2_prompt

QUESTION = "Why is the sky blue?"


def text_of(events: list[dict[str, object]]) -> str:
    return "".join(str(event["text"]) for event in events if event["event"] == "TextDelta")


def test_the_answer_alone_goes_to_stdout_and_is_the_text_of_the_events(llmrun: Installed, model_path: Path) -> None:
    options = ("--temp", "0", "--max-tokens", "32", QUESTION)
    events = llmrun.events(*options)
    assert llmrun.answer(*options) == text_of(events)
    assert_greedy(model_path, (smollm2_prompt(QUESTION), text_of(events)))


def test_events_are_one_json_object_a_line_in_their_order(llmrun: Installed) -> None:
    events = llmrun.events("--temp", "0", "--max-tokens", "7", *WITHOUT_END, QUESTION)
    kinds = [event["event"] for event in events]
    assert (kinds[0], kinds[-1]) == ("Started", "Finished")
    assert set(kinds[1:-1]) == {"PrefillProgress", "TextDelta"}
    assert sum(int(event["tokens"]) for event in events if event["event"] == "TextDelta") == 7
    finished = events[-1]
    assert finished["reason"] == "length"
    assert finished["stats"]["completion_tokens"] == 7
    assert finished["stats"]["prompt_tokens"] == events[0]["prompt_tokens"]
    assert finished["stats"]["seed"] == events[0]["seed"]


def test_a_long_prompt_is_prefilled_in_pieces_that_are_told(llmrun: Installed) -> None:
    events = llmrun.events("--temp", "0", "--max-tokens", "1", "-", stdin="word " * 700)
    kinds = [event["event"] for event in events]
    assert kinds[:2] == ["Started", "PrefillProgress"]
    assert kinds[-1] == "Finished"


def test_stdin_alone_a_dash_and_stdin_before_the_prompt(llmrun: Installed) -> None:
    options = ("--temp", "0", "--max-tokens", "8")
    whole = llmrun.answer(*options, "The sky.\n\nWhat colour?")
    assert llmrun.answer(*options, "What colour?", stdin="The sky.\n") == whole
    assert llmrun.answer(*options, stdin="The sky.\n\nWhat colour?\n") == whole
    assert llmrun.answer(*options, "-", stdin="The sky.\n\nWhat colour?\n") == whole


def test_a_shell_pipe_leaves_the_answer_only_in_the_file(llmrun: Installed, tmp_path: Path) -> None:
    done = llmrun.shell(f"cd {tmp_path} && echo hi | $llmrun run smollm2 --temp 0 > out && cat out")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode() == llmrun.answer("--temp", "0", "hi") + "\n"
    assert b"\x1b" not in done.stdout


def test_system_prompt_template_and_raw_change_the_prompt(llmrun: Installed) -> None:
    def prompt_tokens(*options: str) -> int:
        return int(llmrun.events(*options, "--temp", "0", "--max-tokens", "1", "hi")[0]["prompt_tokens"])

    # SmolLM2's own template adds a system prompt where there is none, the plain ChatML one does not.
    own, system, chatml, raw = (
        prompt_tokens(),
        prompt_tokens("--system", "Be brief."),
        prompt_tokens("--template", "chatml"),
        prompt_tokens("--raw"),
    )
    assert raw == 1
    assert raw < chatml < system < own


def test_raw_continues_the_text(llmrun: Installed, model_path: Path) -> None:
    text = llmrun.answer("--raw", "--temp", "0", "--max-tokens", "8", *WITHOUT_END, "One, two, three, four,")
    assert_greedy(model_path, ("One, two, three, four,", text), ends=False)


def test_a_reader_that_leaves_is_no_error(llmrun: Installed) -> None:
    done = llmrun.shell("$llmrun run smollm2 --temp 0 'Tell me a long story.' | head -c 5; echo ${PIPESTATUS[0]}")
    assert done.stderr == b""
    assert done.stdout[5:] == b"0\n"


@pytest.mark.parametrize("redirection", ["<&-", ">&-", "2>&-", "<&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_do_no_harm(llmrun: Installed, redirection: str) -> None:
    done = llmrun.shell(f"$llmrun run smollm2 --temp 0 --max-tokens 4 'Say hi.' {redirection}")
    assert (done.returncode, done.stderr) == (0, b"")
    assert bool(done.stdout) == (">&-" not in redirection.split())


def test_a_locale_without_unicode_gives_question_marks_and_no_traceback(llmrun: Installed) -> None:
    options, text = ("run", "smollm2", "--raw", "--temp", "0", "-n", "12", "-"), "La Tour Eiffel a été"
    locale = {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    plain = llmrun.run(*options, stdin=text)
    ascii_only = llmrun.run(*options, stdin=text, env=locale)
    assert (ascii_only.returncode, ascii_only.stderr) == (0, b"")
    assert ascii_only.stdout == plain.stdout.decode().encode("ascii", "replace")


def test_the_prompt_of_a_locale_without_unicode_is_the_same_prompt(llmrun: Installed) -> None:
    options = ("--raw", "--temp", "0", "-n", "1", "La Tour Eiffel a été")
    locale = {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ascii_only = llmrun.run("run", "smollm2", "--json", *options, env=locale)
    assert json.loads(ascii_only.stdout.splitlines()[0])["prompt_tokens"] == llmrun.events(*options)[0]["prompt_tokens"]


def test_bytes_that_are_no_text_are_answered(llmrun: Installed) -> None:
    assert llmrun.events("--max-tokens", "1", "-", stdin=b"\xff\xfe\x80 hi")[-1]["event"] == "Finished"


def test_a_prompt_beyond_the_window_is_a_usage_error(llmrun: Installed) -> None:
    done = llmrun.run("run", "smollm2", "--ctx", "256", stdin="word " * 400)
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"context window" in done.stderr


def test_on_a_terminal_it_streams_and_sums_up(llmrun: Installed) -> None:
    options = ("--temp", "0", "--max-tokens", "16", *WITHOUT_END, QUESTION)
    terminal = llmrun.terminal("run", "smollm2", *options)
    assert terminal.end() == 0
    *answer, summary = terminal.lines
    assert re.findall(r"\w+", " ".join(answer)) == re.findall(r"\w+", llmrun.answer(*options))
    assert re.fullmatch(
        r"[\d.,]+ tokens/s · TTFT .* · ctx \d+/8,192( · .* busy)? · stopped: max tokens reached", summary
    )
    assert terminal.modes() == terminal.modes_before


def test_the_front_keeps_nothing_running(llmrun: Installed) -> None:
    running = llmrun.start("run", "smollm2", "--max-tokens", "1", "hi")
    assert running.end()[0] == 0
    assert not running.engine.is_running()


def test_it_runs_as_a_module(llmrun: Installed) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "llmrun", "run", "smollm2", "--max-tokens", "1", "hi"],
        capture_output=True,
        env=llmrun.environment(),
        stdin=subprocess.DEVNULL,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_several_answers_share_one_prefill_and_have_seeds_of_their_own(llmrun: Installed) -> None:
    answers = json.loads(llmrun.answer("-N", "3", "--seed", "7", "--json", "--max-tokens", "12", QUESTION))
    prompt = answers[0]["stats"]["prompt_tokens"]
    assert [each["stats"]["reused_tokens"] for each in answers] == [0, prompt - 1, prompt - 1]
    assert [each["seed"] for each in answers] == [each["stats"]["seed"] for each in answers] == [7, 8, 9]
    assert all(each["text"] for each in answers)
    assert len({each["text"] for each in answers}) > 1


def test_log_probabilities_of_each_token_are_told_and_add_up(llmrun: Installed) -> None:
    events = llmrun.events("--temp", "0", "--max-tokens", "6", "--logprobs", "2", QUESTION)
    entries = [entry for event in events if event["event"] == "TextDelta" for entry in event["logprobs"]]
    assert "".join(entry["token"] for entry in entries) == text_of(events)
    for entry in entries:
        first, second = entry["top_logprobs"]
        assert first["logprob"] >= second["logprob"]
        assert (first["token"], first["logprob"]) == (entry["token"], entry["logprob"]), "greedy takes the likeliest"
