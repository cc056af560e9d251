"""The LoRA adapters of a server, and their choice by the model name of a request, e.g. "smollm2:pirate"."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from llmrun.errors import UsageError
from llmrun.protocol.adapters import Adapter, AdapterScale
from llmrun.protocol.messages import AnswerRequest


class ServedAdapters(NamedTuple):
    """The adapters of one model."""

    model: str = ""  # name on the command line
    adapters: tuple[Adapter, ...] = ()  # in the order of their ids

    @property
    def names(self) -> list[str]:
        """Names of the model with one adapter each."""
        return [f"{self.model}:{adapter.name}" for adapter in self.adapters]

    def base(self, name: str) -> str:
        """Return the model of a name, without its adapter."""
        return self.model if name in self.names else name

    def apply(self, name: str, request: AnswerRequest) -> AnswerRequest:
        """Return a request with the adapter in its model's name, at its own scale, or 1 if that is 0.

        Raises:
            UsageError: the request has `lora` as well.
        """
        if name not in self.names:
            return request
        if request.adapters is not None:
            raise UsageError("lora and an adapter in the model's name can't be used together", hint="give one of them")
        number = self.names.index(name)
        return replace(request, adapters=(AdapterScale(number, self.adapters[number].scale or 1.0),))

    def refuse(self, name: str) -> None:
        """Raise UsageError if a request for vectors names an adapter."""
        if name in self.names:
            why = "vectors are computed with the adapters that the server was started with"
            raise UsageError(f"{name} can't compute vectors", why=why, hint=f"use {self.model}")

    @property
    def described(self) -> list[dict[str, Any]]:
        """The response of llama-server's GET /lora-adapters."""
        return [
            {"id": number, "path": adapter.name, "scale": adapter.scale} for number, adapter in enumerate(self.adapters)
        ]


NO_ADAPTERS = ServedAdapters()
