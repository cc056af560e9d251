"""Records of answers: they come back as they were, and say what is different."""

from __future__ import annotations

import contextlib
import json
import math
import random
from pathlib import Path

import pytest

from llmrun.chat.replay import Recording, differences, read, write
from llmrun.chat.store.turns import Answer
from llmrun.errors import UsageError
from llmrun.grammar import Grammar
from llmrun.models.fingerprint import ModelFingerprint
from llmrun.protocol.messages import AnswerRequest, Message, Stats
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.protocol.speculation import Speculation

SAMPLING = SamplingParams(seed=7, logit_bias=((3, -math.inf),), order=("temperature",))
LIMITS = Limits(5, ("\n",), ("ban",))
RECORD = Recording(
    AnswerRequest(
        (Message("user", "Hi\n💚"),),
        sampling=SAMPLING,
        limits=LIMITS,
        template="chatml",
        grammar=Grammar("gbnf", 'root ::= "a"'),
        thinking=False,
        stops_repeats=True,
        speculation=Speculation(7, recorded=((3, (5, 6)), (9, (1,)))),
    ),
    {"model": "abc", "threads": "2"},
    Answer(
        "Hello\u2028",
        finish="length",
        model=ModelFingerprint("smollm2", "ab" * 32, "/m.gguf", 5, 1.5),
        sampling=SAMPLING,
        limits=LIMITS,
        stats=Stats(seed=9),
    ),
    ModelFingerprint("/small.gguf", "", "/small.gguf", 4, 2.5),
)


@pytest.mark.parametrize(
    "record", [RECORD, Recording(AnswerRequest(prompt="Once"), {}, Answer(""))], ids=["chat", "text"]
)
def test_a_record_comes_back(record: Recording, tmp_path: Path) -> None:
    write(tmp_path / "r.json", record)
    assert read(tmp_path / "r.json") == record


def test_what_is_different_is_named() -> None:
    assert differences(RECORD, {"model": "abc", "threads": "2"}) == []
    assert differences(RECORD, {"model": "abc", "threads": "4", "new": "x"}) == [
        "threads: recorded 2, here 4",
        "new: recorded nothing, here x",
    ]
    assert differences(RECORD, {"model": "abc"}) == ["threads: recorded 2, here nothing"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kind": "llmrun-record", "version": 2}', "\x00", '"x"'])
def test_what_is_no_record(text: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(UsageError, match="not a record"):
        read(tmp_path / "r.json")
    with pytest.raises(UsageError, match="can't be read"):
        read(tmp_path / "missing.json")


def test_damaged_records_are_refused_or_read(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write(path, RECORD)
    good = json.loads(path.read_text())
    rng = random.Random(1)
    for _ in range(300):
        bad = json.loads(json.dumps(good))
        part = rng.choice(
            [bad, bad["draft"], bad["request"], bad["answer"], bad["answer"]["sampling"], bad["answer"]["limits"]]
        )
        part[rng.choice(list(part))] = rng.choice([None, 5, "x", [], {}, [[]], {"a": 1}])
        path.write_text(json.dumps(bad))
        with contextlib.suppress(UsageError):
            read(path)
