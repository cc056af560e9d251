"""The LoRA adapters of a server, and how requests choose among them.

Owns what a name such as "smollm2:pirate" means; must not know how engines apply adapters.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from llmrun.errors import UsageError
from llmrun.protocol.adapters import Adapter, AdapterScale
from llmrun.protocol.messages import AnswerRequest


class ServedAdapters(NamedTuple):
    """Adapters of one of the models.

    Attributes:
        model: its name, as the server was started with it.
        adapters: in the order of their numbers.
    """

    model: str = ""
    adapters: tuple[Adapter, ...] = ()

    @property
    def names(self) -> list[str]:
        """What clients may ask for in place of the model, one for each adapter."""
        return [f"{self.model}:{adapter.name}" for adapter in self.adapters]

    def base(self, name: str) -> str:
        """The model that a name means, without the adapter behind it."""
        return self.model if name in self.names else name

    def apply(self, name: str, request: AnswerRequest) -> AnswerRequest:
        """A request with the adapter that its model's name asks for; one that counts nothing by default counts fully.

        Raises:
            UsageError: it says in another way which ones it wants.
        """
        if name not in self.names:
            return request
        if request.adapters is not None:
            raise UsageError("lora and an adapter in the model's name exclude each other", hint="give one of them")
        number = self.names.index(name)
        return replace(request, adapters=(AdapterScale(number, self.adapters[number].scale or 1.0),))

    def refuse(self, name: str) -> None:
        """Raises UsageError where a name asks for an adapter, and vectors are wanted."""
        if name in self.names:
            why = "vectors are computed with the adapters that the server was started with"
            raise UsageError(f"{name} answers only", why=why, hint=f"ask {self.model}")

    @property
    def described(self) -> list[dict[str, Any]]:
        """As llama-server's GET /lora-adapters has it."""
        return [
            {"id": number, "path": adapter.name, "scale": adapter.scale} for number, adapter in enumerate(self.adapters)
        ]


NO_ADAPTERS = ServedAdapters()
