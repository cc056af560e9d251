"""Every format can be read back by what reads such files, whatever a model calls itself."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.bench_rows import chat, result, row

from llmrun.errors import LlmrunError, UsageError
from llmrun.lab.bench.compare import ComparedSide, compare_results
from llmrun.lab.bench.formats import WRITERS, escape, read_file, write
from llmrun.lab.bench.results import BenchRow, BenchWarning, Result

# What llama-bench writes with -o csv, at the version that is pinned.
LLAMA_BENCH = (
    "build_commit,build_number,cpu_info,gpu_info,backends,model_filename,model_type,model_size,model_n_params,n_batch,"
    "n_ubatch,n_threads,cpu_mask,cpu_strict,poll,type_k,type_v,n_gpu_layers,n_cpu_moe,split_mode,main_gpu,"
    "no_kv_offload,flash_attn,devices,tensor_split,tensor_buft_overrides,load_mode,lazy_mode,embeddings,no_op_offload,"
    "no_host,repack,fit_target,fit_min_ctx,n_prompt,n_gen,n_depth,test_time,avg_ns,stddev_ns,avg_ts,stddev_ts"
)
HOSTILE = (
    "'); DROP TABLE llama_bench; --",
    'a"b,c\nd\r\ne',
    "a|b\n| --- |\n<script>alert(1)</script>",
    "=HYPERLINK(\"http://example.com\")",
    "\x1b[31mred\x00\x07",
    "[link](http://example.com) `code` **bold** \\",
    ".shell echo\n.quit",
    "‮gnp.exe 模型 🦙",
    "",
)  # fmt: skip


def hostile(name: str) -> Result:
    return result(
        row(model_type=name, model=name, model_filename=f"/home/alice/{name}", warnings=(BenchWarning("noisy", name),)),
        row("pp512", 90),
    )


def cells(line: str) -> list[str]:
    """Of a row of a Markdown table, as GitHub's parser splits it: at every | without a backslash."""
    return [cell.strip() for cell in re.split(r"(?<!\\)(?:\\\\)*\|", line)[1:-1]]


def test_json_has_llama_benchs_fields_and_every_sample() -> None:
    kept = result(row("chat512+128", chat=chat()), row())
    rows = json.loads(write(kept, "json"))
    assert list(rows[0])[:41] == LLAMA_BENCH.split(",")[:26] + LLAMA_BENCH.split(",")[26:41]
    assert rows[1]["samples_ns"] == list(kept.rows[1].samples_ns)
    assert rows[1]["avg_ts"] == pytest.approx(40, rel=1e-6)
    lines = write(kept, "jsonl").splitlines()
    assert [json.loads(line) for line in lines] == rows
    back = Result.from_json(rows)
    assert back.rows[0] == replace(kept.rows[0], model_filename="llama-1b-Q4_K_M.gguf")


@pytest.mark.parametrize("kind", list(WRITERS))
def test_no_format_tells_whose_computer_it_was(kind: str) -> None:
    kept = result(
        row(model="/home/alice/x.gguf"), row(model="~/m/y.gguf"), row(model_filename="C:\\Users\\alice\\z.gguf")
    )
    text = write(kept, kind)
    assert "alice" not in text
    assert kind == "md" or "z.gguf" in text


def test_csv_begins_as_llama_benchs() -> None:
    text = write(result(), "csv")
    header, first, *_ = text.splitlines()
    assert header.startswith(LLAMA_BENCH + ",model,test,")
    (read, _) = list(csv.DictReader(io.StringIO(text)))
    assert (read["test"], read["repack"], read["n_prompt"], read["gpu_info"]) == ("pp512", "1", "512", "")
    assert float(read["low_ts"]) < float(read["avg_ts"]) < float(read["high_ts"])
    assert json.loads(read["samples_ns"]) == list(result().rows[0].samples_ns)
    assert first.startswith('"0c1e570","0",'), "quoted as llama-bench does"


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_breaks_csv(name: str) -> None:
    read = list(csv.reader(io.StringIO(write(hostile(name), "csv"))))
    assert len(read) == 3
    assert len({len(line) for line in read}) == 1
    assert not any(re.match(r"[=+@]", cell) for line in read[1:] for cell in line), "no formulas"
    assert "\x1b" not in str(read)


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_breaks_markdown(name: str) -> None:
    text = write(hostile(name), "md")
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 4
    assert len({len(cells(line)) for line in table}) == 1
    assert not re.search(r"(?<!\\)[<`\[]", text)
    assert "\x1b" not in text


def test_markdown_looks_like_llama_benchs() -> None:
    text = write(result(row("pp512", 120.5), row(rate=40.25)), "md")
    heading, rule, first, second, empty, build = text.splitlines()
    assert cells(heading) == ["model", "size", "params", "backend", "threads", "test", "t/s", "95%", "of limit"]
    assert all(re.fullmatch(r"-+:?", cell) for cell in cells(rule))
    assert cells(first)[:7] == ["llama 1B Q4_K - Medium", "762.81 MiB", "1.24 B", "CPU", "2", "pp512", "120.50 ± 0.19"]
    assert cells(second)[-3:] == ["40.25 ± 0.06", "40.17 - 40.33", "89%"]
    assert len({len(line) for line in (heading, rule, first, second)}) == 1, "aligned"
    assert (empty, build) == ("", "build: 0c1e570, by llmrun 0.1.0")


def test_markdown_shows_settings_that_vary_or_are_unusual() -> None:
    heading = write(result(row(n_ubatch=128), row(type_k="q8_0", repack=False)), "md").splitlines()[0]
    assert cells(heading)[4:9] == ["threads", "n_ubatch", "type_k", "rpk", "test"]
    both = write(result(row(), row(program="llama-bench", load_mode="auto")), "md")
    assert "| program     |" in both
    assert " lm " not in both, "they mean the same"


def test_markdown_tells_two_models_of_one_kind_apart() -> None:
    text = write(result(row(model="a.gguf"), row(model="b.gguf")), "md")
    assert "llama 1B Q4_K - Medium a.gguf" in text
    assert "llama 1B Q4_K - Medium b.gguf" in text


def test_markdown_says_what_makes_a_row_doubtful() -> None:
    warnings = (BenchWarning("noisy", "too noisy: ± 9%"), BenchWarning("swapped", "memory was swapped: 9 MB"))
    text = write(result(row(warnings=warnings), row(repetitions=9)), "md")
    assert "too noisy: ± 9%; memory was swapped: 9 MB" in text
    assert "stopped after 5 of 9" in text


def test_escape_leaves_words_alone() -> None:
    assert escape("llama 1B Q4_K_M") == "llama 1B Q4_K_M"
    assert escape("_a_ b__c") == r"\_a\_ b_\_c"


def test_a_single_sample_has_no_interval() -> None:
    once = result(row(spread=(1.0,)))
    assert json.loads(write(once, "json"))[0]["stddev_ts"] == 0
    assert next(csv.DictReader(io.StringIO(write(once, "csv"))))["low_ts"] == ""
    assert cells(write(once, "md").splitlines()[2])[7] == ""


def test_another_format_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="no format 'xml'") as raised:
        write(Result((BenchRow(samples_ns=(1,)),)), "xml")
    assert "jsonl" in raised.value.why


# ---- result files are read in every format, and no value in them is trusted


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
