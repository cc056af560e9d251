"""`llmrun run --record` and `llmrun replay` with the real model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.installed import Installed, only_error_line

LISTING = "Repeat these lines, ten times: " + "red apple, green pear, blue plum; " * 6


def test_the_same_bytes_again(llmrun: Installed, tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    answer = llmrun.answer("Name a river", "--max-tokens", "16", "--temp", "1.5", "--record", str(file))
    again = llmrun.run("replay", str(file))
    assert again.returncode == 0, again.stderr
    assert again.stdout.decode() == answer + "\n"
    assert b"The same bytes" in again.stderr


def test_what_differs_is_said(llmrun: Installed, tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    llmrun.answer("Name a river", "--max-tokens", "8", "--record", str(file))
    record = json.loads(file.read_text())
    record["place"]["processor"] = "another"
    record["answer"]["content"] = "Never said"
    file.write_text(json.dumps(record))
    again = llmrun.run("replay", str(file))
    assert again.returncode == 5
    assert "differs from the recorded one from character 1 on" in only_error_line(again.stderr.decode())
    assert "processor: recorded another" in again.stderr.decode()


def test_the_kv_cache_is_recorded_and_can_be_another(llmrun: Installed, tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    llmrun.answer("Name a river", "--max-tokens", "8", "-ctk", "q8_0", "--record", str(file))
    same, other = llmrun.run("replay", str(file)), llmrun.run("replay", str(file), "-ctv", "q8_0")
    assert same.returncode == 0, same.stderr
    assert "KV cache" not in same.stderr.decode()
    assert "KV cache: recorded q8_0 f16, here q8_0 q8_0" in other.stderr.decode()


@pytest.mark.slow
@pytest.mark.parametrize("speculate", ["auto", "7"])
def test_what_was_drafted_is_replayed(llmrun: Installed, tmp_path: Path, speculate: str) -> None:
    file = tmp_path / "record.json"
    sampling = ("--temp", "0.7", "--seed", "5", "--repeat-penalty", "1.05")
    answer = llmrun.answer(LISTING, "--max-tokens", "160", *sampling, "--speculate", speculate, "--record", str(file))
    record = json.loads(file.read_text())
    stats, drafts = record["answer"]["stats"], record["request"]["speculation"]["recorded"]
    assert sum(len(tokens) for _, tokens in drafts) == stats["drafted_tokens"] >= stats["accepted_tokens"]
    assert stats["accepted_tokens"] or speculate == "auto"  # which first learns how often such drafts are right
    again = llmrun.run("replay", str(file))
    assert again.returncode == 0, again.stderr
    assert again.stdout.decode() == answer + "\n"
