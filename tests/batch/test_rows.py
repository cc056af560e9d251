"""Rows: every form that a file may have, what a row asks, and the order in which rows are asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmrun.batch.rows import Row, RowTemplate, filled, in_order, read_rows
from llmrun.errors import BadGrammarError, LlmrunError, UsageError
from llmrun.protocol.messages import AnswerRequest, Message
from llmrun.protocol.params import Limits


def rows(path: Path, text: str) -> list[Row]:
    path.write_text(text, encoding="utf-8")
    return list(read_rows(path))


def test_lines_of_json_are_objects_texts_or_broken(tmp_path: Path) -> None:
    found = rows(tmp_path / "in.jsonl", '\ufeff{"prompt": "a"}\n\n"b"\n[1]\nnot json\n{"id": 7, "prompt": "ü"}')
    assert [row.number for row in found] == [1, 3, 4, 5, 6]
    assert [dict(row.columns) for row in found] == [{"prompt": "a"}, {"prompt": "b"}, {}, {}, {"id": 7, "prompt": "ü"}]
    assert [row.error is not None for row in found] == [False, False, True, True, False]


def test_a_line_that_is_nested_too_deep_is_broken(tmp_path: Path) -> None:
    for depth in (200, 100_000):
        found = rows(tmp_path / "in.jsonl", '{"prompt": "a"}\n{"prompt": ' + "[" * depth + "\n" + '"b"\n')
        assert [row.error is None for row in found] == [True, False, True]


@pytest.mark.parametrize("suffix", [".jsonl", ".txt", ".csv"])
def test_a_line_that_is_too_long_is_broken_and_passed_over(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmrun.batch.rows._MOST_CHARACTERS", 64)
    header = "prompt\n" if suffix == ".csv" else ""
    found = rows(tmp_path / f"in{suffix}", f'{header}"a"\n"{"b" * 1000}"\n"c"\n"{"d" * 61}"\n"{"e" * 64}"')
    assert [row.number for row in found] == [1, 2, 3, 4, 5]
    assert ["too long" in str(row.error) for row in found] == [False, True, False, False, True]


def test_a_broken_parquet_file_says_so(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    for content in (b"", b"PAR1", b"PAR1" + b"x" * 100 + b"PAR1"):
        (tmp_path / "in.parquet").write_bytes(content)
        with pytest.raises(UsageError, match="can't be read"):
            list(read_rows(tmp_path / "in.parquet"))


@pytest.mark.parametrize(("suffix", "comma"), [(".csv", ","), (".tsv", "\t")])
def test_tables_have_columns(tmp_path: Path, suffix: str, comma: str) -> None:
    text = f'text{comma}label\n"two\nlines"{comma}x\nshort\n'
    found = rows(tmp_path / f"in{suffix}", text)
    assert [dict(row.columns) for row in found] == [
        {"text": "two\nlines", "label": "x"},
        {"text": "short", "label": ""},
    ]


def test_everything_else_is_lines_of_text(tmp_path: Path) -> None:
    assert [row.columns["prompt"] for row in rows(tmp_path / "in.txt", "a\n\n b\n")] == ["a", " b"]


def test_a_parquet_file(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["a", "b"], "n": [1, None]}), tmp_path / "in.parquet")
    found = [dict(row.columns) for row in read_rows(tmp_path / "in.parquet")]
    assert found == [{"text": "a", "n": 1}, {"text": "b", "n": None}]


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", None])
def test_a_file_that_is_no_text_or_is_not_there(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "in.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=r"can't be read: (it is not UTF-8|No such file)"):
        list(read_rows(path))


# ---- what a row asks ----


def asked(recipe: RowTemplate, **columns: Any) -> AnswerRequest:
    return recipe.request(Row(1, columns)).request


def test_a_prompt_is_a_users_message() -> None:
    assert asked(RowTemplate(), prompt="Hi").messages == (Message("user", "Hi"),)
    assert asked(RowTemplate(system="Be brief."), prompt="Hi").messages[0] == Message("system", "Be brief.")
    assert asked(RowTemplate(raw=True), prompt="Hi").prompt == "Hi"


def test_a_template_takes_columns() -> None:
    assert asked(RowTemplate("{a} and {b} {{x}}"), a="1", b=[2, "ü"]).messages[0].content == '1 and [2, "ü"] {x}'


def test_a_columns_text_is_no_template() -> None:
    assert filled("{a}", {"a": "{b}", "b": "no"}) == "{b}"


def test_a_column_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(UsageError, match="no column 'txt'") as raised:
        filled("{txt}", {"text": ""})
    assert "'text'" in raised.value.why


def test_what_a_row_says_itself_counts_first() -> None:
    recipe = RowTemplate(
        asked=AnswerRequest(limits=Limits(10, ("x",)), thinking=False), sampling={"temperature": 0.0, "top_k": 3}
    )
    messages = [{"role": "user", "content": "Hi"}]
    plain = recipe.request(Row(1, {"messages": messages}))
    own = recipe.request(Row(1, {"messages": messages, "max_tokens": 5, "stop": "y", "temperature": 1, "top_p": 0.5}))
    assert (plain.request.limits, plain.request.thinking) == (Limits(10, ("x",)), False)
    assert own.request.limits == Limits(5, ("y",))
    assert plain.sampling == {"temperature": 0.0, "top_k": 3}
    assert own.sampling == {"temperature": 1, "top_k": 3, "top_p": 0.5}


def openai(url: str = "/v1/chat/completions", **body: Any) -> Row:
    return Row(1, {"custom_id": "a", "url": url, "body": body})


def test_lines_of_openais_batches() -> None:
    recipe = RowTemplate()
    assert recipe.request(openai(messages=[{"role": "user", "content": "Hi"}])).request.messages == (
        Message("user", "Hi"),
    )
    assert recipe.request(openai("/v1/completions", prompt="Once")).request.prompt == "Once"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (Row(1, {}), "neither a prompt"),
        (Row(1, {"prompt": 7}), "prompt is not a text: it is 7"),
        (Row(1, {"body": 7}), "not an object"),
        (openai("/v1/embeddings", input="x"), "invalid url"),
        (openai(messages=[{"role": "user", "content": "Hi"}], n=2), "asks for 2 answers"),
        (openai(messages=[]), "messages"),
        (Row(1, {}, UsageError("the line is not JSON")), "not JSON"),
        (openai(messages=[{"role": "user", "content": "Hi"}], grammar="root ::= ("), "grammar"),
    ],
)
def test_rows_that_cant_be_asked_say_why(row: Row, says: str) -> None:
    with pytest.raises((UsageError, BadGrammarError)) as raised:
        RowTemplate().request(row)
    assert says.lower() in str(raised.value).lower()


def test_a_key_names_all_that_decides_an_answer() -> None:
    row = Row(1, {"prompt": "Hi"})
    recipes = [
        RowTemplate(), RowTemplate(model="other"), RowTemplate(system="s"), RowTemplate(sampling={"seed": 1}),
        RowTemplate(raw=True), RowTemplate(asked=AnswerRequest(limits=Limits(5))),
    ]  # fmt: skip
    keys = [recipe.key(recipe.request(row)) for recipe in recipes]
    assert len(set(keys)) == len(keys)
    assert keys[0] == RowTemplate().key(RowTemplate().request(Row(99, {"prompt": "Hi", "note": "not asked"})))


def test_a_watermarks_key_is_no_part_of_what_is_written() -> None:
    keys = set()
    for secret in ("one", "another"):
        recipe = RowTemplate(sampling={"watermark": "green", "watermark_key": secret})
        keys.add(recipe.key(recipe.request(Row(1, {"prompt": "Hi"}))))
    assert len(keys) == 1


# ---- order ----


def test_rows_that_share_a_beginning_come_together_the_longest_group_first() -> None:
    shared, other = "s" * 100, "o" * 100
    texts = {1: "short", 2: shared + "b", 3: other, 4: shared + "a" * 50, 5: "brief", 6: other + "x"}
    assert in_order(texts) == [4, 2, 3, 6, 1, 5]


def test_every_row_is_asked_once() -> None:
    texts = {number: "x" * (number % 7) for number in range(1, 200)}
    assert sorted(in_order(texts)) == sorted(texts)


def test_errors_are_ours(tmp_path: Path) -> None:
    for line in ("{}", "[]", "nul", json.dumps({"messages": 7}), json.dumps({"body": {"messages": "x"}})):
        for row in rows(tmp_path / "in.jsonl", line):
            with pytest.raises(LlmrunError):
                RowTemplate().request(row)
