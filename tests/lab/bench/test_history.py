"""Results are kept whole, found by what a person would type, and handed over as files."""

from __future__ import annotations

import sqlite3
import stat
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from support.bench_rows import XEON, result, row

from llmrun.config import Settings, load_settings
from llmrun.errors import ResourceError, UsageError
from llmrun.lab.bench import history
from llmrun.lab.bench.history import History
from llmrun.lab.bench.results import BenchWarning


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("LLMRUN_HOME", str(tmp_path / "home"))
    return load_settings()


def test_what_is_kept_comes_back_with_every_sample(settings: Settings) -> None:
    kept = result(row("pp512", 120), row(warnings=(BenchWarning("noisy", "too noisy: ± 9%"),)))
    with History(settings) as opened:
        entry = opened.add(kept)
        assert opened.result(entry) == kept
    with History(settings) as again:
        (found,) = again.all()
        assert again.result(found) == kept
    assert found == entry
    assert (found.number, found.machine, found.version) == (1, "xeon-a42d42", "0.1.0")
    assert (found.models, found.tests) == (("llama:1b",), "pp512, tg128")
    assert found.time == 1_795_255_200, "when it was measured, not when it was kept"


def test_the_file_is_its_owners(settings: Settings) -> None:
    with History(settings) as opened:
        opened.add(result())
    path = settings.state_dir / history.FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()


@pytest.fixture
def filled(settings: Settings) -> History:
    """1: Xeon 0.1.0, 2: Ryzen 0.2.0, 3: Xeon 0.2.0 with another model, measured before 2."""
    opened = History(settings)
    ryzen = replace(XEON, name="Ryzen")
    opened.add(result(row(test_time="2026-11-01T00:00:00Z")))
    opened.add(result(row(machine=ryzen, version="0.2.0", test_time="2026-11-03T00:00:00Z"), machine=ryzen))
    opened.add(result(row(version="0.2.0", model="owner/smollm2-Q4_1.gguf", test_time="2026-11-02T00:00:00Z")))
    return opened


@pytest.mark.parametrize(
    ("which", "numbers"),
    [
        ("1", [1]), ("3", [3]), ("last", [2]), ("xeon-a42d42", [3, 1]), ("RYZEN", [2]), ("0.2.0", [2, 3]),
        ("0.1.0", [1]), ("llama:1b", [2, 1]), ("llama", [2, 1]), ("smollm2", [3]), ("owner/smol", [3]),
    ],
)  # fmt: skip
def test_results_are_found_by_number_machine_version_and_model(filled: History, which: str, numbers: list[int]) -> None:
    assert [entry.number for entry in filled.select(which)] == numbers


def test_lists_can_be_narrowed(filled: History) -> None:
    assert [entry.number for entry in filled.all()] == [2, 3, 1], "the newest first"
    assert [entry.number for entry in filled.all(machine="xeon-a42d42", version="0.2.0")] == [3]
    assert filled.all(model="nothing") == []


def test_numbers_are_never_given_twice(filled: History) -> None:
    assert filled.remove("3").number == 3
    assert filled.add(result()).number == 4
    assert [entry.number for entry in filled.all()] == [4, 2, 1]


@pytest.mark.parametrize("which", ["9", "last month", "ryzn", ""])
def test_what_is_not_there_is_said_with_what_is(filled: History, which: str) -> None:
    with pytest.raises(UsageError) as raised:
        filled.select(which)
    assert raised.value.why.startswith("numbers are 1 to 3")
    assert raised.value.hint.endswith("llmrun bench history shows all")
    if which == "ryzn":
        assert raised.value.hint.startswith("did you mean Ryzen?")


def test_an_empty_history_says_how_to_begin(settings: Settings) -> None:
    with History(settings) as opened, pytest.raises(UsageError, match="no earlier bench result") as raised:
        opened.select("last")
    assert raised.value.hint == "llmrun bench MODEL makes one"


def test_a_result_removed_by_somebody_else_is_an_error_in_words(filled: History, settings: Settings) -> None:
    entry = filled.find("1")
    with History(settings) as other:
        other.remove("1")
    with pytest.raises(UsageError):
        filled.result(entry)


def test_many_write_at_the_same_time(settings: Settings) -> None:
    def keep() -> None:
        with History(settings) as opened:
            for _ in range(5):
                opened.add(result())

    threads = [threading.Thread(target=keep) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with History(settings) as opened:
        assert sorted(entry.number for entry in opened.all()) == list(range(1, 21))


def test_a_newer_file_is_left_alone(settings: Settings) -> None:
    History(settings).close()
    connection = sqlite3.connect(settings.state_dir / history.FILE)
    connection.execute("PRAGMA user_version=99")
    connection.close()
    with pytest.raises(UsageError, match="newer llmrun"):
        History(settings)


def test_a_damaged_file_is_moved_aside(settings: Settings) -> None:
    settings.state_dir.mkdir(parents=True)
    path = settings.state_dir / history.FILE
    damaged = b"this is not a database, but long enough to be one" * 200
    path.write_bytes(damaged)
    with History(settings) as opened:
        assert str(path) in opened.note
        assert opened.add(result()).number == 1
    (aside,) = path.parent.glob("bench.damaged-*.db")
    assert aside.read_bytes() == damaged


def test_a_folder_that_can_not_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").write_text("a file")
    monkeypatch.setenv("LLMRUN_HOME", str(tmp_path / "home"))
    with pytest.raises(ResourceError, match="can't read or write"):
        History(load_settings())
