"""The measurements of a report card on this machine with llama.cpp.

Owns the sizes of prompt, answer and text; quantize, bench and evaluate do the work, each in its own engine process so
that types share neither memory nor threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from llmrun.bench.machine import describe
from llmrun.bench.results import Machine
from llmrun.errors import LlmrunError, UsageError
from llmrun.gguf.reader import read_header
from llmrun.planning.hardware import probe
from llmrun.planning.placement import ALL_LAYERS
from llmrun.planning.plan import LoadPreferences
from llmrun.protocol.jobs.bench import BENCH, Bench, BenchResult, BenchTest
from llmrun.protocol.jobs.evaluate import EvaluateResult, EvaluateUpdate, least_chunks
from llmrun.protocol.jobs.text import TOKENIZE, TokenizeText
from llmrun.protocol.loading import Load
from llmrun.quantize.evaluate import EvaluatedText, choose_context, default_text, evaluate
from llmrun.quantize.job import Preview, QuantizeRequest, preview, quantize
from llmrun.quantize.report.card import Quality
from llmrun.quantize.report.measure import OnShare, QualityMeasurement, QuantizedModel, SourceModel, SpeedMeasurement
from llmrun.quantize.source import model_stem
from llmrun.runner.client import EngineClient

_PROMPT, _ANSWER = 256, 32
MAX_CHUNKS, MIN_CHUNKS = 16, 4
"""Chunks of text that quality is measured on."""
_CHUNK = 512  # tokens
_JUDGE_SECONDS = 240.0  # approximate limit per type; slow models read less text
_MAX_TOKEN_LENGTH = 32  # characters, on average


def require_text(model: Path, text: EvaluatedText) -> None:
    """Raise UsageError if a text has too few tokens for a report, whose verdicts need intervals.

    Args:
        model: the (first) GGUF file; its vocabulary is loaded.
        text: text to measure quality on.
    """
    n_ctx = choose_context([read_header(model)], None, long=False)
    needed = least_chunks(n_ctx) * n_ctx
    command = TokenizeText(str(model.absolute()), text.content[: needed * _MAX_TOKEN_LENGTH], special=False)
    with closing(EngineClient()) as engine:
        n_tokens = len(engine.do(TOKENIZE, command).tokens)
    if n_tokens < needed:
        raise UsageError(
            "the text is too short for a report",
            why=f"{text.name} has {n_tokens:,} tokens, and at least {needed:,} are needed",
            hint="use a longer --text, or none, for Python's language reference",
        )


class LocalMeasurements:
    """Measurements of a model's types on this machine; see make_report() for the arguments.

    Each raises LlmrunError after a failure, and can be interrupted. Raises BadModelError or ModelNotFoundError if the
    source is not a model's file.
    """

    prompt_tokens = _PROMPT
    answer_tokens = _ANSWER

    def __init__(
        self,
        source: Path,
        *,
        name: str = "",
        text: EvaluatedText | None = None,
        imatrix: Path | None = None,
        preferences: LoadPreferences = LoadPreferences(),
        chunks: int = MAX_CHUNKS,
    ) -> None:
        self._source = source
        self._name = name or model_stem(source)
        self._text = text or default_text()
        self._imatrix = imatrix
        self._preferences = preferences
        self._chunks = chunks
        self._header = read_header(source)
        self._build_commit = ""
        self._previews: dict[str, Preview] = {}
        self.threads = preferences.threads or probe().usable_cores

    def machine(self) -> Machine:
        return describe(build_commit=self._build_commit)

    def original(self) -> SourceModel:
        """Return the facts about the source."""
        header = self._header
        return SourceModel(
            name=self._name,
            type=header.quant,
            n_bytes=header.file_size,
            bits_per_weight=header.bits_per_weight,
            n_parameters=header.n_parameters,
            notes=tuple(_unusual(self._preferences)),
        )

    def expected_bytes(self, kind: str) -> int:
        """Return the expected file size of a type; raise UsageError if the type is invalid."""
        if kind not in self._previews:
            self._previews[kind] = preview(self._request(kind, self._source.with_name("none.gguf")))
        return self._previews[kind].n_bytes

    def make(self, kind: str, target: Path, on_share: OnShare) -> QuantizedModel:
        """Write the file of a type."""
        done = quantize(
            self._request(kind, target), lambda _, share: on_share(share), estimate=self._previews.get(kind)
        )
        return QuantizedModel(done.n_bytes, done.bits_per_weight, done.seconds, done.notes)

    def time(self, model: Path, on_share: OnShare) -> SpeedMeasurement:
        """Measure the speed of a model once, in an engine process of its own."""
        settings = replace(self._preferences.settings(probe()), threads=self.threads)
        load = Load.of(settings, str(model.absolute()), n_ctx=0, n_ctx_start=0)
        with closing(EngineClient()) as engine:
            on_share(0.1)
            prefill = engine.do(BENCH, Bench(load, BenchTest(n_prompt=_PROMPT), repetitions=1))
            on_share(0.6)
            decode = engine.do(BENCH, Bench(load, BenchTest(n_gen=_ANSWER), repetitions=1))
        self._build_commit = decode.model.build_commit
        if model == self._source:
            self._chunks = chunks_for(_rate(prefill, _PROMPT), self._chunks)
        peaks = [done.peak_bytes for done in (prefill, decode) if done.peak_bytes is not None]
        return SpeedMeasurement(_rate(prefill, _PROMPT), _rate(decode, _ANSWER), max(peaks, default=None))

    def judge(self, model: Path, on_share: OnShare) -> QualityMeasurement:
        """Compare a model with the source."""

        def report(update: EvaluateUpdate) -> None:
            on_share(update.done / update.total if update.total else 0.0)

        text = self._text
        found = evaluate(
            model,
            reference=self._source,
            text=text,
            chunks=self._chunks,
            preferences=self._preferences,
            on_update=report,
        )
        return QualityMeasurement(*_qualities(found), text.name, text.sha256, found.chunks * found.n_ctx)

    def _request(self, kind: str, target: Path) -> QuantizeRequest:
        return QuantizeRequest(self._source, target, kind, imatrix=self._imatrix, threads=self._preferences.threads)


def chunks_for(prefill: float, limit: int) -> int:
    """Return the number of chunks that a model and its source, with this prefill speed, read in reasonable time.

    `limit` takes precedence over the minimum of a few chunks.
    """
    readable = int(_JUDGE_SECONDS * prefill / (2 * _CHUNK))
    return min(max(readable, MIN_CHUNKS), limit)


def _unusual(preferences: LoadPreferences) -> Iterator[str]:
    """Yield a sentence about each load setting that is not the default."""
    attention = preferences.attention
    if (attention["kv_type_k"], attention["kv_type_v"]) != ("f16", "f16"):
        kinds = f"{attention['kv_type_k']} keys and {attention['kv_type_v']} values"
        yield f"the KV cache has {kinds}; quality is compared with the source's in f16"
    if attention["flash_attention"] != "auto":
        yield f"flash attention is {attention['flash_attention']}"
    if preferences.gpu_layers is not None and preferences.gpu_layers != ALL_LAYERS:
        yield f"{preferences.gpu_layers} layers are on the GPU"


def _qualities(found: EvaluateResult) -> tuple[Quality, Quality]:
    """Return the quality of the model, and of the source."""
    divergence = found.divergence
    if divergence is None or found.perplexity is None:
        raise LlmrunError("nothing was evaluated")
    quality = Quality(
        perplexity=found.perplexity.value,
        perplexity_error=found.perplexity.half,
        kld=divergence.mean.value,
        kld_error=divergence.mean.half,
        same_top=divergence.same_top.value,
        same_top_error=divergence.same_top.half,
    )
    reference = divergence.reference_perplexity
    return quality, Quality(perplexity=reference.value, perplexity_error=reference.half)


def _rate(done: BenchResult, n_tokens: int) -> float:
    return 1e9 * n_tokens * len(done.repetitions) / max(sum(each.ns for each in done.repetitions), 1)
