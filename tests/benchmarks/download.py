"""Downloads from a local stand-in of the hub: speed by number of connections, and how soon a stall is noticed.

    python tests/benchmarks/download.py [--megabytes 256] [--rate 20] [--runs 3] [--stall]

"throttled" is a server that hands out --rate MB/s per connection, as many do; "free" is as fast as this machine, so
that more connections can only cost. Server and client share the cores.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.stand_in_hub import COMMIT, StandInHub, sha256, stand_in_hub

from llmrun.errors import NetworkError
from llmrun.models.download import download as module
from llmrun.models.download.transfer import PATIENT, RetryPolicy, TransferSource

CONNECTIONS = (1, 2, 4, 8)


def fetch(hub: StandInHub, source: TransferSource, patience: RetryPolicy = PATIENT) -> float:
    """Seconds that a download takes; sent bytes beyond the file's are an error."""
    hub.sent = 0
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        module.download(source, Path(folder, "file"), lock=Path(folder, "lock"), patience=patience)
        took = time.perf_counter() - began
    if hub.sent != source.size:
        sys.exit(f"{hub.sent} bytes were sent for {source.size}")
    return took


def speeds(hub: StandInHub, source: TransferSource, runs: int) -> dict[int, list[float]]:
    """MB/s of each run, by number of connections; they take turns."""
    found: dict[int, list[float]] = {count: [] for count in CONNECTIONS}
    for _ in range(runs):
        for count in CONNECTIONS:
            module.CONNECTIONS = count
            found[count].append((source.size or 0) / 1e6 / fetch(hub, source))
    return found


def show(title: str, found: dict[int, list[float]]) -> None:
    """One line for each number of connections."""
    for count, values in found.items():
        print(f"{title:10} {count} connections: {statistics.median(values):7.1f} MB/s   ({min(values):.1f} at least)")


def stall(hub: StandInHub, source: TransferSource, *, drip: bool) -> float:
    """Seconds until a server that has fallen silent after a megabyte is given up, with the usual patience."""
    hub.faults.stall_after, hub.faults.drip = 1_000_000, drip
    began = time.perf_counter()
    try:
        fetch(hub, source, RetryPolicy(retries=0))
    except NetworkError as error:
        print(f"stall ({'drip' if drip else 'silence'}): {time.perf_counter() - began:.1f} s until: {error}")
    return time.perf_counter() - began


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rate", type=float, default=20.0, help="MB/s of a throttled connection")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--stall", action="store_true", help="also how soon a stall is noticed: a minute more")
    options = parser.parse_args()
    os.environ["NO_PROXY"] = "*"
    content = random.Random(1).randbytes(options.megabytes * 1_000_000)
    with stand_in_hub() as hub:
        hub.files["file"] = content
        url = f"{hub.url}/{hub.repository}/resolve/{COMMIT}/file"
        source = TransferSource(url, "file", sha256(content), len(content))
        show("free", speeds(hub, source, options.runs))
        hub.faults.bytes_per_second = options.rate * 1e6
        show("throttled", speeds(hub, source, options.runs))
        hub.faults.bytes_per_second = 0
        if options.stall:
            stall(hub, source, drip=False)
            stall(hub, source, drip=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
