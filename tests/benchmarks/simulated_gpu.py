"""What the loop adds to a GPU, without one: a simulated device, and the timeline of each request.

decode() returns at once, the logits come when the device has computed, and a step costs what was measured on an H200
with an 8B model. The loop, the sampler and the handling of text are real. Random logits of a small vocabulary; what the
sampler takes with a large one is not part of it. Figures are of this simulation, not of a GPU.

    PYTHONPATH=tests python tests/benchmarks/simulated_gpu.py [--clients 1 8 32] [--prompt 1000]
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import statistics
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from support.fake_context import END, N_VOCAB, FakeVocabulary

from llmrun import _native
from llmrun.engine.core.loop import Engine
from llmrun.engine.core.sampler import SequenceSampler
from llmrun.engine.core.sequence import Sequence as Request
from llmrun.engine.llama.base import Entry, Run, RunLimit, RunRow
from llmrun.protocol.messages import AnswerRequest, Event, Finished, Started, TextDelta
from llmrun.protocol.params import Limits, SamplingParams

STEP_SECONDS = {1: 4.1e-3, 4: 5.3e-3, 8: 7.4e-3, 16: 8.1e-3, 32: 12e-3}
TOKEN_SECONDS = 1 / 8250  # of prefill
EXPORT_SECONDS = 0.08  # of a state that lies scattered in a pool
N_CTX = 8192
_N_ROWS = 64  # of random logits


class _LlamaBatch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("token", "embd", "pos", "n_seq_id", "seq_id", "logits")),
    )


class SimulatedDevice:
    """A context of llmrun.engine.llama.base whose computation takes time and nothing else."""

    cuts, has_checkpoints, can_copy, on_device, max_draft = True, False, True, True, 15

    def __init__(self, n_clients: int, *, unified: bool) -> None:
        self.vocabulary = FakeVocabulary()
        self.n_ctx, self.n_batch, self.n_seq_max, self.n_parked = N_CTX, 2048, n_clients, 16 if unified else 0
        self.n_cells, self.n_outputs = N_CTX * n_clients, max(16, n_clients + self.n_parked)
        self.shares_cells, self.splits_batches = unified, not unified
        self.busy_seconds = 0.0
        self._ready_at = 0.0
        logits = np.random.default_rng(1).standard_normal((_N_ROWS, N_VOCAB), dtype=np.float32)
        logits[:, 128:] = -np.inf  # each token has text
        self._logits = logits
        self._numbers = itertools.count()
        self._arrays = {name: (ctypes.c_int32 * _N_ROWS)() for name in ("token", "pos", "n_seq_id", "seq_id", "logits")}
        self._ids = (ctypes.c_void_p * _N_ROWS)(
            *(ctypes.addressof(self._arrays["seq_id"]) + 4 * i for i in range(_N_ROWS))
        )
        addresses = {name: ctypes.addressof(array) for name, array in self._arrays.items()}
        self._batch = _LlamaBatch(**{**addresses, "seq_id": ctypes.addressof(self._ids)})
        self._callbacks = (
            ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, _LlamaBatch)(
                lambda _, batch: self._submit(batch.n_tokens, 0)
            ),
            ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32)(lambda _, row: self.logits(row)),
            ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int32)(lambda _, token: token == END),
        )
        self._decoder = _native.Decoder(*(ctypes.cast(each, ctypes.c_void_p).value or 0 for each in self._callbacks))

    def _submit(self, n_rows: int, n_prefill: int) -> int:
        seconds = float(np.interp(n_rows, list(STEP_SECONDS), list(STEP_SECONDS.values()))) if n_rows else 0.0
        seconds += n_prefill * TOKEN_SECONDS
        now = time.perf_counter()
        if n_prefill and self._ready_at > now:  # llama.cpp copies the inputs when the device has read the last ones
            time.sleep(self._ready_at - now)
        self._ready_at = max(time.perf_counter(), self._ready_at) + seconds
        self.busy_seconds += seconds
        return 0

    def decode(self, batch: Sequence[Entry]) -> None:
        n_rows = sum(entry.wants_logits for entry in batch)
        self._submit(n_rows, len(batch) - n_rows)

    def synchronize(self) -> None:
        time.sleep(max(0.0, self._ready_at - time.perf_counter()))

    def logits(self, index: int) -> int:
        self.synchronize()
        return int(self._logits[next(self._numbers) % _N_ROWS].ctypes.data)

    def run(self, rows: Sequence[RunRow], limit: RunLimit) -> Run:
        overlaps = () if "overlaps" not in (_native.Decoder.run.__doc__ or "") else (self.on_device,)
        asked = [(row.entry, *row[1:]) for row in rows]
        _, _, failed, steps = self._decoder.run(1, 1, ctypes.addressof(self._batch), asked, *limit, *overlaps)
        return Run(steps, failed)

    def state(self, sequence_id: int) -> bytearray:
        time.sleep(EXPORT_SECONDS)
        return bytearray(b"x")

    def state_in_pieces(self, sequence_id: int, piece_bytes: int) -> Generator[None, None, bytearray]:
        yield
        return self.state(sequence_id)

    def state_bytes(self, sequence_id: int) -> int:
        return 1

    def write_state(self, sequence_id: int, path: Path) -> int:
        path.write_bytes(self.state(sequence_id))
        return 0

    def set_state(self, sequence_id: int, state: bytearray | memoryview, n_tokens: int) -> bool:
        time.sleep(EXPORT_SECONDS)
        return True

    def copy(self, *_: Any) -> bool:
        return True

    def forget(self, *_: Any) -> bool:
        return True

    can_forget = forget

    def choose_kv_layout(self, longest: int) -> bool:
        """Asked by the loop before layouts were chosen at the load."""
        return False


def measure(n_clients: int, n_prompt: int, n_answer: int, *, unified: bool, timelines: bool) -> None:
    """Answer each client twice, and print what the second round took."""
    device = SimulatedDevice(n_clients, unified=unified)
    engine = Engine(device)
    for round_number in range(2):
        times: dict[int, list[float]] = {client: [] for client in range(n_clients)}
        began, device.busy_seconds = time.perf_counter(), 0.0

        def note(events: list[Event], times: dict[int, list[float]] = times, began: float = began) -> float:
            now = time.perf_counter() - began
            for event in events:
                if isinstance(event, Started | TextDelta | Finished):
                    times[event.request].append(now)
            return 0.0

        for client in range(n_clients):
            prompt = [(client * 7 + round_number * 31 + i * (client + 3)) % 256 for i in range(n_prompt)]
            prompt[:2] = [round_number, client]
            sampler = SequenceSampler(SamplingParams(seed=client), device.vocabulary, prompt)
            engine.add(Request(client, prompt, sampler, AnswerRequest(limits=Limits(n_answer))))
        quiet = _native.CancelFlag()
        while engine.busy:
            note(engine.step(RunLimit(64, 0.0, quiet), note))
        seconds = time.perf_counter() - began
        while getattr(engine, "offload", bool)():
            pass
    gaps = sorted(b - a for each in times.values() for a, b in itertools.pairwise(each[1:]))
    first = [each[1] for each in times.values()]
    print(
        f"{n_clients:3} clients, {'pool   ' if unified else 'streams'}: {n_clients * n_answer / seconds:6.0f} t/s, "
        f"device busy {device.busy_seconds / seconds:4.0%}, TTFT p50 {statistics.median(first) * 1e3:5.0f} ms, "
        f"max {max(first) * 1e3:5.0f}, inter-token p50 {gaps[len(gaps) // 2] * 1e3:5.1f} ms, "
        f"p95 {gaps[len(gaps) * 95 // 100] * 1e3:5.1f}"
    )
    for client, each in times.items() if timelines else ():
        admitted, token, last = (f"{1e3 * value:6.0f}" for value in (each[0], each[1], each[-1]))
        print(f"      client {client:2}: admitted {admitted} ms, first token {token}, last {last}")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=30, help="tokens (default: %(default)s)")
    parser.add_argument("--answer", type=int, default=128, help="tokens (default: %(default)s)")
    parser.add_argument("--timelines", action="store_true", help="print each request's times")
    options = parser.parse_args()
    for n_clients in options.clients:
        for unified in (True, False):
            measure(n_clients, options.prompt, options.answer, unified=unified, timelines=options.timelines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
