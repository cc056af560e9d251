"""What the engine process is set to before anything runs in it, and what is imported while it would only wait.

Must not know commands.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from contextlib import suppress

from llmrun.engine.llama.submodules import import_submodule
from llmrun.errors import LlmrunError

_SWITCH_SECONDS = 0.0001
_PREPARING_NICENESS = 12  # a fifteenth of a core where other threads want all of them; most of what idles between steps


def set_environment() -> None:
    """What the libraries read when they are loaded."""
    os.environ["GGML_NO_BACKTRACE"] = "1"  # ggml would start a debugger on itself when it aborts
    # libgomp's threads wait for each other by spinning, for milliseconds by default: when another program wants a core,
    # they take its turns and their own away. Spinning for half a millisecond is as fast alone, and much faster then.
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "8000"


def no_core_dumps() -> None:
    """A crash leaves a line in the log, and no gigabytes on the disk."""
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def share_the_interpreter() -> None:
    """Let the thread that computes have its turn soon, whatever Python a request that is prepared runs meanwhile.

    It asks for the interpreter several times a token, and would wait for 5 ms by default each time.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)


def give_way() -> None:
    """Let this thread, and those it starts, leave the cores to the threads that compute; it can't be taken back.

    Where every core computes, a grammar that is compiled beside would otherwise take half of one, and each step waits
    for the slowest of its threads. Only Linux has a niceness of threads.
    """
    if sys.platform == "linux":
        with suppress(PermissionError):  # it gives way more already
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _PREPARING_NICENESS)


def import_for_requests() -> None:
    """Import what the first request needs while llama.cpp loads the weights, which needs no Python."""
    for name in ("ext", "sandbox"):
        import_submodule("jinja2", name)
    for name in ("prompt.template", "service"):
        importlib.import_module(f"llmrun.engine.{name}")


def load_libraries() -> None:
    """Load llama.cpp's libraries while the front still makes its plan; if they are missing, Load will say so."""
    with suppress(LlmrunError):
        importlib.import_module("llmrun.engine.llama.library").import_llama()
