"""Run large language models on ordinary hardware.

    import llmrun

    with llmrun.load("smollm2") as model:
        print(model.chat("Why is the sky blue?").text)
        for piece in model.chat("Tell me a story.", temperature=0, max_tokens=100):
            print(piece, end="", flush=True)

Names are imported at their first use, so that `llmrun --help` imports none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmrun import errors as errors
    from llmrun.grammar import Grammar as Grammar
    from llmrun.grammar import read_grammar as read_grammar
    from llmrun.grammar import read_json_schema as read_json_schema
    from llmrun.model import Model as Model
    from llmrun.model.loading import load as load
    from llmrun.protocol.messages import AnswerRequest as AnswerRequest
    from llmrun.protocol.messages import Event as Event
    from llmrun.protocol.messages import Finished as Finished
    from llmrun.protocol.messages import Message as Message
    from llmrun.protocol.messages import Started as Started
    from llmrun.protocol.messages import Stats as Stats
    from llmrun.protocol.messages import TextDelta as TextDelta
    from llmrun.protocol.params import Limits as Limits
    from llmrun.protocol.params import SamplingParams as SamplingParams
    from llmrun.reply import Reply as Reply

    __version__: str

_HOMES = {
    "AnswerRequest": "protocol.messages",
    "Event": "protocol.messages",
    "Finished": "protocol.messages",
    "Grammar": "grammar",
    "Limits": "protocol.params",
    "Message": "protocol.messages",
    "Model": "model",
    "Reply": "reply",
    "SamplingParams": "protocol.params",
    "Started": "protocol.messages",
    "Stats": "protocol.messages",
    "TextDelta": "protocol.messages",
    "load": "model.loading",
    "read_grammar": "grammar",
    "read_json_schema": "grammar",
}

__all__ = sorted(["__version__", "errors", *_HOMES])


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("llmrun")
    if name == "errors":
        return importlib.import_module("llmrun.errors")
    if name in _HOMES:  # by a Python program: the commands take theirs from the modules
        from llmrun import errors
        from llmrun.protocol.arguments import in_python

        errors.rephrase = in_python
        return getattr(importlib.import_module(f"llmrun.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
