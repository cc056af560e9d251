"""What the engine process does besides answering: one module a job, with its command, its updates and its result.

Owns what makes a job; must not know what it does. Only the job that is wanted is imported, so that an answer does not
wait for all of them.
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
    """Of a job that has nothing to be told, or nothing to tell meanwhile."""


@dataclass(frozen=True, slots=True)
class JobKind(Generic[Command, Update, Result]):
    """One kind of job.

    Attributes:
        name: of the module of protocol/jobs/ that describes it.
        command: dataclass that says what is to be done.
        update: dataclass of what is told meanwhile.
        result: dataclass of what comes out.
        models: the files that a command lets the engine read; where it dies, they are looked at.
        needs_model: run() gets the engine's loaded model, too.
    """

    name: str
    command: type[Command]
    update: type[Update]
    result: type[Result]
    models: Callable[[Command], tuple[str, ...]] = lambda command: ()
    needs_model: bool = False

    def read(self, arguments: Any) -> Command:
        """Return the command that as_dict() made these arguments of.

        Raises:
            UsageError: they are of something else.
        """
        try:
            return from_json(self.command, arguments)
        except (TypeError, ValueError) as error:
            raise refusal(error) from error
