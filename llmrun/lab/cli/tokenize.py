"""`llmrun tokenize`: a text as tokens, their merges, and the cost of each script."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmrun.cli.completion import complete_model
from llmrun.cli.loading import find_model
from llmrun.cli.options import JsonOption, ModelArgument, YesOption
from llmrun.errors import UsageError
from llmrun.lab.insight.merges import merge_rule
from llmrun.lab.insight.tokens import script_counts, tokenize_text
from llmrun.lab.views.tokens import show_compared, show_merges, show_scripts, show_tokens
from llmrun.protocol.sizes import readable_size
from llmrun.runner import client
from llmrun.storage import decode_text
from llmrun.ui.terminal.output import Output

if TYPE_CHECKING:
    from llmrun.lab.insight.merges import MergeNode
    from llmrun.lab.insight.tokens import TokenizedFile

_MOST_BYTES = 4 << 20  # of a text; its tokens cross the pipe in one frame


def tokenize(
    model: ModelArgument,
    text: Annotated[str, typer.Argument(metavar="TEXT|FILE|-", help="Text, or name of a file; - is stdin.")],
    merges: Annotated[bool, typer.Option("--merges", help="Show the merges of each token as a tree.")] = False,
    table: Annotated[bool, typer.Option("--table", help="Print one row per token, for long texts too.")] = False,
    compare: Annotated[
        str,
        typer.Option(
            "--compare", metavar="MODEL", help="Compare with the tokens of this model.", autocompletion=complete_model
        ),
    ] = "",
    plain: Annotated[
        bool, typer.Option("--plain", help="Treat control tokens in the text as plain text; add none.")
    ] = False,
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    """Split a text into the tokens of a model.

    Only the vocabulary is loaded. In a pipe, the token ids are printed, one per line.
    """
    output = Output(json=json)
    content = read_content(output, text)
    sides = [
        tokenize_with(output, name, content, special=not plain, yes=yes) for name in [model, *filter(None, [compare])]
    ]
    if json:
        found = [_as_json(name, each, merges=merges) for name, each in sides]
        output.result_json(found if compare else found[0])
    elif compare:
        show_compared(output, [(name, each.tokens, script_counts(each.tokens)) for name, each in sides])
    elif output.stdout_is_terminal or merges or table:
        _show(output, *sides[0], merges=merges, table=table)
    elif sides[0][1].tokens:
        output.text("\n".join(str(token.id) for token in sides[0][1].tokens))


def _show(output: Output, name: str, found: TokenizedFile, *, merges: bool, table: bool) -> None:
    if merges:
        show_merges(output, merge_rule(found.path), found.tokens)
        return
    show_tokens(output, found.tokens, table=table)
    output.text("")
    show_scripts(output, name, found.tokens, script_counts(found.tokens), found.n_vocab)


def tokenize_with(output: Output, name: str, text: str, *, special: bool, yes: bool) -> tuple[str, TokenizedFile]:
    spec, path = find_model(output, name, yes=yes)
    return spec.name, tokenize_text(client.prestarted(), path, text, special=special)


def read_content(output: Output, text: str) -> str:
    """Return the text of TEXT|FILE|-.

    Raises:
        UsageError: a file can't be read, or is too long.
    """
    if text == "-":
        stdin: Any = getattr(output.stdin, "buffer", None)
        data = stdin.read(_MOST_BYTES + 1) if stdin else output.stdin.read().encode()
    elif os.path.isfile(text):  # noqa: PTH113 - pathlib raises where a text is no file's name
        try:
            with Path(text).open("rb") as file:
                data = file.read(_MOST_BYTES + 1)
        except OSError as error:
            raise UsageError(f"can't read {text!r}", why=error.strerror or str(error)) from None
        output.note(f"the text of the file {text}")
    else:
        return os.fsencode(text).decode("utf-8", "replace")
    if len(data) > _MOST_BYTES:
        raise UsageError(
            f"the text is longer than {readable_size(_MOST_BYTES)}", hint=f"head -c {_MOST_BYTES >> 20}M FILE"
        )
    decoded = decode_text(data, "the text of stdin can't be read" if text == "-" else f"can't read {text!r}")
    if decoded.note:
        output.note(decoded.note)
    return decoded.text


def _as_json(name: str, found: TokenizedFile, *, merges: bool) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "model": name,
        "vocabulary": found.n_vocab,
        "tokens": [
            {
                "id": token.id,
                "text": token.data.decode("utf-8", "replace"),
                "bytes": token.data.hex(),
                "control": token.is_control,
            }
            for token in found.tokens
        ],
        "scripts": [asdict(count) for count in script_counts(found.tokens)],
    }
    rule = merge_rule(found.path) if merges else None
    if rule is not None:
        origins = rule.origins([token.id for token in found.tokens])
        trees = [{"tokens": origin.n_tokens, "tree": origin.node and _tree(origin.node)} for origin in origins]
        facts["merges"] = {"rule": rule.name, "words": rule.words, "trees": trees}
    return facts


def _tree(node: MergeNode) -> dict[str, Any]:
    text = node.data.decode("utf-8", "replace")
    return {"text": text, "bytes": node.data.hex(), "value": node.value, "parts": [_tree(part) for part in node.parts]}
