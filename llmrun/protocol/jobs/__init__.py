"""Jobs of the engine process besides answering, each with its command, its updates and its result.

Only the module of the requested job is imported, so that an answer does not wait for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from llmrun.protocol.codec import from_json, refusal, with_whole_texts

Command = TypeVar("Command")
Update = TypeVar("Update")
Result = TypeVar("Result")

MODULES = {
    "beams": "beams",
    "bench": "bench",
    "build": "machine",
    "cpu_variants": "machine",
    "embed": "text",
    "evaluate": "evaluate",
    "explain": "explain",
    "importance": "importance",
    "kernels": "machine",
    "limits": "machine",
    "mix": "mix",
    "prompt_scores": "evaluate",
    "quantize": "quantize",
    "score": "evaluate",
    "tokenize": "text",
    "trial": "quantize",
    "worker": "machine",
}
"""Job -> its module here, which describes it as NAME, and its module in engine/jobs/, where run_name() does it."""


@dataclass(frozen=True, slots=True)
class Empty:
    """The command, update or result of a job without one."""


@dataclass(frozen=True, slots=True)
class JobKind(Generic[Command, Update, Result]):
    """The description of a job."""

    name: str  # a key of MODULES
    command: type[Command]  # these three are dataclasses, named tuples, or other types that codec.from_json() takes
    update: type[Update]  # float: the share that is done, 0 to 1
    result: type[Result]
    models: Callable[[Command], tuple[str, ...]] = lambda command: ()  # files the engine reads; checked if it crashes
    needs_model: bool = False  # its function also gets the engine's loaded model

    def read(self, arguments: Any) -> Command:
        """Return the command for arguments made by as_dict(). A loaded model's have texts, and no paths.

        Raises:
            UsageError: the arguments are not a command's.
        """
        try:
            return from_json(self.command, with_whole_texts(arguments) if self.needs_model else arguments)
        except (TypeError, ValueError) as error:
            raise refusal(error) from error
