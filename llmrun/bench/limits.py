"""How fast a test could be at most: what it has to read and to multiply, over what the machine does at most.

Owns the arithmetic, and the best figures that this run has seen of the machine; must not know how they are measured
(the job `limits`). A GPU's figures are not measured, so tests that use one have no limit.

Decode reads all weights and the KV cache for each token; prefill reads the weights once for each micro-batch. Every
phase takes at least the longer one of reading and multiplying: the phases' sum is the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from llmrun.bench.parameters import BenchSettings
from llmrun.bench.results import Limit
from llmrun.gguf.header import Header
from llmrun.planning.predict import Work, work_of
from llmrun.protocol.jobs.bench import BenchTest
from llmrun.protocol.jobs.limits import MeasuredLimits, MeasureLimits

_LEAST_BYTES, _MOST_BYTES = 1 << 20, 1 << 30  # of what is read again and again; more is in no cache either way
_HALF = frozenset({"F16", "BF16"})
_SINGLE = frozenset({"F32", "F64"})
_ENOUGH = 3  # measurements with the same bytes and threads
_BITS = 64  # of the bytes that are read, so many steps a doubling are told apart


@dataclass(frozen=True, slots=True)
class Phase:
    """A prompt, or an answer: what one token of it takes on average.

    Attributes:
        tokens: of it.
        weight_bytes: of weights that are read.
        kv_bytes: of keys and values that are read.
        products: kind of multiply_add_rate() -> multiply-adds.
        working_set: bytes that are read in turns, for one token or for many at a time.
    """

    tokens: int
    weight_bytes: float
    kv_bytes: float
    products: Mapping[str, float]
    working_set: float

    @property
    def n_bytes(self) -> float:
        """That are read."""
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
    """What computing a token of a model takes.

    Attributes:
        work: by the file's tensor table.
        bytes_of: type -> bytes of a weight.
    """

    work: Work
    bytes_of: Mapping[str, float]

    @classmethod
    def of(cls, header: Header) -> TokenCost:
        """By a model's header."""
        return cls(work_of(header), {share.type: share.bits_per_weight / 8 for share in header.type_shares})

    def phases(self, test: BenchTest, settings: BenchSettings, kv_element: float) -> tuple[Phase, ...]:
        """The parts of a test.

        Args:
            kv_element: bytes of an element of the KV cache.
        """
        found = []
        if test.n_prompt:
            found.append(self._prompt(test, settings, kv_element))
        if test.n_gen:
            found.append(self._answer(test, kv_element))
        return tuple(found)

    def _prompt(self, test: BenchTest, settings: BenchSettings, kv_element: float) -> Phase:
        """Weights and the KV cache are read once for a micro-batch; the output matrix is for the last token only."""
        micro_batch = min(settings.n_ubatch, settings.n_batch, test.n_prompt)
        middle = test.n_depth + test.n_prompt / 2
        products = _products(self.work.prefill_weights)
        self._add_attention(products, middle)
        weights = sum(self.work.decode_bytes.values())
        kv = self.work.kv_read(middle) * kv_element
        return Phase(test.n_prompt, weights / micro_batch, kv / micro_batch, products, weights + kv)

    def _answer(self, test: BenchTest, kv_element: float) -> Phase:
        middle = test.n_depth + test.n_prompt + test.n_gen / 2
        read = self.work.decode_bytes
        products = _products({kind: n_bytes / self.bytes_of[kind] for kind, n_bytes in read.items()})
        self._add_attention(products, middle)
        weights, kv = sum(read.values()), self.work.kv_read(middle) * kv_element
        return Phase(test.n_gen, weights, kv, products, weights + kv)

    def _add_attention(self, products: dict[str, float], depth: float) -> None:
        """A head's query times a key, and a weight times its value."""
        products["half"] += 2 * self.work.looks(depth) * self.work.head_length


def _products(weights: Mapping[str, float]) -> dict[str, float]:
    """Type -> weights, as kind of product -> multiply-adds."""
    found = {"int8": 0.0, "half": 0.0, "single": 0.0}
    for kind, count in weights.items():
        found["half" if kind in _HALF else "single" if kind in _SINGLE else "int8"] += count
    return found


def limit_of(parts: tuple[Phase, ...], machine: MeasuredLimits) -> Limit:
    """The limit of a test with these phases on that machine."""
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
    """What this run has seen of the machine: the best of all measurements with the same bytes and threads.

    Args:
        measure: does the job.
    """

    def __init__(self, measure: Callable[[MeasureLimits], MeasuredLimits]) -> None:
        self._measure = measure
        self._seen: dict[MeasureLimits, list[MeasuredLimits]] = {}

    def at(self, n_bytes: float, threads: int) -> MeasuredLimits:
        """The machine's figures, measured again until that was done often enough.

        Args:
            n_bytes: that are read in turns.
        """
        command = MeasureLimits(_rounded(n_bytes), threads)
        seen = self._seen.setdefault(command, [])
        if len(seen) < _ENOUGH:
            seen.append(self._measure(command))
        products = [each for key, found in self._seen.items() if key.threads == threads for each in found]
        return MeasuredLimits(
            max(each.read for each in seen),
            max(each.int8 for each in products),
            max(each.half for each in products),
            max(each.single for each in products),
        )


def _rounded(n_bytes: float) -> int:
    """So that tests of one model have a measurement in common."""
    whole = int(min(max(n_bytes, _LEAST_BYTES), _MOST_BYTES))
    step = max((1 << whole.bit_length()) // _BITS, 1 << 16)
    return whole // step * step
