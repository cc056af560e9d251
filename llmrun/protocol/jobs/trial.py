"""The job that tries whether a file which another program made is good."""

from __future__ import annotations

from dataclasses import dataclass

from llmrun.protocol.jobs import Empty, JobKind


@dataclass(frozen=True, slots=True)
class TryFile:
    """Try a file.

    Attributes:
        path: of the GGUF file, absolute.
        threads: that look through its numbers.
    """

    path: str
    threads: int


TRIAL = JobKind("trial", TryFile, Empty, Empty, lambda command: (command.path,))
