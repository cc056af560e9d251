"""A server over fake engines, in a thread of its own, and raw sockets to ask it."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from support.gguf_writer import Writer, model_header

from llmrun.config import load_settings
from llmrun.runner.launch import Launched, launch
from llmrun.server.app import Served
from llmrun.server.guard import Policy
from llmrun.server.loading import Sharing
from llmrun.server.serving import ServeOptions, Serving
from llmrun.server.sockets import bind

FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")
SECONDS = 120.0
"""A server that takes longer hangs."""


class RawResponse(NamedTuple):
    """What came over a socket: the status, headers in lower case, and the body, chunks put together."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body."""
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of its server-sent events, without the last line of OpenAI's."""
        lines = self.body.decode().splitlines()
        return [json.loads(line[6:]) for line in lines if line.startswith("data: ") and line != "data: [DONE]"]
