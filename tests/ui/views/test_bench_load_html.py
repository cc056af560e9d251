"""The page of a load test: every figure is in it, and text from elsewhere is untrusted."""

from __future__ import annotations

from dataclasses import replace

from llmrun.bench.load import LoadOutcome, LoadRequest, LoadRow
from llmrun.bench.results import BenchWarning, Machine
from llmrun.errors import CancelledError
from llmrun.protocol.loading import Load
from llmrun.ui.views.bench_load import load_page

MS = 10**6
ROW = LoadRow(8, True, 487, (239.0, 240.0, 241.0), 240.0, 1.0, 30.1, 120 * MS, 123 * MS, 9 * MS, 12 * MS, 23 * MS, 0.87)
OWN = replace(ROW, clients=1, shares_prompt=False, samples_ts=(50.0, 150.0), avg_ts=100.0)
REQUEST = LoadRequest("tiny", Load("/secret/m.gguf", 2048, 2048, threads=2), (1, 8), repetitions=3)
HOSTILE = "</script><script>alert(1)</script>"


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
