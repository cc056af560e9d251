"""A bench result as a page: which plots it gets, and what tells rows apart."""

from __future__ import annotations

import re
from dataclasses import replace

from llmrun.errors import CancelledError
from llmrun.lab.bench.load import LoadOutcome, LoadRequest, LoadRow
from llmrun.lab.bench.results import BenchRow, BenchWarning, ChatTimes, Limit, Machine, Result
from llmrun.lab.views.bench import bench_page, labels
from llmrun.lab.views.bench_load import load_page
from llmrun.protocol.loading import Load

LIMIT = Limit(355.0, "memory", 355.0, 4000.0, 30e9, 0.5e12, 84e6, 1000.0, 1.35e8)
BENCH_ROW = BenchRow(
    model="tiny-Q4_0", model_type="llama 135M Q4_0", model_filename="/secret/tiny.gguf", test="tg128", n_gen=128,
    n_threads=2, samples_ns=(680_000_000, 700_000_000, 690_000_000), limit=LIMIT, load_ns=200_000_000,
    peak_bytes=140_000_000, test_time="2026-11-21T10:00:00Z",
)  # fmt: skip
PROMPT = replace(BENCH_ROW, test="pp512", n_prompt=512, n_gen=0)
HOSTILE = "</script><script>alert(1)</script>\x1b[2J"

NOISY = BenchWarning("noisy", "too noisy")


def titles(page: str) -> list[str]:
    """Of the charts."""
    return re.findall('<figure class="bars"><b>(.*?)</b>', page)


def test_each_test_has_its_bar() -> None:
    page = bench_page(Result((BENCH_ROW, PROMPT), Machine(cpu="Testium 3000")))
    assert titles(page) == ["Prefill: reading a prompt", "Decode: writing an answer"]
    assert "Bench of tiny-Q4_0" in page
    assert "Testium 3000" in page
    assert "52%" in page
    assert "/secret" not in page


def test_rows_are_told_apart_by_what_differs() -> None:
    rows = [BENCH_ROW, replace(BENCH_ROW, n_threads=1), replace(BENCH_ROW, model="tiny-Q8_0")]
    assert labels(rows) == ["Q4_0, 2 threads", "Q4_0, 1 thread", "Q8_0, 2 threads"]
    assert labels([BENCH_ROW, PROMPT]) == ["", ""]
    assert labels([BENCH_ROW, replace(BENCH_ROW, load_mode="none")]) == ["mapped", "read"]
    assert labels([BENCH_ROW, replace(BENCH_ROW, type_k="q8_0", flash_attn=0)]) == [
        "keys f16, flash attention auto",
        "keys q8_0, no flash attention",
    ]


def test_answers_and_doubts_have_their_columns() -> None:
    chat = ChatTimes((100_000_000, 120_000_000), 5_000_000, 6_000_000, 9_000_000, 0.02, 0.01, (188.0, 190.0))
    row = replace(BENCH_ROW, test="chat512+128", n_prompt=512, chat=chat, warnings=(NOISY,))
    page = bench_page(Result((row,), is_partial=True))
    assert all(words in page for words in ("110.0 ms", "189.0 tokens/s", "9.0 ms", "too noisy", "stopped early"))
    assert "Prompt and answer together" in titles(page)


def test_a_result_from_anywhere_is_untrusted() -> None:
    machine = Machine(name=HOSTILE, cpu=HOSTILE, gpus=(HOSTILE,), llmrun=HOSTILE)
    row = replace(
        BENCH_ROW,
        model=HOSTILE,
        model_type=HOSTILE,
        test=HOSTILE,
        warnings=(BenchWarning("noisy", HOSTILE),),
        environment={HOSTILE: HOSTILE},
    )
    page = bench_page(Result((row, BENCH_ROW), machine))
    assert "<script>alert" not in page
    assert "\x1b" not in page


def test_little_is_a_page_too() -> None:
    assert "Nothing was measured." in bench_page(Result(()))
    bare = BenchRow(samples_ns=(1,), n_gen=1)
    assert "</html>" in bench_page(Result((bare,)))
    odd = replace(BENCH_ROW, limit=replace(LIMIT, memory_ceiling=0.0, read_rate=0.0, compute_rate=0.0))
    assert "</html>" in bench_page(Result((odd,)))


# ---- the page of a load test: every figure is in it, and text from elsewhere is untrusted


MS = 10**6
ROW = LoadRow(8, True, 487, (239.0, 240.0, 241.0), 240.0, 1.0, 30.1, 120 * MS, 123 * MS, 9 * MS, 12 * MS, 23 * MS, 0.87)
OWN = replace(ROW, clients=1, shares_prompt=False, samples_ts=(50.0, 150.0), avg_ts=100.0)
REQUEST = LoadRequest("tiny", Load("/secret/m.gguf", 2048, threads=2), (1, 8), repetitions=3)


def test_figures_bars_and_the_machine() -> None:
    shown = load_page(REQUEST, LoadOutcome((OWN, ROW), (), None), Machine(cpu="Testium 3000"))
    for words in (
        "240.0 ± 1.0",
        "30.1 tokens/s",
        "120.0 ms",
        "23.0 ms",
        "87%",
        "Testium 3000",
        "2,048 tokens",
        "487 tokens",
    ):
        assert words in shown
    for title in ("Tokens/s of all clients", "Time to first token, median", "Inter-token latency, 95th percentile"):
        assert title in shown
    assert shown.count("1 client, own prompts") >= 3
    assert "240 tokens/s" in shown, "the best of all"
    assert "/secret" not in shown


def test_the_knee_is_marked() -> None:
    rows = tuple(
        replace(OWN, clients=clients, avg_ts=rate, answer_p50_ns=time * MS)
        for clients, rate, time in ((1, 100.0, 1000), (2, 200.0, 1000), (4, 210.0, 2000))
    )
    shown = load_page(REQUEST, LoadOutcome(rows, (), None), Machine())
    assert shown.count("Throughput against latency, own prompts") >= 1
    assert "Throughput against latency, shared prompts" not in shown
    assert ">knee</text>" in shown
    assert ">knee</text>" not in load_page(REQUEST, LoadOutcome(rows[:2], (), None), Machine())


def test_a_far_server_is_named_and_not_this_machine() -> None:
    request = replace(REQUEST, load=None, server="host:8080")
    shown = load_page(request, LoadOutcome((replace(OWN, early=2),), (), None), Machine(cpu="Testium 3000"))
    assert "host:8080" in shown
    assert "Testium" not in shown
    assert "Cached" in shown
    unknown = replace(OWN, cached_share=0.0)
    assert "Cached" not in load_page(request, LoadOutcome((unknown,), (), None), Machine())
    assert "2 of 2 answers ended before 64 tokens" in shown


def test_what_makes_it_doubtful_is_said() -> None:
    outcome = LoadOutcome((OWN,), (BenchWarning("load", "others computed"),), CancelledError("stopped"))
    shown = load_page(REQUEST, outcome, Machine())
    assert "meanwhile others computed" in shown
    assert "1 client, own prompts: too noisy" in shown
    assert "stopped early" in shown
    assert "stopped early" not in load_page(REQUEST, LoadOutcome((ROW,), (), None), Machine())


def test_names_are_untrusted() -> None:
    shown = load_page(replace(REQUEST, model=HOSTILE), LoadOutcome((ROW,), (), None), Machine(cpu=HOSTILE))
    assert HOSTILE not in shown
