"""The installed `llmrun tune` on the real model: remembers and forgets; Ctrl-C changes nothing."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.installed import Installed

from llmrun.gguf.reader import read_header
from llmrun.planning.hardware import probe
from llmrun.planning.tuned import Profile, TunableSettings, TunedSettings, remember


@pytest.fixture
def tuned_file(llmrun: Installed, tmp_path: Path) -> Path:
    """Where the fixture's command remembers what it finds."""
    return tmp_path / "llmrun-home" / "measured.json"


@pytest.mark.slow
def test_what_tune_finds_is_remembered_and_forgotten(llmrun: Installed, tuned_file: Path) -> None:
    done = llmrun.run("tune", "smollm2", "--seconds", "30", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["default"]["decode_rate"] > found["default"]["settings"]["threads"] > 0
    assert found["prefill_gain"] >= 1
    assert found["decode_gain"] >= 1
    assert {tried["goal"] for tried in found["tried"]} == {"prefill", "decode"}
    assert b"\x1b" not in done.stdout + done.stderr
    assert tuned_file.exists()
    assert llmrun.run("run", "smollm2", "hi", "-n", "4").returncode == 0
    forgotten = llmrun.run("tune", "smollm2", "--forget")
    assert b"defaults again" in forgotten.stderr
    assert not tuned_file.exists()


def test_ctrl_c_changes_nothing(llmrun: Installed, tuned_file: Path) -> None:
    terminal = llmrun.terminal("tune", "smollm2")
    terminal.wait(lambda: any("of 60 s" in line for line in terminal.lines))
    terminal.press("c")
    assert terminal.end() == -signal.SIGINT
    assert any("nothing was changed" in line for line in terminal.lines)
    assert not tuned_file.exists()


def test_what_was_found_is_used(llmrun: Installed, tuned_file: Path, model_path: Path) -> None:
    header, hardware = read_header(model_path), probe()
    default = TunableSettings(threads=hardware.usable_cores, threads_batch=hardware.usable_cores)
    slow, fast = Profile(default, 1.0, 100.0, 10.0), Profile(replace(default, repack=False), 0.1, 200.0, 20.0)
    remember(TunedSettings(slow, (fast,), 0, time.time()), header, hardware, tuned_file.parent, "smollm2")
    done = llmrun.run("run", "smollm2", "hi", "-n", "4", "-v")
    assert done.returncode == 0, done.stderr
    plan = next(line for line in done.stderr.splitlines() if line.startswith(b"plan: "))
    assert b"; tuned: " in plan
    assert b"repack off" in plan
    assert b"repack off" not in llmrun.run("run", "smollm2", "hi", "-n", "4").stderr
    doctor = llmrun.run("doctor").stdout
    assert b"smollm2, tuned on" in doctor
    assert b"repack off" in doctor
