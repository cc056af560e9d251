"""Files of measurements, written by several threads and processes."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from llmrun.planning import measurement_cache


def test_no_thread_loses_what_another_one_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = measurement_cache.entries

    def slowly(path: Path) -> list[dict[str, Any]]:
        found = read(path)
        time.sleep(0.01)
        return found

    path = tmp_path / "new folder" / "steps.json"
    with monkeypatch.context() as patched:
        patched.setattr(measurement_cache, "entries", slowly)
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda number: measurement_cache.keep(path, {"n": number}, {"of": number}), range(16)))
            list(threads.map(lambda number: measurement_cache.drop(path, {"n": number}), range(8)))
    assert sorted(entry["of"] for entry in read(path)) == list(range(8, 16))
