"""What is counted of requests, by a clock that the test turns."""

from __future__ import annotations

from support.clock import Clock

from llmrun.protocol.messages import Finished, Started, Stats, TextDelta
from llmrun.protocol.questions import EngineStatus
from llmrun.server.metrics import Histogram, ServerMetrics


def test_a_request_waits_runs_and_ends() -> None:
    clock = Clock(0)
    metrics = ServerMetrics(clock)
    request = metrics.request("tiny", 0.0)
    assert metrics.figures[:2] == (0, 1)
    request.started(Started(1, 30, 20, 7))
    assert metrics.figures[:2] == (1, 0)
    clock.now = 0.5
    request.delta(TextDelta(1, "Hi", 1))
    clock.now = 0.7
    request.delta(TextDelta(1, " you", 2))
    request.finished(Finished(1, "stop", Stats(ttft_seconds=0.5)))
    figures = metrics.figures
    assert figures[:2] == (0, 0)
    assert figures.ttft == (0.5, 0.5)
    assert figures.itl[0] is not None
    assert abs(figures.itl[0] - 0.1) < 1e-9
    text = metrics.text({"tiny": EngineStatus(cells=10, cells_used=5, prefix_queries=30, prefix_hits=20)})
    for line in (
        'vllm:prompt_tokens_total{model_name="tiny"} 30',
        'vllm:generation_tokens_total{model_name="tiny"} 3',
        'vllm:request_success_total{model_name="tiny",finished_reason="stop"} 1',
        'vllm:kv_cache_usage_perc{model_name="tiny"} 0.5',
        'vllm:prefix_cache_queries_total{model_name="tiny"} 30',
        'vllm:prefix_cache_hits_total{model_name="tiny"} 20',
        'vllm:time_to_first_token_seconds_bucket{model_name="tiny",le="0.25"} 0',
        'vllm:time_to_first_token_seconds_bucket{model_name="tiny",le="+Inf"} 1',
        'vllm:inter_token_latency_seconds_count{model_name="tiny"} 2',
    ):
        assert line in text.splitlines()


def test_what_became_of_drafts() -> None:
    metrics = ServerMetrics(Clock(0))
    metrics.request("tiny", 0.0).finished(Finished(1, "stop", Stats()))
    assert metrics.figures.acceptance is None
    metrics.request("tiny", 0.0).finished(Finished(1, "stop", Stats(drafted_tokens=30, accepted_tokens=20)))
    metrics.request("tiny", 0.0).finished(Finished(1, "stop", Stats(drafted_tokens=10, accepted_tokens=10)))
    assert metrics.figures.acceptance == 0.75
    lines = metrics.text({}).splitlines()
    assert 'vllm:spec_decode_num_draft_tokens_total{model_name="tiny"} 40' in lines
    assert 'vllm:spec_decode_num_accepted_tokens_total{model_name="tiny"} 30' in lines


def test_a_request_that_is_given_up_counts_no_more() -> None:
    metrics = ServerMetrics(Clock(0))
    waiting, running = metrics.request("tiny", 0.0), metrics.request("tiny", 0.0)
    running.started(Started(1, 3, 0, 7))
    waiting.aborted()
    running.aborted()
    running.aborted()
    assert metrics.figures[:2] == (0, 0)
    assert 'finished_reason="abort"} 2' in metrics.text({})


def test_the_time_to_the_first_token_is_the_engine_s_and_begins_with_the_request() -> None:
    """It is the figure of the answer's own line; of an answer that was given up, the time to its first text."""
    clock = Clock(10.0)
    metrics = ServerMetrics(clock)
    ended, given_up = metrics.request("tiny", 3.0), metrics.request("tiny", 9.0)
    for each in (ended, given_up):
        each.delta(TextDelta(1, "Hi", 1))
    clock.now = 20.0
    ended.finished(Finished(1, "stop", Stats(ttft_seconds=6.5)))
    given_up.aborted()
    given_up.aborted()
    lines = metrics.text({}).splitlines()
    assert 'vllm:time_to_first_token_seconds_sum{model_name="tiny"} 7.5' in lines
    assert 'vllm:time_to_first_token_seconds_count{model_name="tiny"} 2' in lines
    assert 'vllm:e2e_request_latency_seconds_sum{model_name="tiny"} 17.0' in lines


def test_the_rate_is_of_the_last_seconds() -> None:
    clock = Clock(0)
    metrics = ServerMetrics(clock)
    metrics.request("tiny", 0.0).delta(TextDelta(1, "x", 50))
    assert metrics.figures.rate == 10.0
    clock.now = 5.0
    assert metrics.figures.rate == 0.0


def test_buckets_hold_what_is_at_most_their_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 3.0):
        histogram.add(value)
    assert histogram.counts == [2, 1, 1]
    assert histogram.quantile(0.5) == 1.25


def test_a_name_can_not_break_out_of_its_label() -> None:
    metrics = ServerMetrics(Clock(0))
    metrics.request('a"b\\c\nd', 0.0)
    assert 'model_name="a\\"b\\\\c\\nd"' in metrics.text({})
