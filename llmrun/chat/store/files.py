"""Files that a saved chat is written to: whole, or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from llmrun.errors import DiskFullError, UsageError


def write_whole(target: Path, text: str) -> None:
    """Write a file by way of a temporary one beside it.

    Raises:
        DiskFullError: the disk is full; what was there before still is.
        UsageError: it can't be written there.
    """
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        kind = DiskFullError if error.errno in (errno.ENOSPC, errno.EDQUOT) else UsageError
        raise kind(f"{str(target)!r} can't be written", why=(error.strerror or str(error)).lower()) from None
