"""Conversion by llama.cpp's own script, in the user's Python with torch: for what our own converter does not know.

Owns how the script is run and that nothing but a proven file gets the target's name; must not know architectures.
"""

from __future__ import annotations

import os
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from llmrun.convert.folder import Folder
from llmrun.convert.job import ConvertedModel, read_config
from llmrun.errors import DiskFullError, ModelNotFoundError, UsageError
from llmrun.gguf.header import Header
from llmrun.gguf.reader import read_header
from llmrun.gguf.rules import check, check_vocabulary
from llmrun.models.store.new_file import arriving, remove_leftovers
from llmrun.planning.hardware import probe
from llmrun.protocol.jobs.trial import TRIAL, TryFile
from llmrun.runner.runner import Runner

_MOST_LINES = 50
_MOST_WIDTH = 300


def convert_with(
    script: Path,
    folder: Path,
    target: Path,
    *,
    python: str = "",
    type: str = "",  # noqa: A002  # what the option is called
    on_line: Callable[[str], None] = lambda line: None,
) -> ConvertedModel:
    """Have llama.cpp's convert_hf_to_gguf.py make the file, then prove that it is good.

    Args:
        script: the convert_hf_to_gguf.py.
        folder: with config.json, safetensors files and a tokenizer.
        target: the file; what is there already is replaced once the new one is proven.
        python: the interpreter that has torch; empty for the virtual environment beside the script, else python3.
        type: of --outtype; empty leaves it to the script.
        on_line: gets each line that the script says; untrusted text.

    Raises:
        UsageError: the script fails; with its last words.
        BadModelError: what it wrote is not a whole model, or llama.cpp does not load it.
        ModelNotFoundError: the script, the folder or the interpreter is not there.
        DiskFullError: there is no room for the file.
    """
    if not script.is_file():
        hint = "it lies in the folder of llama.cpp's source"
        raise ModelNotFoundError(f"there is no script {str(script)!r}", hint=hint)
    source = Folder(folder)
    names = read_config(source).get("architectures")
    remove_leftovers(target.parent)
    with arriving(target) as path:
        command = [python or _python_of(script), str(script.absolute()), str(source.path.absolute())]
        _run([*command, "--outfile", str(path.absolute()), *(["--outtype", type] if type else [])], on_line)
        header = read_header(path)
        check(replace(header, path=target))  # the name that messages should say
        check_vocabulary(header)
        _try(path)
    return _converted(target, header, str(names[0]) if isinstance(names, list) and names else "unknown")


def _python_of(script: Path) -> str:
    """The interpreter of the virtual environment that lies beside the script, else the one that people call."""
    inside = Path("Scripts/python.exe" if os.name == "nt" else "bin/python")
    places = (script.absolute().parent / name / inside for name in (".venv", "venv"))
    return next((str(place) for place in places if place.is_file()), "python" if os.name == "nt" else "python3")


def _run(command: Sequence[str], on_line: Callable[[str], None]) -> None:
    said: deque[str] = deque(maxlen=_MOST_LINES)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        raise ModelNotFoundError(
            f"can't run {command[0]!r}", why=error.strerror or str(error), hint="name a Python: --python PATH"
        ) from error
    with process:
        try:
            for line in process.stdout or ():
                if line.strip():
                    said.append(line.strip()[:_MOST_WIDTH])
                    on_line(said[-1])
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        _refuse(command, process.returncode, list(said))


def _refuse(command: Sequence[str], status: int, said: list[str]) -> None:
    last = said[-1] if said else f"it ended with the status {status} and said nothing"
    if "No space left on device" in last:
        raise DiskFullError(f"{Path(command[1]).name} found no room for the file", why=last)
    if "ModuleNotFoundError" in last or "ImportError" in last:
        hint = f"{command[0]} has to have what the script needs; name another Python: --python PATH"
    else:
        hint = f"it runs without us too: {Path(command[1]).name} {command[2]}"
    raise UsageError(f"{Path(command[1]).name} failed", why=last, hint=hint)


def _try(path: Path) -> None:
    engine = Runner()
    try:
        engine.do(TRIAL, TryFile(str(path.absolute()), probe().usable_cores))
    finally:
        engine.close()


def _converted(target: Path, header: Header, architecture: str) -> ConvertedModel:
    n_parameters = sum(tensor.n_elements for tensor in header.tensors)
    size = header.file_size
    return ConvertedModel(target, architecture, header.quant, size, len(header.tensors), n_parameters, ())
