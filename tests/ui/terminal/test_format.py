"""Numbers as words."""

from __future__ import annotations

from llmrun.protocol.sizes import readable_size
from llmrun.ui.terminal.format import bar, milliseconds, rate, rate_of_bytes, rough, seconds


def test_figures() -> None:
    assert [rate(1234.56), rate(1234.56, whole=True), rate(9.94, whole=True)] == [
        "1,234.6 tokens/s",
        "1,235 tokens/s",
        "9.9 tokens/s",
    ]
    assert [seconds(0.214), seconds(59.99), seconds(59.999), seconds(3725)] == [
        "0.21 s",
        "59.99 s",
        "1 min 0 s",
        "1 h 2 min",
    ]
    assert milliseconds(0.0075) == "7.5 ms"
    figures = (0.2564, 6.04, 87.9, 322.5, 4_547.0, 12_345_678.0)
    assert [rough(each) for each in figures] == ["~0.26", "~6.0", "~88", "~320", "~4,500", "~12,000,000"]
    assert [readable_size(n_bytes) for n_bytes in (0, 999, 999_950, 98_900_000, 2.5e12, 5e15)] == [
        "0 B", "999 B", "1.0 MB", "98.9 MB", "2.5 TB", "5,000.0 TB",
    ]  # fmt: skip
    assert rate_of_bytes(12_340_000) == "12.3 MB/s"


def test_bars_tell_shares_apart() -> None:
    shares = (0.0, 0.0001, 0.012, 0.107, 0.2, 0.5, 0.93, 1.0)
    bars = [bar(share, 8) for share in shares]
    assert bars == ["", "▏", "▏", "▉", "█▋", "████", "███████▌", "████████"]
    assert len(bar(1.5e-9, 16)) == 1, "nothing is shown only for nothing"
