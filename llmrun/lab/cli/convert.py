"""`llmrun convert`: a Hugging Face folder converted to a GGUF file."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmrun.cli.completion import complete_words
from llmrun.cli.options import JsonOption, OutputFileYesOption, check_output_file
from llmrun.config import load_settings
from llmrun.errors import UsageError
from llmrun.gguf.pooling import command_for
from llmrun.gguf.reader import read_header
from llmrun.lab.convert.job import convert_folder, stored_type
from llmrun.lab.convert.llama_cpp_converter import convert_with
from llmrun.lab.convert.peft import convert_adapter
from llmrun.models.location import locate, not_on_disk
from llmrun.protocol.sizes import readable_size
from llmrun.ui.terminal.activity import Activity, download_progress
from llmrun.ui.terminal.output import Output

if TYPE_CHECKING:
    from llmrun.lab.convert.job import ConvertedModel


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
            help="Type of the weights. Default: as they are stored.",
            autocompletion=complete_words("f16", "bf16", "f32", "q8_0"),
        ),
    ] = "",
    script: Annotated[
        Path | None,
        typer.Option(
            "--with",
            metavar="convert_hf_to_gguf.py",
            help="Run llama.cpp's own converter instead, in a Python with torch; the result is verified.",
        ),
    ] = None,
    python: Annotated[
        str,
        typer.Option(metavar="PATH", help="Python for --with. Default: the .venv beside the script, else python3."),
    ] = "",
    base: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="Base model of a LoRA adapter (PEFT folder): a folder, GGUF file or name.",
        ),
    ] = "",
    yes: OutputFileYesOption = False,
    json: JsonOption = False,
) -> None:
    """Convert a Hugging Face folder to a GGUF file.

    The folder may also hold a LoRA adapter saved by PEFT: see llmrun help lora. Needs neither torch nor transformers,
    except for --with.
    """
    output = Output(json=json)
    kind = type_.lower()
    if python and not script:
        raise UsageError("--python is for --with", hint="--with PATH/convert_hf_to_gguf.py")
    is_adapter = (folder / "adapter_config.json").is_file()
    if base and not is_adapter:
        raise UsageError("--base is for LoRA adapters", why=f"{str(folder)!r} has no adapter_config.json")
    target = _target(folder, out, kind, is_known=script is None, is_adapter=is_adapter)
    more = [*(["--with", str(script)] if script else []), *(["--base", base] if base else [])]
    again = ["llmrun", "convert", "-y", str(folder), str(target), *more]
    check_output_file(output, target, yes=yes, hint=shlex.join(again))
    if is_adapter:
        _show(output, _convert_adapter(output, folder, _base(base), target, kind), is_adapter=True)
    elif script:
        _show(output, _convert_with(output, script, python, folder, target, kind))
    else:
        _show(output, _convert(output, folder, target, kind))


def _convert(output: Output, folder: Path, target: Path, kind: str) -> ConvertedModel:
    with download_progress(output, target.name) as on_progress:
        return convert_folder(folder, target, type=kind, on_progress=on_progress)


def _convert_with(output: Output, script: Path, python: str, folder: Path, target: Path, kind: str) -> ConvertedModel:
    with Activity(output) as activity:
        activity.show(f"{script.name} converts {folder}", begins=True)
        return convert_with(script, folder, target, python=python, type=kind, on_line=activity.show)


def _convert_adapter(output: Output, folder: Path, base: Path | None, target: Path, kind: str) -> ConvertedModel:
    with download_progress(output, target.name) as on_progress:
        return convert_adapter(folder, base, target, type=kind, on_progress=on_progress)


def _base(name: str) -> Path | None:
    """Return the folder or file of a base model; None without a name.

    Raises:
        ModelNotFoundError: the model is not on this disk.
    """
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    path = Path(name) if name.endswith(".json") else locate(name, load_settings()).path
    if path is None:
        raise not_on_disk(name)
    return path


def _show(output: Output, done: ConvertedModel, *, is_adapter: bool = False) -> None:
    for note in done.notes:
        output.note(f"note: {note}")
    if output.json:
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
        use = f"llmrun run MODEL --lora {path}" if is_adapter else command_for(read_header(done.path), path)
        output.note(f"{path}: {done.type}, {readable_size(done.n_bytes)}; try: {use}")


def _target(folder: Path, out: Path | None, kind: str, *, is_known: bool, is_adapter: bool) -> Path:
    """Return the output file: the given name, or the folder's name with the type, in the given folder or this one.

    Args:
        is_known: our own converter supports the architecture.
        is_adapter: requests use the file name, so it has no type.

    Raises:
        UsageError: the name is not that of a GGUF file.
    """
    if out is None or out.is_dir():
        kind = "" if is_adapter else kind or (stored_type(folder) if is_known else "")
        return (out or Path()) / ("-".join(filter(None, (folder.resolve().name, kind.upper()))) + ".gguf")
    if out.suffix.lower() != ".gguf":
        raise UsageError(
            f"{str(out)!r} does not end in .gguf", hint=shlex.join(["llmrun", "convert", str(folder), f"{out}.gguf"])
        )
    return out
