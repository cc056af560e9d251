"""Entry of the engine process: begins to load weights before most of the engine is imported."""

from __future__ import annotations

import signal
import sys

from llmrun import _native
from llmrun.engine import environment
from llmrun.system import disable_core_dumps


def main() -> None:
    """Run the engine process; never return."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    environment.set_environment()
    disable_core_dumps()
    environment.shorten_switch_interval()
    _native.exit_when_closed(0)
    environment.load_libraries()
    preload = None
    if sys.argv[1:] == ["preload"]:
        from llmrun.engine.preload import Preload

        preload = Preload()
        preload.start()
    from llmrun.engine.main import serve

    serve(preload)
