"""Jobs of the engine process besides answering: one module a job, with its command, its updates and its result.

Owns JobKind; must not know single jobs. Only the requested job is imported, so that an answer does not wait for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from llmrun.protocol.codec import from_json, refusal

Command = TypeVar("Command")
Update = TypeVar("Update")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Empty:
    """The command, update or result of a job without one."""


@dataclass(frozen=True, slots=True)
class JobKind(Generic[Command, Update, Result]):
    """One kind of job."""

    name: str  # of its modules in protocol/jobs/ and engine/jobs/, whose run() does it
    command: type[Command]  # these three are dataclasses
    update: type[Update]
    result: type[Result]
    models: Callable[[Command], tuple[str, ...]] = lambda command: ()  # files the engine reads; checked if it crashes
    needs_model: bool = False  # run() also gets the engine's loaded model

    def read(self, arguments: Any) -> Command:
        """Return the command for arguments made by as_dict().

        Raises:
            UsageError: the arguments are not a command's.
        """
        try:
            return from_json(self.command, arguments)
        except (TypeError, ValueError) as error:
            raise refusal(error) from error
