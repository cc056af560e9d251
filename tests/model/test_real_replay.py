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
