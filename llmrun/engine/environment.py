"""Process-wide settings of the engine, and imports that use waiting time. Must not know commands."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from llmrun.engine.llama.library import import_submodule
from llmrun.errors import LlmrunError

_SWITCH_SECONDS = 0.0001
_NICENESS = 12  # a fifteenth of a busy core; most of the idle time between steps


def set_environment() -> None:
    """Set the environment variables that the libraries read when they are loaded."""
    os.environ["GGML_NO_BACKTRACE"] = "1"  # ggml would start a debugger on itself when it aborts
    # libgomp's threads wait for each other by spinning, for milliseconds by default, which is slow when other programs
    # need the cores. Spinning for half a millisecond is as fast on an idle machine, and much faster on a busy one.
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "8000"


def shorten_switch_interval() -> None:
    """Let the computing thread interrupt Python code that prepares a request.

    It needs the interpreter's lock several times per token, and would wait up to 5 ms each time by default.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)


is_decoding: Callable[[], bool] = bool
"""Returns whether answers are decoded now; set by EngineProcess. A request that is alone has nobody to make way for."""


def lower_thread_priority() -> None:
    """Lower the priority of this thread and those it will start, for good, in favor of computing threads.

    If all cores compute, a grammar compilation would otherwise take half of one, and each step waits for its slowest
    thread. Not for a thread that needs the interpreter's lock: on a busy machine it would seldom run, and keep the lock
    from the computing thread meanwhile. Only Linux has a niceness of threads.
    """
    thread = threading.get_native_id()
    if sys.platform == "linux" and os.getpriority(os.PRIO_PROCESS, thread) < _NICENESS:
        os.setpriority(os.PRIO_PROCESS, thread, _NICENESS)


def import_for_requests() -> None:
    """Import what follows the weights, and the modules of the first request, while llama.cpp loads."""
    for name in ("llama.context", "loaded"):
        importlib.import_module(f"llmrun.engine.{name}")
    for name in ("ext", "sandbox"):
        import_submodule("jinja2", name)
    importlib.import_module("llmrun.engine.prompt.template")


def load_libraries() -> None:
    """Load llama.cpp's libraries; Load reports it if they are missing."""
    with suppress(LlmrunError):
        importlib.import_module("llmrun.engine.llama.library").import_llama()
