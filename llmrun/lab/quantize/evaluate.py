"""Quality of a model on a text, alone or compared with a reference model, and with long contexts; a text's scores."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from llmrun.config import load_settings
from llmrun.errors import OutOfMemoryError, UsageError, require_within
from llmrun.gguf.header import Header
from llmrun.gguf.reader import read_header
from llmrun.gguf.rules import check
from llmrun.models.adapters import adapter_bytes
from llmrun.planning.hardware import probe, this_machine
from llmrun.planning.measurements import measured_attention
from llmrun.planning.memory import UBATCH, memory
from llmrun.planning.plan import Measurements, choose_flash_attention
from llmrun.planning.preferences import CONTEXT_BOUNDS, LoadPreferences
from llmrun.protocol.adapters import Adapter
from llmrun.protocol.jobs.evaluate import (
    EVALUATE,
    SCORE,
    Divergence,
    Evaluate,
    EvaluateResult,
    EvaluateUpdate,
    Needle,
    ScoredText,
    ScoreText,
)
from llmrun.protocol.settings import common_fields
from llmrun.protocol.sizes import readable_size
from llmrun.runner.client import EngineClient
from llmrun.storage import decode_text

CONTEXT = 512
"""Tokens of a chunk, as in other tools: only figures for chunks of the same length are comparable."""
LONG_CONTEXT = 8192
MIN_CONTEXT, MIN_LONG_CONTEXT = 32, 1024
TOKENS = 20_480
"""Default number of tokens; the intervals are then small enough to distinguish neighbouring quants."""
ALL_CHUNKS = 1 << 30
_MAX_BYTES = 32 << 20  # of a text, which takes a language model days

# Upper bound of the mean KLD for each verdict, best first. LLaMA-3-8B against F16 in llama.cpp's figures: Q8_0 0.001,
# Q5_K_M 0.011, Q4_K_M 0.031, Q3_K_M 0.1; small models lose several times as much.
_VERDICTS = (
    (0.0, "the same as the reference"),
    (0.005, "practically the same as the reference"),
    (0.02, "hardly different from the reference"),
    (0.08, "a little different from the reference"),
    (0.25, "clearly different from the reference"),
    (1.0, "much worse than the reference"),
)
_WORST = "hardly related to the reference"


@dataclass(frozen=True, slots=True)
class EvaluatedText:
    """Text for measurements; only figures on the same content are comparable."""

    name: str  # for display
    content: str

    @property
    def sha256(self) -> str:
        """Hash of the UTF-8 bytes, in hex."""
        return hashlib.sha256(self.content.encode()).hexdigest()


def read_text(path: Path) -> EvaluatedText:
    """Read a text file. Raises UsageError if the file can't be read, is too long, or binary."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"--text {path} can't be read", why=error.strerror or str(error)) from None
    if len(data) > _MAX_BYTES:
        raise UsageError(
            f"--text {path} is longer than {readable_size(_MAX_BYTES)}",
            hint=f"head -c 2M {path} > text.txt",
        )
    decoded = decode_text(data, f"--text {path} can't be read")
    return EvaluatedText(f"{path.name} ({decoded.note})" if decoded.note else path.name, decoded.text)


def default_text() -> EvaluatedText:
    """Return Python's language reference, English prose with code that is part of every Python.

    Raises UsageError if this Python has no documentation.
    """
    try:
        from pydoc_data.topics import topics  # 0.7 MB
    except ImportError:
        raise UsageError(
            "a --text is missing",
            why="this Python has no language reference, which is the default text",
            hint="--text FILE, some hundred kB of text",
        ) from None
    version = ".".join(platform.python_version_tuple()[:2])
    return EvaluatedText(f"Python {version}'s language reference", "\n\n".join(topics[name] for name in sorted(topics)))


def evaluate(
    model: Path,
    *,
    reference: Path | None = None,
    text: EvaluatedText | None = None,
    n_ctx: int | None = None,
    chunks: int | None = None,
    long: bool = False,
    preferences: LoadPreferences = LoadPreferences(),
    adapters: tuple[Adapter, ...] = (),
    on_update: Callable[[EvaluateUpdate], None] = lambda update: None,
) -> EvaluateResult:
    """Measure how well a model predicts a text.

    Args:
        model: the GGUF file, or the first part of a split one.
        reference: the model to compare with: a better quant of the same model.
        text: None for default_text().
        n_ctx: tokens of a chunk; None for CONTEXT, or up to LONG_CONTEXT if `long`.
        chunks: maximum number of chunks; None for TOKENS tokens.
        long: also measure by position, and the retrieval of facts from long texts.
        preferences: load settings of both models; n_ctx is ignored, and the reference always has an f16 KV cache.
        adapters: LoRA adapters of the model; the reference has none.
        on_update: called with the partial figures after each chunk; an exception from it stops the engine.

    Raises:
        UsageError: an argument is out of bounds, the text is too short, or the vocabularies differ.
        BadModelError: a file is damaged, or not a generative model.
        OutOfMemoryError, EngineCrashedError: the engine can't load or run the models.
    """
    check_sample(n_ctx, chunks, long=long)
    headers = [read_header(path) for path in (model, reference) if path is not None]
    for header in headers:
        check(header)
    adapter_bytes(adapters, headers[0])  # raises if one does not fit
    n_ctx = choose_context(headers, n_ctx, long=long)
    hardware = probe()
    if hardware.memory_total:
        check_memory(headers, n_ctx, n_ctx if long else n_ctx // 2, hardware.memory_available)
    command = Evaluate(
        model=str(model.absolute()),
        text=(text or default_text()).content,
        reference=str(reference.absolute()) if reference else "",
        n_ctx=n_ctx,
        chunks=chunks or max(1, TOKENS // n_ctx),
        every_position=long,
        needles=long,
        adapters=adapters,
        **common_fields(preferences.settings(hardware)),
    )
    with closing(EngineClient()) as engine:
        return engine.do(EVALUATE, command, on_update)


def choose_context(headers: list[Header], requested: int | None, *, long: bool) -> int:
    """Choose the tokens of a chunk; raise UsageError if the requested number is out of bounds."""
    trained = min((header.n_ctx_train for header in headers if header.n_ctx_train), default=LONG_CONTEXT)
    shortest = MIN_LONG_CONTEXT if long else MIN_CONTEXT
    if trained < shortest:
        what = "this model can't be measured" + " with --long" * long
        raise UsageError(what, why=f"it was trained on {trained:,} tokens only")
    chosen = requested if requested is not None else min(LONG_CONTEXT if long else CONTEXT, trained)
    if chosen > trained:
        why = f"the model was trained on {trained:,} tokens"
        raise UsageError(f"invalid --ctx {chosen}", why=why, hint=f"--ctx {trained}")
    return chosen


def check_sample(n_ctx: int | None, chunks: int | None, *, long: bool) -> None:
    """Raise UsageError if an argument of evaluate() is out of bounds; needs no model."""
    require_within("--ctx", n_ctx, (MIN_LONG_CONTEXT if long else MIN_CONTEXT, CONTEXT_BOUNDS[1]))
    require_within("--chunks", chunks, (1, ALL_CHUNKS))


def check_memory(headers: list[Header], n_ctx: int, scored: int, free: int) -> None:
    """Raise OutOfMemoryError if the models don't fit into memory together, each with two copies of a batch's logits."""
    logits = 2 * 4 * min(UBATCH, scored)  # bytes per token of the vocabulary
    needed = sum(memory(header, n_ctx).needed + logits * header.n_vocab for header in headers)
    if needed <= free:
        return
    both = len(headers) > 1
    raise OutOfMemoryError(
        "both models together do not fit into memory" if both else "the model does not fit into memory",
        why=f"{readable_size(needed)} are needed, and {readable_size(free)} are free",
        hint="a smaller --reference: Q8_0 is nearly as good as F16" if both else "a smaller quant, or a smaller --ctx",
    )


def verdict(evaluated: EvaluateResult) -> str:
    """Return one sentence about the result; "" if it has no figures, or too few for an interval."""
    perplexity, words = evaluated.perplexity, ""
    if perplexity is not None and perplexity.half is not None:
        words = f"as uncertain at each token as a choice among {perplexity.value:,.1f} equally likely ones"
        if evaluated.divergence is not None:
            words = _compared(evaluated.divergence)
    return "; ".join(part for part in (words, _retrieval(evaluated.needles)) if part)


def _retrieval(needles: tuple[Needle, ...]) -> str:
    if not needles:
        return ""
    words = f"{sum(needle.found for needle in needles)} of {len(needles)} facts found in long texts"
    if needles[0].reference_found is not None:
        words += f", {sum(bool(needle.reference_found) for needle in needles)} by the reference"
    return words


def _compared(divergence: Divergence) -> str:
    words = next((words for bound, words in _VERDICTS if divergence.mean.value <= bound), _WORST)
    if not divergence.mean.value:
        return words
    return f"{words}: the same likeliest token {divergence.same_top.value:.1%} of the time".replace("%", " %")


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
    adapter_bytes(adapters, header)  # raises if one does not fit
    window = choose_context([header], n_ctx, long=False) if n_ctx else min(header.n_ctx_train or 512, MAX_WINDOW)
    window = min(window, max(len(text.encode()) + 1, MIN_CONTEXT))  # a token has at least one byte
    hardware = this_machine()
    if hardware.memory_total:
        check_memory([header], window, window, hardware.memory_available)
    measured = Measurements(measured_attention(header, hardware, load_settings().state_dir))
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
