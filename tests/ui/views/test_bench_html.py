"""A bench result as a page: which plots it gets, and what tells rows apart."""

from __future__ import annotations

import re
from dataclasses import replace

from llmrun.bench.results import BenchRow, BenchWarning, ChatTimes, Limit, Machine, Result
from llmrun.ui.views.bench import bench_page, labels

LIMIT = Limit(355.0, "memory", 355.0, 4000.0, 30e9, 0.5e12, 84e6, 1000.0, 1.35e8)
ROW = BenchRow(
    model="tiny-Q4_0", model_type="llama 135M Q4_0", model_filename="/secret/tiny.gguf", test="tg128", n_gen=128,
    n_threads=2, samples_ns=(680_000_000, 700_000_000, 690_000_000), limit=LIMIT, load_ns=200_000_000,
    peak_bytes=140_000_000, test_time="2026-11-21T10:00:00Z",
)  # fmt: skip
PROMPT = replace(ROW, test="pp512", n_prompt=512, n_gen=0)
HOSTILE = "</script><script>alert(1)</script>\x1b[2J"

NOISY = BenchWarning("noisy", "too noisy")


def titles(page: str) -> list[str]:
    """Of the charts."""
    return re.findall('<figure class="bars"><b>(.*?)</b>', page)


def test_each_test_has_its_bar() -> None:
    page = bench_page(Result((ROW, PROMPT), Machine(cpu="Testium 3000")))
    assert titles(page) == ["Prefill: reading a prompt", "Decode: writing an answer"]
    assert "Bench of tiny-Q4_0" in page
    assert "Testium 3000" in page
    assert "52%" in page
    assert "/secret" not in page


def test_rows_are_told_apart_by_what_differs() -> None:
    rows = [ROW, replace(ROW, n_threads=1), replace(ROW, model="tiny-Q8_0")]
    assert labels(rows) == ["Q4_0, 2 threads", "Q4_0, 1 thread", "Q8_0, 2 threads"]
    assert labels([ROW, PROMPT]) == ["", ""]
    assert labels([ROW, replace(ROW, load_mode="none")]) == ["mapped", "read"]
    assert labels([ROW, replace(ROW, type_k="q8_0", flash_attn=0)]) == [
        "keys f16, flash attention auto",
        "keys q8_0, no flash attention",
    ]


def test_answers_and_doubts_have_their_columns() -> None:
    chat = ChatTimes((100_000_000, 120_000_000), 5_000_000, 6_000_000, 9_000_000, 0.02, 0.01, (188.0, 190.0))
    row = replace(ROW, test="chat512+128", n_prompt=512, chat=chat, warnings=(NOISY,))
    page = bench_page(Result((row,), is_partial=True))
    assert all(words in page for words in ("110.0 ms", "189.0 tokens/s", "9.0 ms", "too noisy", "stopped early"))
    assert "Prompt and answer together" in titles(page)


def test_a_result_from_anywhere_is_untrusted() -> None:
    machine = Machine(name=HOSTILE, cpu=HOSTILE, gpus=(HOSTILE,), llmrun=HOSTILE)
    row = replace(
        ROW,
        model=HOSTILE,
        model_type=HOSTILE,
        test=HOSTILE,
        warnings=(BenchWarning("noisy", HOSTILE),),
        environment={HOSTILE: HOSTILE},
    )
    page = bench_page(Result((row, ROW), machine))
    assert "<script>alert" not in page
    assert "\x1b" not in page


def test_little_is_a_page_too() -> None:
    assert "Nothing was measured." in bench_page(Result(()))
    bare = BenchRow(samples_ns=(1,), n_gen=1)
    assert "</html>" in bench_page(Result((bare,)))
    odd = replace(ROW, limit=replace(LIMIT, memory_ceiling=0.0, read_rate=0.0, compute_rate=0.0))
    assert "</html>" in bench_page(Result((odd,)))
