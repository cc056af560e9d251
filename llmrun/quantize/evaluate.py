"""How good a model is: on a text, alone or beside a reference model, and with long contexts.

Owns which text is read and how much of it, whether that fits here, and the verdict in words; the engine does the work.
Must not print.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from llmrun.errors import OutOfMemoryError, UsageError, require_within
from llmrun.gguf.header import Header
from llmrun.gguf.reader import read_header
from llmrun.gguf.rules import check
from llmrun.planning.hardware import probe
from llmrun.planning.memory import UBATCH, memory
from llmrun.planning.plan import CONTEXT_BOUNDS, LoadPreferences
from llmrun.planning.split import ALL_LAYERS
from llmrun.protocol.jobs.evaluate import EVALUATE, Divergence, Evaluate, EvaluateResult, EvaluateUpdate, Needle
from llmrun.protocol.sizes import readable_size
from llmrun.runner.runner import Runner

CONTEXT = 512
"""Tokens of a chunk, as everybody else takes them: figures compare only where chunks are as long."""
LONG_CONTEXT = 8192
MIN_CONTEXT, MIN_LONG_CONTEXT = 32, 1024
TOKENS = 20_480
"""How much is read by default: with that the intervals are small enough to tell neighbouring quants apart."""
ALL_CHUNKS = 1 << 30
_MAX_BYTES = 32 << 20  # of a text; a language model reads that for days

# Mean KLD up to which the words hold, best first. LLaMA-3-8B against F16, by llama.cpp's own figures: Q8_0 0.001,
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
    """What a model is measured on. name is for people; figures compare only where content is the same."""

    name: str
    content: str

    @property
    def sha256(self) -> str:
        """Of its UTF-8 bytes, in hex."""
        return hashlib.sha256(self.content.encode()).hexdigest()


def read_text(path: Path) -> EvaluatedText:
    """A file's text.

    Raises:
        UsageError: it can't be read, is too long, or no UTF-8.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        content = data.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"--text {path} can't be read", why=error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        raise UsageError(
            f"--text {path} is not UTF-8",
            why=f"byte {error.start:,} is {data[error.start]:#04x}",
            hint=f"iconv -f latin1 -t utf-8 {path} > text.txt, if that is what it is",
        ) from None
    if len(data) > _MAX_BYTES:
        raise UsageError(
            f"--text {path} is longer than {readable_size(_MAX_BYTES)}",
            hint=f"head -c 2M {path} > text.txt",
        )
    return EvaluatedText(path.name, content)


def default_text() -> EvaluatedText:
    """English prose with code, which every Python brings along: the reference of its own language.

    Raises:
        UsageError: this Python came without it.
    """
    import platform

    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UsageError(
            "a --text is missing",
            why="this Python came without the documentation that is read by default",
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
    on_update: Callable[[EvaluateUpdate], None] = lambda update: None,
) -> EvaluateResult:
    """Measure how well a model predicts a text.

    Args:
        model: its GGUF file, the first part of a split one.
        reference: the model it is compared with: a better quant of the same one.
        text: None is default_text().
        n_ctx: tokens of a chunk; None is CONTEXT, or up to LONG_CONTEXT of a long one.
        chunks: how many are read at most; None is as many as make TOKENS.
        long: figures by position too, and facts that have to be found in long texts.
        preferences: how both are loaded. The reference has its KV cache in f16 always; n_ctx does not count.
        on_update: how far it is, and the figures so far after each chunk. What it raises ends the engine.

    Raises:
        UsageError: an argument is out of bounds, the text is too short, or the vocabularies differ.
        BadModelError: a file is damaged, or no model that predicts text.
        OutOfMemoryError: it does not fit.
        EngineCrashedError: the engine died.
    """
    check_sample(n_ctx, chunks, long=long)
    headers = [read_header(path) for path in (model, reference) if path is not None]
    for header in headers:
        check(header)
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
        threads=preferences.threads or hardware.usable_cores,
        gpu_layers=ALL_LAYERS if preferences.gpu_layers is None else preferences.gpu_layers,
        flash_attention=preferences.flash_attention,
        kv_type_k=preferences.cache_type_k,
        kv_type_v=preferences.cache_type_v,
    )
    with closing(Runner()) as engine:
        return engine.do(EVALUATE, command, on_update)


def choose_context(headers: list[Header], wish: int | None, *, long: bool) -> int:
    """Tokens of a chunk.

    Raises:
        UsageError: the wish is out of bounds.
    """
    trained = min((header.n_ctx_train for header in headers if header.n_ctx_train), default=LONG_CONTEXT)
    shortest = MIN_LONG_CONTEXT if long else MIN_CONTEXT
    if trained < shortest:
        what = "this model can't be measured" + " with --long" * long
        raise UsageError(what, why=f"it was trained on {trained:,} tokens only")
    chosen = wish if wish is not None else min(LONG_CONTEXT if long else CONTEXT, trained)
    if chosen > trained:
        why = f"the model was trained on {trained:,} tokens"
        raise UsageError(f"invalid --ctx {chosen}", why=why, hint=f"--ctx {trained}")
    return chosen


def check_sample(n_ctx: int | None, chunks: int | None, *, long: bool) -> None:
    """What can be refused before there is a model. Arguments as evaluate()'s.

    Raises:
        UsageError: one is out of bounds.
    """
    require_within("--ctx", n_ctx, (MIN_LONG_CONTEXT if long else MIN_CONTEXT, CONTEXT_BOUNDS[1]))
    require_within("--chunks", chunks, (1, ALL_CHUNKS))


def check_memory(headers: list[Header], n_ctx: int, scored: int, free: int) -> None:
    """Both models are there at the same time, each with a batch's logits as they are computed and as they are kept.

    Raises:
        OutOfMemoryError: they don't fit.
    """
    logits = 2 * 4 * min(UBATCH, scored)  # bytes for each token of the vocabulary
    needed = sum(memory(header, n_ctx, start=n_ctx).needed + logits * header.n_vocab for header in headers)
    if needed <= free:
        return
    both = len(headers) > 1
    raise OutOfMemoryError(
        "both models together do not fit into memory" if both else "the model does not fit into memory",
        why=f"that takes {readable_size(needed)}, and {readable_size(free)} are free",
        hint="a smaller --reference: Q8_0 is nearly as good as F16" if both else "a smaller quant, or a smaller --ctx",
    )


def verdict(evaluated: EvaluateResult) -> str:
    """Return one sentence about what was measured; "" if nothing was, or too little for an interval."""
    perplexity, words = evaluated.perplexity, ""
    if perplexity is not None and perplexity.half is not None:
        words = f"at each token of this text as unsure as among {perplexity.value:,.1f} equally likely ones"
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


def _compared(found: Divergence) -> str:
    words = next((words for bound, words in _VERDICTS if found.mean.value <= bound), _WORST)
    if not found.mean.value:
        return words
    return f"{words}: the same likeliest token {found.same_top.value:.1%} of the time".replace("%", " %")
