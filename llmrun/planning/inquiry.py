"""Questions to llama.cpp that need no model, asked of an engine process that lives for one answer.

Owns starting it and its end; must not know what the answers mean. Like runner.py, it knows the engine by name only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, Literal

from llmrun.errors import EngineCrashedError, LlmrunError

Question = Literal["build", "kernels"]
"""Modules of llmrun.engine.jobs.machine whose main() prints one JSON object."""


def ask(question: Question, *arguments: str, seconds: float = 30.0) -> dict[str, Any]:
    """The answer.

    Args:
        arguments: what the module's main() takes.
        seconds: after which it is given up.

    Raises:
        LlmrunError: llama.cpp can't be loaded, or takes too long.
        EngineCrashedError: it died.
    """
    code = f"from llmrun.engine.jobs.machine.{question} import main; main()"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            check=False,
            cwd=os.sep,  # nothing in the user's folder may shadow a module
        )
    except subprocess.TimeoutExpired as error:
        raise LlmrunError("llama.cpp does not answer", why=f"nothing came within {seconds:.0f} seconds") from error
    if done.returncode < 0:
        raise EngineCrashedError("llama.cpp crashed", why=f"killed by signal {-done.returncode}")
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise LlmrunError("llama.cpp can't be asked", why=lines[-1] if lines else f"status {done.returncode}")
    try:
        answer = json.loads(done.stdout)
    except ValueError as error:
        raise LlmrunError("llama.cpp can't be asked", why="the engine sent garbage") from error
    if not isinstance(answer, dict):
        raise LlmrunError("llama.cpp can't be asked", why="the engine sent garbage")
    return answer
