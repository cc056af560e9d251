"""The summary and the fields of the live line. The live line over time is in test_answer.py."""

from __future__ import annotations

from dataclasses import replace

from support.answers import STATS, SUMMARY

from llmrun.protocol.messages import Finished, Stats
from llmrun.ui.answer.meter import fit, in_rows, short_summary, summary


def test_a_short_summary() -> None:
    assert short_summary(Finished(1, "stop", STATS)) == "131.2 tokens/s · TTFT 0.21 s · ctx 159/8,192"
    assert short_summary(Finished(1, "cancelled", Stats(n_ctx=64))) == "ctx 0/64 · stopped by Ctrl-C"


def test_summary_words() -> None:
    assert summary(Finished(1, "stop", STATS)) == SUMMARY
    reused = Stats(prompt_tokens=31, reused_tokens=20, prefill_seconds=0.1, completion_tokens=1, n_ctx=64)
    assert summary(Finished(1, "stop", reused)).startswith("prefill 11 tokens 110 tokens/s · decode 1 token · ")
    assert " · ctx 0/64 · reused 20 of 31 · seed " in summary(Finished(1, "stop", reused))
    assert "decode 1 token ·" in summary(Finished(1, "stop", reused))
    assert summary(Finished(1, "length", STATS)).endswith("stopped: max tokens reached")
    full = replace(STATS, context_used=STATS.n_ctx)
    assert summary(Finished(1, "length", full)).endswith("stopped: the context window is full")
    assert "retracted" not in SUMMARY
    assert " · 1,200 retracted · " in summary(Finished(1, "stop", replace(STATS, retracted_tokens=1200)))
    repeats = Finished(1, "repeats", STATS, "again and \x1b[2Jagain\n" * 9)
    assert summary(repeats).endswith("stopped: it repeats “again and again again and again again a…”")
    assert summary(Finished(1, "repeats", STATS)).endswith("stopped: it repeats itself")
    assert summary(Finished(1, "cancelled", STATS)).endswith("stopped by Ctrl-C")


def test_a_servers_figures_are_its_tokens_and_our_clock() -> None:
    server = replace(STATS, over_network=True, prefill_seconds=0.0, reused_tokens=0, seed=0)
    said = summary(Finished(1, "stop", server))
    assert said.startswith(f"prompt {server.prompt_tokens} tokens · decode ")
    assert said.endswith(" · timed over the network")
    uncounted = replace(server, prompt_tokens=0, context_used=0, n_ctx=0)
    assert "prompt" not in summary(Finished(1, "stop", uncounted))
    assert "ctx" not in summary(Finished(1, "length", uncounted))
    assert short_summary(Finished(1, "stop", replace(server, n_ctx=0))).endswith(" · ctx 159")
    assert summary(Finished(1, "length", replace(server, n_ctx=0))).endswith("stopped: max tokens reached")


def test_drafts_are_told_where_there_were_any() -> None:
    drafted = replace(STATS, drafted_tokens=1260, accepted_tokens=88, decode_steps=40, context_used=0)
    of_model = replace(drafted, model_drafted=1000, model_accepted=80)
    assert "drafted 1,260, accepted 88 (model 1,000, 80) · 3.2" in short_summary(Finished(1, "stop", of_model))
    said = "drafted 1,260, accepted 88 · 3.2 tokens a step"
    assert short_summary(Finished(1, "stop", drafted)) == f"131.2 tokens/s · TTFT 0.21 s · ctx 0/8,192 · {said}"
    assert f" · {said} · seed 1234" in summary(Finished(1, "stop", drafted))
    drafted = replace(drafted, draft_gain=1.6)
    assert short_summary(Finished(1, "stop", drafted)).endswith(f"{said} · 1.6x")
    assert f" · {said} · 1.6x · seed 1234" in summary(Finished(1, "stop", drafted))
    assert short_summary(Finished(1, "stop", STATS)) == "131.2 tokens/s · TTFT 0.21 s · ctx 159/8,192"


def test_fit_drops_from_the_right() -> None:
    fields = ["prefill 412 tokens/s", "decode 1.0 tokens/s"]
    both = "prefill 412 tokens/s · decode 1.0 tokens/s"
    assert [fit(fields, cells) for cells in (50, 42, 41, 20, 7, 0)] == [
        both, both, "prefill 412 tokens/s", "prefill 412 tokens/s",
        "prefill", "",
    ]  # fmt: skip
    assert fit([], 10) == ""


def test_a_long_summary_breaks_between_its_fields() -> None:
    assert in_rows("one · two two · three", 100) == ["one · two two · three"]
    assert in_rows("one · two two · three", 13) == ["one · two two ·", "three"]
    assert in_rows("one · two two · three", 12) == ["one ·", "two two ·", "three"]
    assert in_rows("one · two two · three", 1) == ["one ·", "two two ·", "three"]


def test_the_time_to_the_first_token_is_shown_with_its_parts() -> None:
    stats = replace(STATS, ttft_seconds=4.6, template_seconds=0.5, grammar_seconds=3.8, prefill_seconds=0.27)
    said = "TTFT 4.60 s (template 0.50 s, grammar 3.80 s, prefill 0.27 s)"
    assert said in summary(Finished(1, "stop", stats)).split(" · ")
    assert "TTFT 0.21 s" in summary(Finished(1, "stop", STATS)).split(" · "), "all of it is prefill"
