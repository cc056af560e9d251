"""Measurements that cost nothing, for tests of the report card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from llmrun.errors import LlmrunError, UsageError
from llmrun.lab.bench.results import Machine
from llmrun.lab.quantize.card import Card, CardRow, CardSpeed, Method, Quality
from llmrun.lab.quantize.report import OnShare

# Type -> bytes, prefill, decode, mean KLD.
FIGURES = {
    "F16": (270_900_000, 286.0, 97.0, 0.0),
    "Q8_0": (144_800_000, 650.0, 139.0, 0.0014),
    "Q5_K_M": (112_000_000, 400.0, 128.0, 0.0108),
    "Q4_K_M": (105_500_000, 420.0, 149.0, 0.031),
    "IQ4_NL": (91_900_000, 780.0, 171.0, 0.066),
    "Q4_0": (91_700_000, 800.0, 188.0, 0.081),
    "Q4_1": (98_400_000, 290.0, 128.0, 0.083),
}


MACHINE = Machine(name="a box", cpu="Testium 3000", cores=2, threads=2, llmrun="1.2.3")


class FakeMeasures:
    """Gives FIGURES; on_call may raise, and sees every call as ("make", "Q4_0")."""

    name, notes = "tiny", ()

    def __init__(
        self, on_call: Callable[[str, str], None] = lambda what, kind: None, source: Path = Path("tiny.gguf")
    ) -> None:
        self.source = source
        self.calls: list[tuple[str, str]] = []
        self._on_call = on_call
        self.method = Method(prompt_tokens=256, answer_tokens=32, threads=2)

    def _called(self, what: str, kind: str) -> tuple[int, float, float, float]:
        self.calls.append((what, kind))
        self._on_call(what, kind)
        return FIGURES[kind]

    def machine(self) -> Machine:
        return MACHINE

    def source_row(self) -> CardRow:
        return CardRow("F16", is_source=True, n_bytes=FIGURES["F16"][0], bits_per_weight=16.0)

    def expected_bytes(self, kind: str) -> int:
        if kind not in FIGURES:
            raise UsageError(f"{kind} needs an importance matrix")
        self._called("expect", kind)
        return FIGURES[kind][0]

    def make(self, row: CardRow, target: Path, on_share: OnShare) -> CardRow:
        n_bytes = self._called("make", row.type)[0]
        target.write_bytes(b"GGUF")
        on_share(0.5)
        notes = (f"{row.type} has a note",) if row.type == "Q4_K_M" else ()
        return replace(row, n_bytes=n_bytes, bits_per_weight=8 * n_bytes / 135e6, seconds=1.5, notes=notes)

    def time(self, row: CardRow, model: Path, on_share: OnShare) -> CardRow:
        n_bytes, prefill, decode, _ = self._called("time", self._kind(model))
        wobble = 1 + 0.01 * (len(self.calls) % 3 - 1)
        return replace(
            row,
            prefill=CardSpeed((*row.prefill.samples, prefill * wobble)),
            decode=CardSpeed((*row.decode.samples, decode * wobble)),
            peak_memory=n_bytes + 40_000_000,
        )

    def judge(self, row: CardRow, model: Path, on_share: OnShare) -> tuple[CardRow, Quality]:
        kld = self._called("judge", self._kind(model))[3]
        quality = Quality(21.34 * (1 + kld), 0.8, kld, kld / 20, 1 - 2 * kld, 0.01)
        self.method = replace(self.method, text="a text", text_sha256="5d41", n_tokens=8192)
        return replace(row, quality=quality), Quality(21.34, 0.8)

    @staticmethod
    def _kind(model: Path) -> str:
        if not model.exists():
            raise LlmrunError(f"there is no {model}")
        return model.stem.partition("-")[2] or "F16"


def row(kind: str, **changes: object) -> CardRow:
    """A row with the figures of a type."""
    n_bytes, prefill, decode, kld = FIGURES[kind]
    facts: dict[str, object] = {
        "is_source": kind == "F16",
        "n_bytes": n_bytes,
        "bits_per_weight": 8 * n_bytes / 135e6,
        "prefill": CardSpeed((prefill, prefill * 1.01, prefill * 0.99)),
        "decode": CardSpeed((decode, decode * 1.01, decode * 0.99)),
        "peak_memory": n_bytes + 40_000_000,
        "quality": Quality(21.34 * (1 + kld), 0.8, kld, kld / 20, 1 - 2 * kld, 0.01),
    }
    return CardRow(**({"type": kind} | facts | changes))  # type: ignore[arg-type]


def card(*rows: CardRow, **changes: object) -> Card:
    """A card with these rows, or with all of FIGURES."""
    facts: dict[str, object] = {
        "name": "tiny",
        "source": "tiny-F16.gguf",
        "rows": rows or tuple(row(kind) for kind in FIGURES),
        "method": Method("a text", "5d41", 8192, 256, 32, 5, 2),
        "machine": MACHINE,
        "started": 1_763_719_200.0,
        "seconds": 192.0,
    }
    return Card(**(facts | changes))  # type: ignore[arg-type]
