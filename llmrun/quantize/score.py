"""How likely each token of a text is to a model.

Owns how much is read together, and whether that fits here; the engine does the work. Must not print.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from llmrun.errors import require_within
from llmrun.gguf.reader import read_header
from llmrun.gguf.rules import check
from llmrun.planning.machine import this_machine
from llmrun.planning.plan import CONTEXT_BOUNDS, LoadPreferences, choose_flash_attention
from llmrun.planning.split import ALL_LAYERS
from llmrun.protocol.jobs.evaluate import EvaluateUpdate
from llmrun.protocol.jobs.score import SCORE, ScoredText, ScoreText
from llmrun.quantize.evaluate import MIN_CONTEXT, check_memory, choose_context
from llmrun.runner.runner import Runner

MAX_WINDOW = 8192
"""Tokens of a window, where the model was trained on as many and nobody says otherwise."""


def check_window(n_ctx: int | None) -> None:
    """Raise UsageError where no window is that long."""
    require_within("--ctx", n_ctx, (MIN_CONTEXT, CONTEXT_BOUNDS[1]))


def score(
    model: Path,
    text: str,
    *,
    n_ctx: int | None = None,
    preferences: LoadPreferences = LoadPreferences(),
    on_update: Callable[[EvaluateUpdate], None] = lambda update: None,
) -> ScoredText:
    """Score a text.

    Args:
        model: its GGUF file, the first part of a split one.
        text: read in windows where it is longer than one.
        n_ctx: tokens of a window; None is what the model was trained on, MAX_WINDOW at most.
        preferences: how it is loaded; n_ctx does not count.
        on_update: how far it is. What it raises ends the engine.

    Raises:
        UsageError: the window is out of bounds, or the text too short.
        BadModelError: the file is damaged, or no model that predicts text.
        OutOfMemoryError: it does not fit.
        EngineCrashedError: the engine died.
    """
    check_window(n_ctx)
    header = read_header(model)
    check(header)
    window = choose_context([header], n_ctx, long=False) if n_ctx else min(header.n_ctx_train or 512, MAX_WINDOW)
    window = min(window, max(len(text.encode()) + 1, MIN_CONTEXT))  # a token is a byte at least
    hardware = this_machine()
    if hardware.memory_total:
        check_memory([header], window, window, hardware.memory_available)
    command = ScoreText(
        str(model.absolute()),
        text,
        window,
        threads=preferences.threads or hardware.usable_cores,
        gpu_layers=ALL_LAYERS if preferences.gpu_layers is None else preferences.gpu_layers,
        flash_attention=choose_flash_attention(header, hardware, preferences),  # as `run` without --ctx
        kv_type_k=preferences.cache_type_k,
        kv_type_v=preferences.cache_type_v,
    )
    with closing(Runner()) as engine:
        return engine.do(SCORE, command, on_update)
