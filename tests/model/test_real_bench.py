"""`llmrun bench` with the real model: figures that hang together, formats that parse, Ctrl-C, and refusals at once."""

from __future__ import annotations

import csv
import json
import signal
from typing import Any

import psutil
import pytest
from support.installed import SECONDS, Installed, eventually, gone

SHORT = ("-p", "48", "-n", "12", "--chat", "32,12", "-r", "2")


@pytest.fixture(scope="module")
def rows(command: str, pulled: None, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """One short bench."""
    installed = Installed(command, home=tmp_path_factory.mktemp("home"))
    done = installed.run("bench", "smollm2", *SHORT, "-o", "json")
    assert done.returncode == 0, done.stderr
    assert b"\x1b" not in done.stdout + done.stderr
    return list(json.loads(done.stdout))


@pytest.mark.slow
def test_rows_hang_together(rows: list[dict[str, Any]]) -> None:
    assert [row["test"] for row in rows] == ["pp48", "tg12", "chat32+12"]
    for row in rows:
        assert len(row["samples_ns"]) == row["repetitions"] == 2
        tokens = row["n_prompt"] + row["n_gen"]
        assert row["samples_ts"] == pytest.approx([1e9 * tokens / ns for ns in row["samples_ns"]])
        assert (row["model"], row["program"], row["backends"]) == ("smollm2", "llmrun", "CPU")
        assert row["model_n_params"] == 134_515_008
        assert row["load_ns"] > 0
        assert row["machine"]["build_commit"] == row["build_commit"] != ""


def test_the_limit_is_one(rows: list[dict[str, Any]]) -> None:
    prompt, answer, chat = (row["limit"] for row in rows)
    assert answer["binds"] == "memory"
    # All weights of this model are in the file's 96.6 MB, the output matrix being the embedding.
    assert answer["bytes_per_token"] - answer["kv_bytes_per_token"] == pytest.approx(96.5e6, rel=0.01)
    assert prompt["bytes_per_token"] < answer["bytes_per_token"] / 40
    for row in rows:
        # A busy machine may well read faster a moment later than while its limit was measured; never this much.
        assert 0 < row["share_of_limit"] < 2
        assert row["limit"]["tokens_per_second"] <= row["limit"]["memory_ceiling"] * 1.0001
    assert chat["multiply_adds"] > 0


def test_a_chat_says_where_its_time_goes(rows: list[dict[str, Any]]) -> None:
    assert [row["chat"] is not None for row in rows] == [False, False, True]
    chat = rows[2]["chat"]
    assert len(chat["ttft_ns"]) == len(chat["decode_ts"]) == 2
    assert 0 < chat["token_p50_ns"] <= chat["token_p95_ns"] <= chat["token_p99_ns"]
    assert 0 < chat["sampling_share"] < 0.5
    assert 0 < chat["text_share"] < 0.5
    for ttft, ns in zip(chat["ttft_ns"], rows[2]["samples_ns"], strict=True):
        assert 0 < ttft < ns


@pytest.mark.skipif(not hasattr(psutil.Process, "memory_maps"), reason="peaks are told on Linux only")
def test_peak_memory_is_that_of_this_model(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert 97e6 < row["peak_bytes"] < 400e6


def test_every_format_parses_and_is_kept(llmrun: Installed) -> None:
    done = llmrun.run("bench", "smollm2", "-p", "16", "-n", "0", "-r", "2")
    heading, row, *_ = done.stdout.decode().splitlines()
    assert (heading.split()[:2], row.split()[0]) == (["TEST", "TOKENS/S"], "pp16")
    for kind in ("md", "csv", "json", "jsonl", "html"):
        again = llmrun.run("bench", "history", "1", "-o", kind)
        assert again.returncode == 0, kind
        text = again.stdout.decode()
        if kind == "csv":
            (found,) = csv.DictReader(text.splitlines())
            assert found["n_prompt"] == "16"
        elif kind in ("json", "jsonl"):
            found = json.loads(text)
            assert (found[0] if kind == "json" else found)["n_prompt"] == 16
        else:
            assert "pp16" in text


def test_a_depth_slows_decode_down_and_is_outside_the_clock(llmrun: Installed) -> None:
    done = llmrun.run("bench", "smollm2", "-p", "0", "-n", "8", "-d", "0,512", "-r", "2", "-o", "json", "--no-save")
    near, deep = json.loads(done.stdout)
    assert (near["test"], deep["test"]) == ("tg8", "tg8 @ d512")
    assert deep["limit"]["kv_bytes_per_token"] > 50 * near["limit"]["kv_bytes_per_token"]
    # Filling 512 tokens takes many times as long as the answer.
    assert deep["avg_ns"] < 10 * near["avg_ns"]


def test_ctrl_c_ends_at_once_with_what_was_measured(llmrun: Installed) -> None:
    running = llmrun.start("bench", "smollm2", "-p", "8", "-n", "2000", "-r", "50", "-o", "json")
    process = running.process
    assert process.stderr is not None
    line = b""
    while b"pp8" not in line:
        line = process.stderr.readline()
        assert line, "it ended before its first row"
    engines = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGINT)
    stdout, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == -signal.SIGINT
    rows = json.loads(stdout)
    assert rows[0]["test"] == "pp8"
    assert len(rows[0]["samples_ns"]) == 50
    assert all(len(row["samples_ns"]) < 50 for row in rows[1:])
    assert eventually(lambda: all(gone(engine) for engine in engines), SECONDS)


@pytest.mark.slow
def test_clients_at_once_share_the_beginning_of_their_prompts(llmrun: Installed) -> None:
    done = llmrun.run("bench", "smollm2", "--clients", "1,2", "--tokens", "4", "-r", "1", "--no-warmup", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [(row["clients"], row["shares_prompt"]) for row in rows] == [(1, False), (1, True), (2, False), (2, True)]
    *others, shared = (row["cached_share"] for row in rows)
    assert all(share < 0.05 for share in others)
    assert 0.4 < shared < 0.5, "the second client needs next to no prefill"
    for row in rows:
        assert 400 < row["prompt_tokens"] < 600
        assert row["avg_ts"] > 0
        assert 0 < row["token_p50_ns"] <= row["token_p99_ns"]
        assert 0 < row["ttft_p50_ns"] <= row["ttft_p95_ns"]
    assert llmrun.run("bench", "history").stdout == b""
