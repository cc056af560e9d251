"""The speed limit of a test: the bytes to read and the products to compute, over the machine's best rates.

The best rates are measured in the same run, by the job `limits`. A GPU's rates are not measured, so tests on
one have no limit.

Decode reads all weights and the KV cache for each token; prefill reads the weights once for each micro-batch. Every
phase takes at least the longer one of reading and multiplying: the phases' sum is the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from llmrun.bench.results import Limit
from llmrun.gguf.header import Header
from llmrun.planning.predict import Work, work_of
from llmrun.protocol.jobs.bench import BenchTest
from llmrun.protocol.jobs.machine import MeasuredLimits, MeasureLimits
from llmrun.protocol.settings import EngineSettings

_LEAST_BYTES, _MOST_BYTES = 1 << 20, 1 << 30  # of a working set; more is in no cache either way
_HALF = frozenset({"F16", "BF16"})
_SINGLE = frozenset({"F32", "F64"})
_ENOUGH = 3  # measurements with the same bytes and threads
_BITS = 64  # steps per doubling at which working sets are rounded


@dataclass(frozen=True, slots=True)
class Phase:
    """The average cost of a token of a prompt or an answer."""

    tokens: int  # their number
    weight_bytes: float  # weights read
    kv_bytes: float  # keys and values read
    products: Mapping[str, float]  # kind of multiply_add_rate() -> multiply-adds
    working_set: float  # bytes read again for each token, or for each micro-batch

    @property
    def n_bytes(self) -> float:
        """Bytes read per token."""
        return self.weight_bytes + self.kv_bytes

    def reading(self, machine: MeasuredLimits) -> float:
        """Seconds a token, if only that took time."""
        return self.n_bytes / machine.read

    def multiplying(self, machine: MeasuredLimits) -> float:
        """Seconds a token, if only that took time."""
        rates = {"int8": machine.int8, "half": machine.half, "single": machine.single}
        return sum(count / rates[kind] for kind, count in self.products.items() if rates[kind])


@dataclass(frozen=True, slots=True)
class TokenCost:
    """The cost of the tokens of a model."""

    work: Work  # of the file's tensor table
    bytes_of: Mapping[str, float]  # type -> bytes of a weight

    @classmethod
    def of(cls, header: Header) -> TokenCost:
        """Return the costs of a model."""
        return cls(work_of(header), {share.type: share.bits_per_weight / 8 for share in header.type_shares})

    def phases(self, test: BenchTest, settings: EngineSettings) -> tuple[Phase, ...]:
        """Return the phases of a test."""
        phases = []
        if test.n_prompt:
            phases.append(self._prompt(test, settings))
        if test.n_gen:
            phases.append(self._answer(test, settings))
        return tuple(phases)

    def _prompt(self, test: BenchTest, settings: EngineSettings) -> Phase:
        """Return the prompt's cost: a micro-batch reads weights and KV cache once; only the last token has logits."""
        micro_batch = min(settings.n_ubatch, settings.n_batch, test.n_prompt)
        middle = test.n_depth + test.n_prompt / 2
        products = _products(self.work.prefill_weights)
        self._add_attention(products, middle)
        weights = sum(self.work.decode_bytes.values())
        kv = self.work.kv_read(middle) * settings.kv_element_bytes
        return Phase(test.n_prompt, weights / micro_batch, kv / micro_batch, products, weights + kv)

    def _answer(self, test: BenchTest, settings: EngineSettings) -> Phase:
        middle = test.n_depth + test.n_prompt + test.n_gen / 2
        read = self.work.decode_bytes
        products = _products({type_name: n_bytes / self.bytes_of[type_name] for type_name, n_bytes in read.items()})
        self._add_attention(products, middle)
        weights, kv = sum(read.values()), self.work.kv_read(middle) * settings.kv_element_bytes
        return Phase(test.n_gen, weights, kv, products, weights + kv)

    def _add_attention(self, products: dict[str, float], depth: float) -> None:
        """Add the products of a head's queries with keys, and of weights with values."""
        products["half"] += 2 * self.work.attention_reads(depth) * self.work.head_length


def _products(weights: Mapping[str, float]) -> dict[str, float]:
    """Turn type -> weights into kind of product -> multiply-adds."""
    products = {"int8": 0.0, "half": 0.0, "single": 0.0}
    for type_name, count in weights.items():
        products["half" if type_name in _HALF else "single" if type_name in _SINGLE else "int8"] += count
    return products


def limit_of(parts: tuple[Phase, ...], machine: MeasuredLimits) -> Limit:
    """Return the limit of a test with these phases on that machine."""
    tokens = sum(part.tokens for part in parts)
    reading = [part.tokens * part.reading(machine) for part in parts]
    multiplying = [part.tokens * part.multiplying(machine) for part in parts]
    least = [max(times) for times in zip(reading, multiplying, strict=True)]
    bound_by_memory = sum(time for time, read in zip(least, reading, strict=True) if time == read)

    def mean(values: Callable[[Phase], float]) -> float:
        return sum(part.tokens * values(part) for part in parts) / tokens

    products = mean(lambda part: sum(part.products.values()))
    return Limit(
        tokens_per_second=tokens / sum(least),
        binds="memory" if 2 * bound_by_memory >= sum(least) else "compute",
        memory_ceiling=tokens / sum(reading),
        compute_ceiling=tokens / sum(multiplying) if sum(multiplying) else 0.0,
        read_rate=machine.read,
        compute_rate=tokens * products / sum(multiplying) if sum(multiplying) else 0.0,
        bytes_per_token=mean(lambda part: part.n_bytes),
        kv_bytes_per_token=mean(lambda part: part.kv_bytes),
        multiply_adds=products,
    )


class MachineLimits:
    """The machine's rates: the best of all measurements of this run with the same bytes and threads."""

    def __init__(self, measure: Callable[[MeasureLimits], MeasuredLimits]) -> None:
        self._measure = measure
        self._seen: dict[MeasureLimits, list[MeasuredLimits]] = {}

    def at(self, n_bytes: float, threads: int) -> MeasuredLimits:
        """Return the machine's rates, measured again in the first few calls.

        Args:
            n_bytes: of the working set.
        """
        command = MeasureLimits(_rounded(n_bytes), threads)
        seen = self._seen.setdefault(command, [])
        if len(seen) < _ENOUGH:
            seen.append(self._measure(command))
        products = [rates for key, measured in self._seen.items() if key.threads == threads for rates in measured]
        return MeasuredLimits(
            max(rates.read for rates in seen),
            max(rates.int8 for rates in products),
            max(rates.half for rates in products),
            max(rates.single for rates in products),
        )


def _rounded(n_bytes: float) -> int:
    """Round a working set, so that tests of one model share measurements."""
    whole = int(min(max(n_bytes, _LEAST_BYTES), _MOST_BYTES))
    step = max((1 << whole.bit_length()) // _BITS, 1 << 16)
    return whole // step * step
