"""`llmrun watermark`: detection of the watermark of a key in a text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmrun.cli.command import Command, CommandGroup
from llmrun.cli.completion import complete_model
from llmrun.cli.options import JsonOption, YesOption
from llmrun.cli.sampling import read_key
from llmrun.errors import UsageError
from llmrun.lab.cli.tokenize import read_content, tokenize_with
from llmrun.lab.insight.watermark import ENOUGH_TOKENS, find_watermark
from llmrun.protocol.params import PARAMETERS
from llmrun.protocol.watermark import is_public, read_watermark
from llmrun.ui.terminal.output import Output

if TYPE_CHECKING:
    from llmrun.lab.insight.watermark import WatermarkFinding

app = typer.Typer(
    cls=CommandGroup,
    help="Detect the watermark of `--watermark` in a text.",
    add_completion=False,
    no_args_is_help=True,
)

_CERTAIN, _LIKELY = 1e-4, 1e-2


@app.callback()
def _group() -> None:
    """Detect the watermark of `--watermark` in a text."""


@app.command(cls=Command)
def detect(
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="File with the text, without its prompt; - is stdin.")],
    model: Annotated[
        str,
        typer.Option("--model", metavar="MODEL", help="Model that wrote the text.", autocompletion=complete_model),
    ],
    watermark_key: Annotated[
        str | None, typer.Option("--watermark-key", metavar="KEY", help=PARAMETERS["watermark_key"].help)
    ] = None,
    watermark: Annotated[
        str, typer.Option("--watermark", metavar="SCHEME", help="Watermark options that were used for the answer.")
    ] = "green",
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    """Test whether a text carries the watermark of a key.

    Only the model's vocabulary is loaded.
    """
    output = Output(json=json)
    if file != "-" and not Path(file).is_file():
        raise UsageError(f"there is no file {file!r}", hint="llmrun watermark detect - reads stdin")
    wanted, key = read_watermark(watermark, "--watermark"), read_key(watermark_key, "--watermark-key")
    _, found = tokenize_with(output, model, read_content(output, file), special=False, yes=yes)
    finding = find_watermark(wanted, key, found.n_vocab, [token.id for token in found.tokens])
    if not finding.judged:
        raise UsageError("the text is too short", why=f"none of its {finding.tokens} tokens can be judged")
    if json:
        output.result_json({"watermark": watermark, **finding._asdict(), "verdict": _verdict(finding)})
    else:
        _show(output, finding)
    if is_public(key):
        output.note("This key is published in documentation: anyone can use it, so the mark proves nothing.")


def _verdict(finding: WatermarkFinding) -> str:
    return "marked" if finding.p < _CERTAIN else "maybe" if finding.p < _LIKELY else "no sign"


def _show(output: Output, finding: WatermarkFinding) -> None:
    sentences = {
        "marked": "The text was almost certainly marked with this key",
        "maybe": "The text may have been marked with this key: one text in a hundred looks so by chance",
        "no sign": "There is no sign of this key",
    }
    output.sentence(f"{sentences[_verdict(finding)]}.")
    output.sentence(
        f"z {finding.z:.2f} · p {finding.p:.2g} · {finding.judged:,} of {finding.tokens:,} tokens judged · "
        f"{finding.hits / finding.judged:.1%} hits, {finding.expected:.0%} expected by chance"
    )
    if finding.judged < ENOUGH_TOKENS and finding.p >= _CERTAIN:
        output.note(f"Only {finding.judged} tokens could be judged: a text so short may be marked and not show it.")
