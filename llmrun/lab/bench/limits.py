"""The speed limit of a test: the bytes to read and the products to compute, over the machine's best rates.

The best rates are measured in the same run, by the job `limits`. A GPU's rates are not measured, so tests on
one have no limit.

Decode reads all weights and the KV cache for each token; prefill reads the weights once for each micro-batch. Every
phase takes at least the longer one of reading and multiplying: the phases' sum is the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from llmrun.lab.bench.results import Limit
from llmrun.planning.predict import Work
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
    products: Mapping[str, float]  # "int8", "half" or "single" -> multiply-adds
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


def phases(work: Work, test: BenchTest, settings: EngineSettings) -> tuple[Phase, ...]:
    """Return the phases of a test of a model: a micro-batch of its prompt reads weights and KV cache once."""
    prompt = _phase(work, test.n_prompt, work.prefill_weights, test.n_depth + test.n_prompt / 2, settings)
    answer = _phase(work, test.n_gen, work.decode_weights, test.n_depth + test.n_prompt + test.n_gen / 2, settings)
    micro_batch = max(min(settings.n_ubatch, settings.n_batch, test.n_prompt), 1)
    prompt = replace(prompt, weight_bytes=prompt.weight_bytes / micro_batch, kv_bytes=prompt.kv_bytes / micro_batch)
    return tuple(phase for phase in (prompt, answer) if phase.tokens)


def _phase(work: Work, tokens: int, multiplied: Mapping[str, float], depth: float, settings: EngineSettings) -> Phase:
    """Return the phase of tokens that each read all weights and the KV cache of a mean depth.

    Args:
        multiplied: type -> weights that multiply a token.
    """
    products = _products(multiplied)
    # Of a head's queries with keys, and of attention's weights with values.
    products["half"] += 2 * work.attention_reads(depth) * work.head_length
    weights, kv = sum(work.decode_bytes.values()), work.kv_read(depth) * settings.kv_element_bytes
    return Phase(tokens, weights, kv, products, weights + kv)


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
