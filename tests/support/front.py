"""The installed command over the fake engine: `python tests/support/front.py MODE ARGUMENTS...`, see fake_engine.

Owns the one change that makes it so: which process the front launches. A mode may name several, one for each engine
that is started, with commas between them; the last one goes on. In the mode "none" no engine may be started.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from llmrun.__main__ import main
from llmrun.runner import launch

_FAKE = str(Path(__file__).with_name("fake_engine.py"))


def _faking(modes: list[str]) -> None:
    real = launch._start  # what launch() and prestart() call

    def fake(command: Sequence[str], verbose: bool, environment: Mapping[str, str] | None) -> launch.EngineHandle:
        own, more = command[: len(launch.ENGINE)], command[len(launch.ENGINE) :]
        if own != launch.ENGINE:
            return real(command, verbose, environment)
        mode = modes.pop(0) if len(modes) > 1 else modes[0]
        assert mode != "none", "an engine was started"
        return real((sys.executable, _FAKE, mode, *more), verbose, environment)

    launch._start = fake


if __name__ == "__main__":
    _faking(sys.argv.pop(1).split(","))
    main()
