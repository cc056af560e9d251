"""Slices of a job beside answers: as long as their steps, however a step's time depends on its tokens."""

from __future__ import annotations

import pytest

from llmrun.engine import slices
from llmrun.engine.slices import TimeShare


@pytest.mark.parametrize(("fixed", "a_token"), [(0.3, 0.001), (0.0, 0.002), (0.01, 0.0001), (0.05, 0.01)])
@pytest.mark.parametrize("step", [0.02, 0.1, 0.4])
def test_a_slice_takes_about_as_long_as_a_step(
    fixed: float, a_token: float, step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(slices.time, "perf_counter", lambda: now[0])
    share = TimeShare()
    share.seconds = step

    def slice_() -> tuple[int, float]:
        n_tokens, began = share.tokens(4096), now[0]
        with share.measured(n_tokens):
            now[0] += fixed + a_token * n_tokens
        return n_tokens, now[0] - began

    for _ in range(12):
        slice_()
    for _ in range(4):
        n_tokens, seconds = slice_()
        assert 8 <= n_tokens <= 2048
        assert seconds < 2 * step or n_tokens == 8
        assert seconds > step / 2 or n_tokens == 2048


def test_alone_a_job_computes_as_much_as_it_can() -> None:
    share = TimeShare()
    assert share.tokens(512) == 512
    share.seconds = 0.1
    assert share.tokens(512) == 64
    assert share.tokens(16) == 16
