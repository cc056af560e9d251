"""Engine settings: one definition, from which options, columns and comparisons are made."""

from __future__ import annotations

import ast
import inspect
from dataclasses import fields
from pathlib import Path

import pytest

import llmrun
from llmrun.errors import UsageError
from llmrun.lab.bench.results import BenchRow, setting_columns
from llmrun.lab.cli.bench import bench_arguments
from llmrun.planning.preferences import LOAD_OPTIONS, LoadPreferences
from llmrun.protocol.jobs.evaluate import Evaluate, ScoreText
from llmrun.protocol.loading import Load
from llmrun.protocol.settings import SETTINGS, EngineSettings, check_setting, common_fields

ROOM = Path(llmrun.__file__).parent
DECLARING = {
    ("protocol/settings.py", "EngineSettings"),
    ("planning/preferences.py", "LoadPreferences"),  # whose fields may be None
    ("protocol/jobs/explain.py", "RunCollected"),  # a fact about a run
}


def test_engine_settings_are_declared_once() -> None:
    found = set()
    for path in ROOM.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                names = [each.target.id for each in node.body if isinstance(each, ast.AnnAssign)]  # type: ignore[union-attr]
                if {"flash_attention", "kv_type_k", "kv_type_v"} & set(names):
                    found.add((path.relative_to(ROOM).as_posix(), node.name))
    assert found == DECLARING


def test_commands_and_plans_are_settings() -> None:
    assert all(issubclass(each, EngineSettings) for each in (Load, Evaluate, ScoreText))
    command = Evaluate("m", "text", threads=3, flash_attention="off", kv_type_k="q8_0")
    load = Load.of(command, "/m.gguf", n_batch=64)
    assert common_fields(load) == common_fields(command) | {"n_batch": 64}
    assert (load.path, load.n_ctx) == ("/m.gguf", command.n_ctx)


def test_every_setting_with_an_option_is_one_of_bench_and_described() -> None:
    options = [name for name, setting in SETTINGS.items() if setting.option]
    assert set(LOAD_OPTIONS) <= set(options)
    assert list(inspect.signature(bench_arguments).parameters)[-len(options) :] == options
    assert all(SETTINGS[name].help and SETTINGS[name].short and SETTINGS[name].heading for name in options)


def test_rows_have_a_field_for_each_setting_that_is_measured() -> None:
    columns = setting_columns(EngineSettings(cpu_experts=(0, 1), flash_attention="off", n_batch=8))
    assert columns.keys() <= {each.name for each in fields(BenchRow)}
    assert (columns["n_cpu_moe"], columns["flash_attn"], columns["n_ubatch"]) == (2, 0, 8)


def test_preferences_have_the_defaults_of_the_settings() -> None:
    given = LoadPreferences(threads=3)
    own = {name: getattr(EngineSettings(), name) for name in ("kv_type_k", "kv_type_v", "flash_attention")}
    assert {name: getattr(given, name) for name in own} == dict.fromkeys(own), "left open"
    assert given.attention == own


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("threads", 0, "invalid --threads 0"),
        ("cpu_experts", 1001, "invalid --n-cpu-moe 1001"),
        ("flash_attention", "perhaps", "invalid --flash-attention perhaps"),
        ("kv_type_k", "q3_0", "invalid --cache-type-k q3_0"),
    ],
)
def test_values_are_checked(name: str, value: object, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_setting(name, value)
    check_setting("threads", None)
