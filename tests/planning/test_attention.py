"""The flash attention setting that was measured is remembered for this machine, build and model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.gguf_writer import tiny_model, write

from llmrun.config import ATTENTION_FILE
from llmrun.gguf.reader import read_header
from llmrun.planning.attention import can_be_measured, measured_attention, remember
from llmrun.planning.hardware import Hardware
from llmrun.planning.speculation import OFF, DraftPolicy
from llmrun.protocol.devices import Gpu
from llmrun.protocol.loading import Load
from llmrun.protocol.speculation import AttentionTime

GIB = 1 << 30
MACHINE = Hardware("Some CPU", ("avx2",), 4, 8, None, 16 * GIB, 12 * GIB)
LOAD = Load("/tiny.gguf", 512, 512, threads=4)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ((AttentionTime(0, 0.010, 0.010), AttentionTime(1024, 0.030, 0.020)), "off"),
        ((AttentionTime(0, 0.010, 0.012), AttentionTime(1024, 0.020, 0.020)), "on"),
        ((AttentionTime(0, 0.0102, 0.010),), "on"),
    ],
)
def test_off_has_to_gain(tmp_path: Path, times: tuple[AttentionTime, ...], expected: str) -> None:
    header = read_header(write(tmp_path / "tiny.gguf", tiny_model({})))
    assert measured_attention(header, MACHINE, tmp_path) == ""
    remember(times, header, MACHINE, tmp_path)
    assert measured_attention(header, MACHINE, tmp_path) == expected
    assert measured_attention(header, replace(MACHINE, cpu_name="Another CPU"), tmp_path) == ""


@pytest.mark.parametrize("text", ["", "{", '{"schema": 1, "entries": [{}]}'])
def test_a_damaged_file_is_as_none(tmp_path: Path, text: str) -> None:
    header = read_header(write(tmp_path / "tiny.gguf", tiny_model({})))
    (tmp_path / ATTENTION_FILE).write_text(text)
    assert measured_attention(header, MACHINE, tmp_path) == ""


def test_it_is_measured_on_processors_once(tmp_path: Path) -> None:
    header = read_header(write(tmp_path / "tiny.gguf", tiny_model({})))
    policy = DraftPolicy(header, MACHINE, LOAD, tmp_path, OFF)
    assert policy.lacks_attention
    policy.remember((), (), (AttentionTime(0, 1.0, 1.0),))
    assert not policy.lacks_attention
    assert not DraftPolicy(header, MACHINE, LOAD, tmp_path).lacks_attention
    assert not can_be_measured(replace(MACHINE, gpus=(Gpu("CUDA0", "GPU", GIB, GIB),)), LOAD)
    assert not can_be_measured(MACHINE, replace(LOAD, kv_type_k="q8_0"))
    assert not can_be_measured(MACHINE, replace(LOAD, workers=("host:1",)))
