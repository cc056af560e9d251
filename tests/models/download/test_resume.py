"""The real command against a local hub: killed, started three at a time, and on a disk that is too small."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.gguf_writer import tiny_model
from support.stand_in_hub import COMMIT, Request, StandInHub, sha256, stand_in_hub

from llmrun.models.download.download import CONNECTIONS, LARGE_FILE_BYTES, arrived_bytes

NAME = "tiny-Q4_K_M.gguf"
SMALL = tiny_model() + random.Random(2).randbytes(20_000_000)
SECONDS = 180

pytestmark = [
    pytest.mark.usefixtures("package_on_path"),
    pytest.mark.skipif(os.name == "nt", reason="signals and limits of Unix"),
]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StandInHub]:
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "LLMRUN_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    with stand_in_hub() as server:
        monkeypatch.setenv("NO_PROXY", "*")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        server.files[NAME] = SMALL
        yield server


def start(limit: Callable[[], None] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "llmrun", "pull", "maker/tiny-GGUF:Q4_K_M"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
        preexec_fn=limit,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, stderr = process.communicate(timeout=SECONDS)
    assert "Traceback" not in stderr
    return process.returncode, stderr


def wait_until(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + SECONDS / 3
    while not condition():
        assert process.poll() is None, finish(process)
        assert time.monotonic() < ends, "nothing happens"
        time.sleep(0.002)


def blobs(tmp_path: Path) -> Path:
    return tmp_path / "hf" / "hub" / "models--maker--tiny-GGUF" / "blobs"


def installed(tmp_path: Path) -> bytes:
    return (blobs(tmp_path).parent / "snapshots" / COMMIT / NAME).read_bytes()


def bytes_of(requests: list[Request], size: int) -> int:
    """Return the number of requested bytes."""
    ranges = [request.headers.get("range", "").removeprefix("bytes=").partition("-") for request in requests]
    return sum((int(last) + 1 if last else size) - int(start or 0) for start, _, last in ranges)


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL], ids=["SIGINT", "SIGKILL"])
@pytest.mark.parametrize("large", [False, True], ids=["one connection", "several connections"])
def test_killed_twice(hub: StandInHub, tmp_path: Path, kind: signal.Signals, large: bool) -> None:
    """At 50 % and at 90 %, then to the end: what has arrived is not asked for again, but for what was read ahead."""
    content = SMALL if not large else SMALL + random.Random(3).randbytes(LARGE_FILE_BYTES - len(SMALL) + 1000)
    hub.files[NAME] = content
    hub.faults.bytes_per_second = len(content) / (4.0 if large else 2.0) / (2 if large else 1)
    blob = blobs(tmp_path) / sha256(content)
    for share in (0.5, 0.9):
        asked, kept = len(hub.transfers()), arrived_bytes(blob, len(content))
        process = start()
        wait_until(process, lambda share=share: arrived_bytes(blob, len(content)) >= share * len(content))
        process.send_signal(kind)
        status, stderr = finish(process)
        assert ("bytes are kept; run the same command to resume" in stderr) == (kind == signal.SIGINT)
        assert status == -kind
        assert not blob.exists()
        assert bytes_of(hub.transfers()[asked:], len(content)) <= 1.02 * len(content) - kept
    asked, kept = len(hub.transfers()), arrived_bytes(blob, len(content))
    assert finish(start())[0] == 0
    assert bytes_of(hub.transfers()[asked:], len(content)) <= 1.02 * len(content) - kept
    assert kept > 0.85 * len(content)
    assert installed(tmp_path) == content
    assert hub.most_busy == (CONNECTIONS if large else 1)
    assert [path.name for path in blobs(tmp_path).iterdir()] == [blob.name]


def test_three_at_once(hub: StandInHub, tmp_path: Path) -> None:
    hub.faults.bytes_per_second = len(SMALL) / 300
    first = start()
    wait_until(first, lambda: hub.sent > 0)
    others = [start(), start()]
    for process in others:
        assert process.stderr is not None
        assert any("downloaded by another process; waiting" in line for line in process.stderr)
    hub.faults.bytes_per_second = 0
    status, stderr = finish(first)
    assert (status, "waiting" in stderr) == (0, False)
    assert [finish(process)[0] for process in others] == [0, 0]
    assert len(hub.transfers()) == 1
    assert hub.sent == len(SMALL)
    assert installed(tmp_path) == SMALL


def test_largest_file_size(hub: StandInHub, tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_000, resource.RLIM_INFINITY))

    hub.faults.bytes_per_second = len(SMALL)
    status, stderr = finish(start(limit))
    assert status == 6
    assert f"{len(SMALL) - 5_000_000:,} more bytes are needed" in stderr
    assert "are free" in stderr
    assert_nothing_is_half_installed(tmp_path)
    assert finish(start())[0] == 0  # without the limit
    assert installed(tmp_path) == SMALL
    assert hub.sent <= 1.02 * len(SMALL)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 24 MB, where one can be mounted."""
    folder = tmp_path / "hf"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "llmrun-test", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("no disk can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_disk_fills_up_meanwhile(small_disk: Path, hub: StandInHub, tmp_path: Path) -> None:
    hub.faults.bytes_per_second = len(SMALL) / 2
    process = start()
    wait_until(process, lambda: hub.sent > 5_000_000)
    (small_disk / "other").write_bytes(bytes(10_000_000))
    status, stderr = finish(process)
    assert status == 6
    assert "more bytes are needed, 0 are free" in stderr
    assert_nothing_is_half_installed(tmp_path)
    (small_disk / "other").unlink()
    assert finish(start())[0] == 0
    assert installed(tmp_path) == SMALL
    assert hub.sent <= 1.02 * len(SMALL)


def assert_nothing_is_half_installed(tmp_path: Path) -> None:
    assert [path.name for path in blobs(tmp_path).iterdir()] == [sha256(SMALL) + ".part"]
    assert not (blobs(tmp_path).parent / "snapshots").exists()
