"""`llmrun convert`: a Hugging Face folder becomes a GGUF file."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from llmrun.cli.completion import complete_words
from llmrun.cli.options import JsonOption
from llmrun.errors import CancelledError, UsageError
from llmrun.storage import check_target
from llmrun.ui.terminal.output import Output


def convert(
    folder: Annotated[Path, typer.Argument(metavar="HF_DIR", help="Folder with config.json and .safetensors files.")],
    out: Annotated[
        Path | None, typer.Argument(metavar="[OUT.gguf]", help="Default: FOLDER-TYPE.gguf in the current folder.")
    ] = None,
    type_: Annotated[
        str,
        typer.Option(
            "--type",
            metavar="f16|bf16|f32|q8_0",
            help="Of the weights. Default: as they are stored.",
            autocompletion=complete_words("f16", "bf16", "f32", "q8_0"),
        ),
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Replace OUT without asking.")] = False,
    json: JsonOption = False,
) -> None:
    """Make a GGUF file from a Hugging Face folder.

    Needs neither torch nor transformers.
    """
    from llmrun.convert.job import convert_folder
    from llmrun.ui.terminal.format import size
    from llmrun.ui.terminal.progress import download_progress

    output = Output(json=json)
    kind = type_.lower()
    target = _target(folder, out, kind)
    _ask(output, target, yes=yes, command=shlex.join(["llmrun", "convert", "-y", str(folder), str(target)]))
    with download_progress(output, target.name) as on_progress:
        done = convert_folder(folder, target, type=kind, on_progress=on_progress)
    for note in done.notes:
        output.note(f"note: {note}")
    if json:
        output.result_json(
            {
                "path": str(done.path),
                "architecture": done.architecture,
                "type": done.type,
                "n_bytes": done.n_bytes,
                "n_tensors": done.n_tensors,
                "n_parameters": done.n_parameters,
                "notes": list(done.notes),
            }
        )
    else:
        path = shlex.quote(str(done.path))
        output.note(f'{path}: {done.type}, {size(done.n_bytes)}; try: llmrun run {path} "Hello"')


def _target(folder: Path, out: Path | None, kind: str) -> Path:
    """The file to write: what was named, or the folder's name with the type, in the folder that was named or here.

    Raises:
        UsageError: it can't be a model's file.
    """
    if out is None or out.is_dir():
        from llmrun.convert.job import stored_type

        name = f"{folder.resolve().name}-{(kind or stored_type(folder)).upper()}.gguf"
        return (out or Path()) / name
    if out.suffix.lower() != ".gguf":
        raise UsageError(
            f"{str(out)!r} does not end in .gguf", hint=shlex.join(["llmrun", "convert", str(folder), f"{out}.gguf"])
        )
    check_target(out)
    return out


def _ask(output: Output, target: Path, *, yes: bool, command: str) -> None:
    if yes or not target.exists():
        return
    if not output.can_ask:
        raise UsageError(f"{str(target)!r} is there already", why="nobody can be asked here", hint=command)
    if not output.confirm(f"{target} is there already. Replace it?"):
        raise CancelledError("nothing was written")
