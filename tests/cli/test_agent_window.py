"""The window of a coding agent: the plan of its server, and what is said where it is too small."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from support.model_facts import Facts

from llmrun.cli import agent_window
from llmrun.cli.agent_window import COMFORTABLE_WINDOW, ModelWindow, describe_window, plan_for_agent, refusal
from llmrun.cli.agents import AGENTS
from llmrun.errors import OutOfMemoryError
from llmrun.planning.hardware import Hardware
from llmrun.planning.plan import make_plan
from llmrun.planning.preferences import LoadPreferences

GIB = 1 << 30
LARGE = Facts(
    weight_bytes=5 * GIB,
    n_ctx_train=131_072,
    n_embd=4096,
    n_vocab=128_256,
    kv_bytes=65_536.0,
    n_layers=32,
    n_parameters=8_030_000_000,
    key_length=128,
    most_heads=32,
)
OPEN = LoadPreferences()


def machine(free: int) -> Hardware:
    return Hardware("CPU", (), 4, 8, None, 64 * GIB, free, (), kv_on_use=True)


@pytest.mark.parametrize("gib", [8, 10, 12, 14, 18, 24, 30, 40])
def test_an_agents_window_comes_before_answers_at_the_same_time(gib: int) -> None:
    """64k, or all that fits for one answer; more only where half of the KV cache is left for others."""
    plan = plan_for_agent(LARGE, machine(gib * GIB), OPEN)
    alone = make_plan(LARGE, machine(gib * GIB), OPEN)
    assert plan.load.n_ctx >= min(alone.load.n_ctx, COMFORTABLE_WINDOW)
    assert plan.load.n_ctx <= max(COMFORTABLE_WINDOW, plan.load.n_cells // 2)
    assert plan.load.n_seq_max == 8


def test_a_server_for_several_users_gives_less_with_the_same_memory() -> None:
    hardware = machine(26 * GIB)
    assert make_plan(LARGE, hardware, replace(OPEN, parallel=8)).load.n_ctx < 24_576
    assert plan_for_agent(LARGE, hardware, OPEN).load.n_ctx >= COMFORTABLE_WINDOW


def test_more_memory_never_gives_a_smaller_window() -> None:
    windows = [plan_for_agent(LARGE, machine(gib * GIB // 2), OPEN).load.n_ctx for gib in range(16, 128)]
    assert all(after >= before for before, after in itertools.pairwise(windows))
    assert windows[-1] == LARGE.n_ctx_train


def test_where_each_answer_needs_a_whole_kv_cache_there_are_fewer() -> None:
    apart = replace(LARGE, rope_depends_on_window=True)
    plan = plan_for_agent(apart, machine(26 * GIB), OPEN)
    assert (plan.load.n_ctx >= COMFORTABLE_WINDOW, plan.load.n_seq_max) == (True, 2)


def test_the_preferred_context_is_kept_or_refused() -> None:
    some = replace(OPEN, n_ctx=20_480)
    assert plan_for_agent(LARGE, machine(12 * GIB), some).load.n_cells >= 20_480
    with pytest.raises(OutOfMemoryError):
        plan_for_agent(LARGE, machine(12 * GIB), replace(OPEN, n_ctx=131_072))


@pytest.mark.parametrize(
    ("name", "n_ctx", "words"),
    [
        ("claude", 32_768, "32,768 tokens, too small. Claude Code needs 49,152 for long sessions"),
        ("claude", 49_152, "Below 65,536 it summarizes often."),
        ("claude", 65_536, "65,536 tokens, enough."),
        ("claude", 0, "unknown. Claude Code needs 49,152"),
        ("crush", 16_384, "16,384 tokens. Below 65,536"),
    ],
)
def test_what_is_said_of_a_window(name: str, n_ctx: int, words: str) -> None:
    assert words in describe_window(AGENTS[name], n_ctx)


def test_an_agent_without_figures_can_be_started_anywhere() -> None:
    assert AGENTS["crush"].can_live_in(4096) is None
    assert AGENTS["claude"].can_live_in(0) is None


def test_a_refusal_names_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A KV cache of another type, another model, or another agent: only those that do fit."""
    monkeypatch.setenv("PATH", "")  # installed agents come first
    windows = {"f16": 32_768, "q8_0": 60_000}
    monkeypatch.setattr(
        agent_window, "window_of", lambda name, each: ModelWindow(name, windows[each.kv_type_k or "f16"], 8)
    )
    monkeypatch.setattr(agent_window, "installed_windows", lambda each: [ModelWindow("other", 80_000, 8)])
    small = ModelWindow("the model", 32_768, 8)
    claude = refusal("claude", small, OPEN).hint
    assert "llmrun launch claude 'the model' -ctk q8_0 -ctv q8_0" in claude
    assert "llmrun launch claude other" in claude
    assert "llmrun launch pi 'the model'" in claude
    far = refusal("claude", small, OPEN, way="start that server with more", at=" --at http://big-box:8080").hint
    assert far.startswith("start that server with more or llmrun launch pi 'the model' --at http://big-box:8080;")
    windows["q8_0"] = 40_000
    assert "-ctk" not in refusal("claude", small, OPEN).hint


def test_a_context_that_the_user_chose_too_small_is_named_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_window, "window_of", lambda name, each: ModelWindow(name, each.n_ctx or 65_536, 8))
    monkeypatch.setattr(agent_window, "installed_windows", lambda each: [])
    hint = refusal("claude", ModelWindow("m", 8192, 8), replace(OPEN, n_ctx=8192)).hint
    assert hint.startswith("llmrun launch claude m;")


def test_where_nothing_fits_other_models_are_to_be_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_window, "window_of", lambda name, each: ModelWindow(name, 8192, 8))
    monkeypatch.setattr(agent_window, "installed_windows", lambda each: [])
    assert "llmrun list --all" in refusal("claude", ModelWindow("m", 8192, 8), OPEN).hint
