"""Log-probability of each token of a text.

Owns the choice of the window, and the memory check; the engine does the work. Must not print.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from llmrun.config import load_settings
from llmrun.gguf.reader import read_header
from llmrun.gguf.rules import check
from llmrun.planning.hardware import this_machine
from llmrun.planning.measurements import measured_attention
from llmrun.planning.plan import LoadPreferences, Measured, choose_flash_attention
from llmrun.protocol.adapters import Adapter
from llmrun.protocol.jobs.evaluate import SCORE, EvaluateUpdate, ScoredText, ScoreText
from llmrun.protocol.settings import common_fields
from llmrun.quantize.evaluate import MIN_CONTEXT, check_memory, check_sample, choose_context, require_adapters
from llmrun.runner.client import EngineClient

MAX_WINDOW = 8192
"""Upper bound of the default window, in tokens."""


def score(
    model: Path,
    text: str,
    *,
    n_ctx: int | None = None,
    preferences: LoadPreferences = LoadPreferences(),
    adapters: tuple[Adapter, ...] = (),
    on_update: Callable[[EvaluateUpdate], None] = lambda update: None,
) -> ScoredText:
    """Score a text, in several windows if it is longer than one.

    Args:
        model: the GGUF file, or the first part of a split one.
        n_ctx: tokens of a window; None for the trained context, at most MAX_WINDOW.
        preferences: load settings; n_ctx is ignored.
        adapters: LoRA adapters of the model.
        on_update: an exception from it stops the engine.

    Raises:
        UsageError: the window is out of bounds, or the text too short.
        BadModelError: the file is damaged, or not a generative model.
        OutOfMemoryError, EngineCrashedError: the engine can't load or run the model.
    """
    check_sample(n_ctx, None, long=False)
    header = read_header(model)
    check(header)
    require_adapters(adapters, header)
    window = choose_context([header], n_ctx, long=False) if n_ctx else min(header.n_ctx_train or 512, MAX_WINDOW)
    window = min(window, max(len(text.encode()) + 1, MIN_CONTEXT))  # a token has at least one byte
    hardware = this_machine()
    if hardware.memory_total:
        check_memory([header], window, window, hardware.memory_available)
    measured = Measured(measured_attention(header, hardware, load_settings().state_dir))
    flash_attention = choose_flash_attention(header, hardware, preferences, measured)  # as `run` does
    command = ScoreText(
        str(model.absolute()),
        text,
        window,
        adapters,
        **common_fields(replace(preferences, flash_attention=flash_attention).settings(hardware)),
    )
    with closing(EngineClient()) as engine:
        return engine.do(SCORE, command, on_update)
