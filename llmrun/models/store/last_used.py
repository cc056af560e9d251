"""The time at which llmrun last used each model, since disks do not keep access times reliably.

One empty file for each model in the state folder: its time of change is the time of use. A file for each model needs no
lock. Must not know how models are found.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from llmrun.config import load_settings
from llmrun.errors import LlmrunError

_FOLDER = "used"


def note_use(model: Path) -> None:
    """Keep the time now for a model, if the disk allows it. Of a split model, `model` is the first part."""
    with suppress(OSError, LlmrunError):
        mark = _mark(model)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def last_used(model: Path) -> float:
    """Return the time of a model's last use, in seconds since 1970; 0 if llmrun has not used it."""
    with suppress(OSError, LlmrunError):
        return _mark(model).stat().st_mtime
    return 0.0


def forget_use(model: Path) -> None:
    """Forget a model that is removed. Call it while its file still exists, which may be a link to another."""
    with suppress(OSError, LlmrunError):
        os.remove(_mark(model))  # noqa: PTH107 - as removal.py counts on Path.unlink() for models


def _mark(model: Path) -> Path:
    from hashlib import sha256

    name = sha256(os.fsencode(os.path.realpath(model))).hexdigest()[:32]
    return load_settings().state_dir / _FOLDER / name
