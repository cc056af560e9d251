"""Tables: aligned text in a pipe, Rich on a terminal, foreign text harmless in both."""

from __future__ import annotations

import io

from llmrun.doctor import Finding
from llmrun.ui.output import Output
from llmrun.ui.tables import (
    CatalogueRow,
    Column,
    InstalledRow,
    show_catalogue,
    show_facts,
    show_findings,
    show_installed,
    show_table,
)

INSTALLED = [
    InstalledRow("smollm2:135m", 98_900_000, "Q4_1", "owner/SmolLM2-135M-Instruct-GGUF"),
    InstalledRow("日本\x1b[2J\nx", 4_700_000_000, "Q4_K_M", "[bold]owner[/foo]/array"),
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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


def test_installed_in_a_pipe() -> None:
    output = pipe()
    show_installed(output, INSTALLED)
    assert written(output) == (
        "NAME             SIZE  QUANT   FROM\n"
        "smollm2:135m  98.9 MB  Q4_1    owner/SmolLM2-135M-Instruct-GGUF\n"
        "日本 x         4.7 GB  Q4_K_M  [bold]owner[/foo]/array\n"
    )


def test_installed_on_a_terminal() -> None:
    output = terminal()
    show_installed(output, INSTALLED)
    text = written(output)
    assert "\x1b[1m" in text
    assert "\x1b[2J" not in text
    assert "[bold]owner[/foo]/array" in text


def test_no_colour_on_a_terminal_that_wants_none() -> None:
    output = terminal(NO_COLOR="1")
    show_installed(output, INSTALLED)
    show_findings(output, [Finding("x", "problem", "")])
    assert "\x1b" not in written(output)


def test_narrow_terminal_loses_no_text() -> None:
    output = terminal(NO_COLOR="1")
    show_table(output, [Column("A")], [["x" * 300]])
    assert written(output).count("x") == 300


def test_catalogue() -> None:
    output = pipe()
    show_catalogue(output, [CatalogueRow("smollm2", "135M", "Q4_1", 98_362_432, "Apache-2.0", True)])
    assert written(output) == (
        "NAME     PARAMETERS  QUANT     SIZE  LICENCE     INSTALLED\n"
        "smollm2        135M  Q4_1   98.4 MB  Apache-2.0  yes\n"
    )


def test_facts_have_no_heading() -> None:
    output = pipe()
    show_facts(output, [("context", 8192), ("template", True), ("name", "a\x07b")], title="x\x1b[m")
    assert written(output) == "x\ncontext   8,192\ntemplate  yes\nname      ab\n"


def test_findings_with_their_hints() -> None:
    findings = [Finding("memory", "ok", "24 GB"), Finding("threads", "problem", "busy", "llmrun run -t 1")]
    output = pipe()
    show_findings(output, findings)
    assert written(output) == (
        "ok       memory   24 GB\nproblem  threads  busy\n                  try: llmrun run -t 1\n"
    )
    output = terminal()
    show_findings(output, findings)
    assert "\x1b[1;31mproblem" in written(output)


def test_empty_table_is_its_heading() -> None:
    output = pipe()
    show_table(output, [Column("A"), Column("B")], [])
    assert written(output) == "A  B\n"
