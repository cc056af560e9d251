"""`llmrun run --record` and `llmrun replay` with the real model."""

from __future__ import annotations

import json
from pathlib import Path

from support.installed import Installed, only_error_line


def test_the_same_bytes_again(llmrun: Installed, tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    answer = llmrun.answer("Name a river", "--max-tokens", "16", "--temp", "1.5", "--record", str(file))
    again = llmrun.run("replay", str(file))
    assert again.returncode == 0, again.stderr
    assert again.stdout.decode() == answer
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
