"""Options that exclude each other: what is refused, with which words, and what gives way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import typer
from support.commands import filled

from llmrun.cli.app import RootCommand
from llmrun.errors import UsageError
from llmrun.protocol.exclusions import EXCLUSIONS, conflict, refuse_together, spelled, yielding
from llmrun.protocol.layers import FLAG, layer, resolved, values_of


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"--no-think": True, "--think-tokens": "5"}, "--no-think and --think-tokens"),
        ({"--no-think": True, "--think-effort": "low"}, "--no-think and --think-effort low"),
        ({"--think": True, "--think-effort": "none"}, "--think and --think-effort none"),
        ({"--record": "a", "--answers": "2"}, "--record and --answers 2"),
        ({"--continue": True, "--private": True}, "--continue, --session and --private"),
        ({"LLMRUN_SERVER": "x", "--ctx": "512"}, "LLMRUN_SERVER and --ctx"),
        ({"--beams": "2", "--temp": "0"}, "--beams and --temp"),
    ],
)
def test_two_that_exclude_each_other_are_refused_in_any_order(given: dict[str, Any], what: str) -> None:
    for each in (given, dict(reversed(given.items()))):
        with pytest.raises(UsageError, match=f"^{what} can't be used together"):
            refuse_together(each)


@pytest.mark.parametrize(
    "given",
    [
        {"--no-think": True, "--think-effort": "none"},
        {"--think": True, "--think-effort": "low", "--think-tokens": "0"},
        {"--speculate": "4", "--draft": "a"},
        {"--flash-attention": "off", "--cache-type-v": "f16"},
        {"--beams": "2", "--temp": None, "--think": False, "--watermark": ""},
        {"--json": True, "--output": "x"},
        {"--draft": "off", "--speculate": "off"},
        {"--draft": "off", "--at": "x"},
        {"--draft": "off", "--beams": "2"},
    ],
)
def test_others_go_together(given: dict[str, Any]) -> None:
    assert conflict(given) is None


def test_the_table_has_options_that_there_are() -> None:
    root = RootCommand(name="llmrun")
    names = ("run", "chat", "batch", "serve", "embed", "bench")
    commands = [root.get_command(typer.Context(root), name) for name in names]
    known = {flag for each in commands for row in each.params for flag in (*row.opts, *row.secondary_opts)}
    flags = {option.partition(" ")[0] for row in EXCLUSIONS for option in row.options}
    assert flags - known == {"LLMRUN_SERVER"}
    assert len({row.options for row in EXCLUSIONS}) == len(EXCLUSIONS)


def test_the_sentences_of_the_table_are_those_listed(golden: Callable[[str, str], None]) -> None:
    rows = (" | ".join((", ".join(row.options), row.why, row.hint, row.command)).rstrip(" |") for row in EXCLUSIONS)
    golden("exclusions.txt", "\n".join(rows) + "\n")


def test_a_weaker_value_gives_way_to_what_it_excludes() -> None:
    preset = layer("preset", {"thinking": True, "reasoning_effort": "low", "kv_type_v": "q8_0", "temperature": 1.0})
    assert set(yielding(preset, {"--think-effort": "none"})) == {*preset} - {"thinking"}
    assert set(yielding(preset, spelled({"thinking": False}))) == {*preset} - {"reasoning_effort"}
    assert set(yielding(preset, spelled({"flash_attention": "off"}))) == {*preset} - {"kv_type_v"}
    assert set(yielding(preset, {"--beams": "2"})) == {"kv_type_v"}
    assert yielding(preset, {}) == preset


def test_the_first_layer_with_a_value_has_its_origin() -> None:
    found = resolved(layer(FLAG, {"a": 1}), layer("preset", {"a": 2, "b": 3}), layer("default", {"b": 4, "c": None}))
    assert found == {"a": (1, FLAG), "b": (3, "preset"), "c": (None, "default")}
    assert values_of(found) == {"a": 1, "b": 3, "c": None}


def test_what_is_the_default_is_not_given() -> None:
    command: Any = RootCommand(name="llmrun").get_command(typer.Context(RootCommand(name="llmrun")), "run")
    assert command.typed({"answers": "1", "n_ctx": "512", "thinking": False, "stops_repeats": True}) == {
        "--ctx": "512", "--no-think": True,
    }  # fmt: skip


def test_the_servers_variable_counts_where_a_server_can_answer(home: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRUN_SERVER", "http://127.0.0.1:1")
    monkeypatch.setenv("LLMRUN_CTX", "512")
    assert filled("run", model="a")[1] == {}
    for command, values in (("chat", {"web": True}), ("embed", {}), ("explain", {}), ("batch", {"ray": "local"})):
        assert filled(command, model="a", **values)[1] == {"n_ctx": 512}, command
