"""`llmrun quantize` beside llama-quantize: the same bytes, and what that takes.

    python quantize.py equal LLAMA_QUANTIZE SOURCE.gguf [TYPE ...]
    python quantize.py cost  LLAMA_QUANTIZE SOURCE.gguf [TYPE ...]

`equal` makes every type twice and compares the files byte for byte, types that need one with an importance matrix of
made-up numbers. `cost` takes turns and gives the ratios of time and peak memory; of llmrun the front and the engine
count together. Its files are verified and safe on the disk in the end, those of llama-quantize are not.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGUFWriter

from llmrun.gguf.reader import read_header
from llmrun.lab.quantize.types import FILE_TYPES, NEED_IMATRIX

_POLL_SECONDS = 0.005
_ROUNDS = 5


def main() -> None:
    """Compare, and print a line for each type."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("equal", "cost"))
    parser.add_argument("llama_quantize", type=lambda text: Path(text).resolve())
    parser.add_argument("source", type=Path)
    parser.add_argument("types", nargs="*", default=[])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=_ROUNDS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.source.resolve().parent) as folder:
        pair = _Pair(arguments.llama_quantize, arguments.source.resolve(), Path(folder), arguments.threads)
        if arguments.mode == "equal":
            sys.exit(_compare(pair, arguments.types or list(FILE_TYPES)))
        _measure(pair, arguments.types or ["Q4_0", "Q8_0", "Q4_K_M"], arguments.rounds)


class _Pair:
    """The two programs, the same work for both."""

    def __init__(self, llama_quantize: Path, source: Path, folder: Path, threads: int) -> None:
        self._llama_quantize, self._source, self.folder, self._threads = llama_quantize, source, folder, threads
        self.ours, self.theirs = folder / "ours.gguf", folder / "theirs.gguf"

    def our_command(self, kind: str) -> list[str]:
        imatrix = ["--imatrix", str(self._imatrix())] if kind in NEED_IMATRIX else []
        options = ["--type", kind, "--threads", str(self._threads), "-y", *imatrix]
        return [sys.executable, "-m", "llmrun", "quantize", str(self._source), str(self.ours), *options]

    def their_command(self, kind: str) -> list[str]:
        # It writes this name into the file as it was typed, llmrun without the folders.
        imatrix = ["--imatrix", self._imatrix().name] if kind in NEED_IMATRIX else []
        program = str(self._llama_quantize)
        files = [str(self._source), str(self.theirs), kind, str(self._threads)]
        return [program, "--allow-requantize", *imatrix, *files]

    @property
    def environment(self) -> dict[str, str]:
        folder = str(self._llama_quantize.parent)
        return {**os.environ, "LD_LIBRARY_PATH": folder}

    def _imatrix(self) -> Path:
        """An importance matrix for every tensor, of made-up numbers."""
        path = self.folder / "made-up.imatrix.gguf"
        if path.exists():
            return path
        random = np.random.default_rng(1)
        writer = GGUFWriter(path, "imatrix")
        writer.add_type("imatrix")
        writer.add_array("imatrix.datasets", ["made up"])
        writer.add_uint32("imatrix.chunk_count", 3)
        writer.add_uint32("imatrix.chunk_size", 512)
        for tensor in read_header(self._source).tensors:
            if len(tensor.shape) > 1 and tensor.name != "token_embd.weight":
                experts = tensor.shape[2] if len(tensor.shape) > 2 else 1
                sums = random.gamma(1.0, 100.0, (experts, tensor.shape[0])).astype(np.float32)
                writer.add_tensor(f"{tensor.name}.in_sum2", sums)
                writer.add_tensor(f"{tensor.name}.counts", np.full((experts, 1), 1536, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def _compare(pair: _Pair, kinds: list[str]) -> int:
    different = 0
    for kind in kinds:
        theirs = subprocess.run(
            pair.their_command(kind), capture_output=True, text=True, env=pair.environment, cwd=pair.folder
        )
        ours = subprocess.run(pair.our_command(kind), capture_output=True, text=True, cwd="/")
        if "already: nothing would change" in ours.stderr:
            print(f"{kind}: the source is of this type")
            continue
        if theirs.returncode or ours.returncode:
            print(f"{kind}: llama-quantize {theirs.returncode}, llmrun {ours.returncode}: {ours.stderr.strip()[-300:]}")
            different += not (theirs.returncode and ours.returncode)
            continue
        same = _same(pair.ours, pair.theirs)
        different += not same
        print(f"{kind}: {'equal' if same else 'DIFFERENT'}, {pair.ours.stat().st_size:,} bytes", flush=True)
    print(f"{different} of {len(kinds)} different")
    return min(different, 1)


def _same(first: Path, second: Path) -> bool:
    return first.stat().st_size == second.stat().st_size and all(
        a == b for a, b in zip(_blocks(first), _blocks(second), strict=True)
    )


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            yield block


@dataclass(frozen=True)
class Cost:
    """Of one run. seconds: wall clock; processor: seconds of all cores; peak: bytes of all its processes together."""

    seconds: float
    processor: float
    peak: int

    def __str__(self) -> str:
        return f"{self.seconds:.2f} s ({self.processor:.2f} s of processor), {self.peak >> 20} MiB"


def _measure(pair: _Pair, kinds: list[str], rounds: int) -> None:
    for kind in kinds:
        runs: list[tuple[Cost, Cost]] = []
        for turn in range(rounds):
            theirs = _run(pair.their_command(kind), pair.environment) if turn % 2 else None
            ours = _run(pair.our_command(kind), dict(os.environ))
            theirs = theirs or _run(pair.their_command(kind), pair.environment)
            runs.append((ours, theirs))
            print(f"  {kind}: llmrun {ours}; llama-quantize {theirs}", flush=True)
        ratios = [
            statistics.median(getattr(ours, what) / getattr(theirs, what) for ours, theirs in runs)
            for what in ("seconds", "processor", "peak")
        ]
        print(f"{kind}: {ratios[0]:.3f}x the time, {ratios[1]:.3f}x the processor time, {ratios[2]:.2f}x the memory")


def _run(command: list[str], environment: dict[str, str]) -> Cost:
    """Run to the end, and look at the memory meanwhile."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    process = subprocess.Popen(
        command, env=environment, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    peak = 0
    over = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(_POLL_SECONDS):
            peak = max(peak, sum(map(_resident, [process.pid, *_children(process.pid)])))

    thread = threading.Thread(target=watch)
    thread.start()
    _, errors = process.communicate()
    seconds = time.perf_counter() - began
    over.set()
    thread.join()
    if process.returncode:
        raise SystemExit(f"{command} failed: {errors.decode()[-500:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Cost(seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, peak)


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


if __name__ == "__main__":
    main()
