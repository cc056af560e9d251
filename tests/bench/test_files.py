"""Result files are read in every format, and no value in them is trusted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.bench_rows import chat, result, row

from llmrun.bench.compare import ComparedSide, compare_results
from llmrun.bench.files import read_file
from llmrun.bench.formats import WRITERS, write
from llmrun.errors import LlmrunError, UsageError


def test_files_are_read_in_all_shapes(tmp_path: Path) -> None:
    kept, path = result(), tmp_path / "r.json"
    rows = kept.to_json()
    path.write_text(json.dumps(rows))
    assert read_file(path) == kept
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert read_file(path) == kept
    path.write_text("\ufeff" + json.dumps(rows[0]), encoding="utf-8")  # one row, saved on Windows
    assert read_file(path).rows == kept.rows[:1]


def test_what_llama_bench_wrote_is_read(tmp_path: Path) -> None:
    names = ("model_type", "model_size", "model_n_params", "n_threads", "n_prompt", "n_gen", "n_depth", "samples_ns")
    build = {"build_commit": "abc", "build_number": 7, "no_host": False}
    rows = [{name: each.to_json()[name] for name in names} | build for each in result().rows]
    path = tmp_path / "llama-bench.json"
    path.write_text(json.dumps(rows))
    read = read_file(path)
    assert [each.test for each in read.rows] == ["pp512", "tg128"]
    assert {(each.program, each.version) for each in read.rows} == {("llama-bench", "7 (abc)")}


@pytest.mark.parametrize(
    "text", ["", "nonsense", "[]", "{}", "[1]", '[{"a": 1}]', '{"samples_ns": "x"}', "[" * 100_000, "null", "\x00\x01"]
)
def test_other_files_are_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "strange.json"
    path.write_text(text)
    with pytest.raises(LlmrunError, match=r"strange\.json"):
        read_file(path)


def test_a_newer_result_and_a_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "newer.json"
    path.write_text(json.dumps([{**result().to_json()[0], "schema": 99}]))
    with pytest.raises(LlmrunError, match="newer llmrun"):
        read_file(path)
    with pytest.raises(UsageError, match="can't be read"):
        read_file(tmp_path / "nothing.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="can't be read"):
        read_file(tmp_path / "binary.json")
    with pytest.raises(UsageError, match="can't be read"):
        read_file(Path(os.curdir))


STRANGE = (None, -1, 0, 1.5, 1e400, float("nan"), 10**400, True, "\x1b[31m", [], [0], ["a"], [[1]], {}, {"a": 1})


def places() -> list[tuple[str, ...]]:
    """Every field of a row, and of what is in it."""
    (full,) = result(row(chat=chat())).to_json()
    inner = [(name, inside) for name in ("machine", "limit", "chat") for inside in full[name]]
    return [(name,) for name in full] + inner


@pytest.mark.parametrize("place", places(), ids=".".join)
def test_a_strange_value_is_refused_or_harmless(tmp_path: Path, place: tuple[str, ...]) -> None:
    path = tmp_path / "strange.json"
    for value in STRANGE:
        rows = result(row(chat=chat()), row("pp512", 90)).to_json()
        target: dict[str, Any] = rows[0]
        for name in place[:-1]:
            target = target[name]
        target[place[-1]] = value
        path.write_text(json.dumps(rows))
        try:
            read = read_file(path)
        except LlmrunError:
            continue
        compared = compare_results(ComparedSide("A", (read,)), ComparedSide("B", (result(row(), row("pp512", 90)),)))
        json.dumps(compared.to_json(), allow_nan=False)
        for kind in WRITERS:
            write(read, kind)


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    (wrong,) = result(row()).to_json()
    wrong["machine"]["cores"] = "many"
    path.write_text(json.dumps([wrong]))
    with pytest.raises(LlmrunError) as raised:
        read_file(path)
    assert raised.value.why == "cores of Machine is 'many'"
