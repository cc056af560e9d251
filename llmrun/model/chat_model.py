"""The interface of a model for a conversation, loaded here or on a remote server; several answers to one prompt."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from llmrun.errors import UsageError
from llmrun.model import Model
from llmrun.models.fingerprint import ModelFingerprint
from llmrun.protocol.media import Modality
from llmrun.protocol.messages import AnswerRequest, Event, Message
from llmrun.protocol.params import SamplingParams
from llmrun.protocol.questions import StateSaved, TokenCount
from llmrun.protocol.speculation import Speculation

if TYPE_CHECKING:
    from llmrun.protocol.adapters import Adapter


class ChatModel(Protocol):
    """A model that answers; the members are described in Model.

    Attributes:
        on_wait: called about ten times a second while answer() waits and nothing comes.
    """

    on_wait: Callable[[], None]

    @property
    def name(self) -> str: ...
    @property
    def used(self) -> ModelFingerprint: ...
    @property
    def n_ctx(self) -> int:
        """Context window in tokens; 0 if unknown."""

    @property
    def examples(self) -> tuple[Message, ...]: ...
    @property
    def has_template(self) -> bool: ...
    @property
    def thinks(self) -> bool: ...
    @property
    def modalities(self) -> frozenset[Modality]: ...
    @property
    def parallel(self) -> int: ...
    @property
    def adapters(self) -> tuple[Adapter, ...]: ...

    def speculation(self) -> Speculation | None: ...
    def takes(self, parameter: str) -> bool: ...
    def sampling(
        self, flags: Mapping[str, Any] | None = None, session: Mapping[str, Any] | None = None
    ) -> tuple[SamplingParams, dict[str, str]]: ...
    def answer(self, *asked: AnswerRequest) -> Iterator[Event]: ...
    def count(
        self,
        messages: Iterable[Message],
        **options: Any,
    ) -> TokenCount: ...
    def decode_together(self, answers: int) -> None: ...
    def while_idle(self) -> AbstractContextManager[None]: ...
    def save_state(self, *, prompt_only: bool = False) -> StateSaved: ...
    def cancel(self) -> None: ...
    def close(self) -> None: ...


def loaded_locally(model: ChatModel, what: str) -> Model:
    """Return the model, which must be loaded on this machine.

    Args:
        what: the feature that requires this, such as "/why".

    Raises:
        UsageError: the model is on a remote server.
    """
    if isinstance(model, Model):
        return model
    raise UsageError(
        f"{what} needs a model that is loaded here",
        why=f"{model.used.server} gives answers, but not what its engine knows of them",
        hint="leave out --at, and unset LLMRUN_SERVER",
    )


_SEEDS = 2**32


def seeds_for(sampling: SamplingParams, answers: int) -> list[int]:
    """Return consecutive seeds, from the requested one if any, so that the first answer is the one without the others.

    Raises:
        UsageError: all answers would be the same.
    """
    if not sampling.temperature > 0:
        why = "temperature 0 takes the likeliest token, whatever the seed"
        raise UsageError(f"{answers} answers would all be the same", why=why, hint="a temperature of 0.8, say")
    first = int.from_bytes(os.urandom(4), "little") if sampling.seed is None else sampling.seed
    return [(first + place) % _SEEDS for place in range(answers)]


def with_seeds(asked: AnswerRequest, seeds: Iterable[int]) -> list[AnswerRequest]:
    """Return the request with each of the seeds."""
    return [replace(asked, sampling=replace(asked.sampling, seed=seed)) for seed in seeds]
