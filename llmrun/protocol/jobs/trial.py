"""The job `trial`: verify a GGUF file made by another program."""

from __future__ import annotations

from dataclasses import dataclass

from llmrun.protocol.jobs import Empty, JobKind


@dataclass(frozen=True, slots=True)
class TryFile:
    """Verify a file."""

    path: str  # absolute
    threads: int


TRIAL = JobKind("trial", TryFile, Empty, Empty, lambda command: (command.path,))
