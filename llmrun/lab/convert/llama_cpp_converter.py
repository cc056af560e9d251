"""Conversion by llama.cpp's own script in the user's Python with torch, for models that llmrun's converter refuses.

The script's file is verified before it gets its name.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from llmrun.errors import DiskFullError, ModelNotFoundError, UsageError
from llmrun.gguf.reader import read_header
from llmrun.gguf.rules import check, check_vocabulary
from llmrun.lab.convert.folder import Folder
from llmrun.lab.convert.job import ConvertedModel, read_config
from llmrun.lab.convert.sentence_transformers import (
    dense_modules,
    pooling_type,
    prompt_notes,
    read_modules,
    refuse_others,
)
from llmrun.models.store.new_file import arriving, remove_leftovers
from llmrun.planning.hardware import probe
from llmrun.protocol.jobs.quantize import TRIAL, TryFile
from llmrun.runner.client import EngineClient

_MAX_LINES = 50
_DENSE = re.compile(r"dense_[23]\.weight")
_MAX_WIDTH = 300


def convert_with(
    script: Path,
    folder: Path,
    target: Path,
    *,
    python: str = "",
    type: str = "",  # noqa: A002  # what the option is called
    on_line: Callable[[str], None] = lambda line: None,
) -> ConvertedModel:
    """Convert with llama.cpp's convert_hf_to_gguf.py, and verify the file.

    Args:
        script: path of convert_hf_to_gguf.py.
        python: the interpreter that has torch; empty for the virtual environment beside the script, else python3.
        type: value of --outtype; empty for the script's default.
        on_line: called with each line of the script's output; untrusted text.

    Raises:
        UsageError: the script fails; the error has its last line.
        BadModelError: the script's file is not a complete model, or llama.cpp can't load it.
        ModelNotFoundError: the script, the folder or the interpreter is missing.
        DiskFullError: there is no room for the file.
    """
    if not script.is_file():
        hint = "it is in llama.cpp's source folder"
        raise ModelNotFoundError(f"there is no script {str(script)!r}", hint=hint)
    source = Folder(folder)
    names = read_config(source).get("architectures")
    modules = read_modules(source)
    refuse_others(modules, has_dense=True)
    dense, (_, notes) = dense_modules(source, modules), pooling_type(source, modules)
    notes += prompt_notes(source)
    remove_leftovers(target.parent)
    with arriving(target) as path:
        command = [python or _python_of(script), str(script.absolute()), str(source.path.absolute())]
        options = [
            *(["--outtype", type] if type else []),
            *(["--sentence-transformers-dense-modules"] if dense else []),
        ]
        _run([*command, "--outfile", str(path.absolute()), *options], on_line)
        header = read_header(path)
        check(replace(header, path=target))  # messages name the target
        check_vocabulary(header)
        written = [tensor.name for tensor in header.tensors if _DENSE.fullmatch(tensor.name)]
        refuse_others(modules, has_dense=len(written) == len(dense))
        with closing(EngineClient()) as engine:
            engine.do(TRIAL, TryFile(str(path.absolute()), probe().usable_cores))
    architecture = str(names[0]) if isinstance(names, list) and names else "unknown"
    n_parameters = sum(tensor.n_elements for tensor in header.tensors)
    return ConvertedModel(
        target, architecture, header.quant, header.file_size, len(header.tensors), n_parameters, tuple(notes)
    )


def _python_of(script: Path) -> str:
    """Return the interpreter of the virtual environment beside the script, else the default command."""
    interpreter = Path("Scripts/python.exe" if os.name == "nt" else "bin/python")
    paths = (script.absolute().parent / name / interpreter for name in (".venv", "venv"))
    return next((str(path) for path in paths if path.is_file()), "python" if os.name == "nt" else "python3")


def _run(command: Sequence[str], on_line: Callable[[str], None]) -> None:
    lines: deque[str] = deque(maxlen=_MAX_LINES)
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
                    lines.append(line.strip()[:_MAX_WIDTH])
                    on_line(lines[-1])
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        _refuse(command, process.returncode, list(lines))


def _refuse(command: Sequence[str], status: int, lines: list[str]) -> None:
    last = lines[-1] if lines else f"it exited with status {status} and no output"
    if "No space left on device" in last:
        raise DiskFullError(f"{Path(command[1]).name} found no room for the file", why=last)
    if "ModuleNotFoundError" in last or "ImportError" in last:
        hint = f"install the script's requirements for {command[0]}, or name another Python: --python PATH"
    else:
        hint = f"run it alone to see more: {Path(command[1]).name} {command[2]}"
    raise UsageError(f"{Path(command[1]).name} failed", why=last, hint=hint)
