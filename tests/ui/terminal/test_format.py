"""Numbers as words."""

from __future__ import annotations

from llmrun.ui.terminal.format import milliseconds, rate, rate_of_bytes, seconds, size


def test_figures() -> None:
    assert [rate(1234.56), rate(1234.56, whole=True), rate(9.94, whole=True)] == [
        "1,234.6 t/s",
        "1,235 t/s",
        "9.9 t/s",
    ]
    assert [seconds(0.214), seconds(59.99), seconds(59.999), seconds(3725)] == [
        "0.21 s",
        "59.99 s",
        "1 min 0 s",
        "1 h 2 min",
    ]
    assert milliseconds(0.0075) == "7.5 ms"
    assert [size(0), size(999), size(999_950), size(98_900_000), size(2.5e12), size(5e15)] == [
        "0 B", "999 B", "1.0 MB", "98.9 MB", "2.5 TB", "5,000.0 TB",
    ]  # fmt: skip
    assert rate_of_bytes(12_340_000) == "12.3 MB/s"
