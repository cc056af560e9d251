"""The job `worker`: ggml's RPC server in this process."""

from __future__ import annotations

from collections.abc import Callable

from llmrun import _native
from llmrun.engine.llama.devices import build, memory_of
from llmrun.engine.llama.library import start
from llmrun.engine.llama.rpc import require_build, serve, served
from llmrun.errors import LlmrunError
from llmrun.protocol.jobs import Empty
from llmrun.protocol.jobs.worker import ServedDevices, ServeDevices


def run(command: ServeDevices, report: Callable[[ServedDevices], None], flag: _native.CancelFlag) -> Empty:
    """Serve until the process ends.

    Raises:
        LlmrunError: the worker can't listen there, or this build has no RPC.
    """
    start()
    require_build()
    chosen = served()
    commit, version = build()
    report(ServedDevices(tuple(memory_of(device) for device in chosen), f"{version} ({commit})"))
    serve(command.endpoint, command.threads, command.cache, chosen)
    raise LlmrunError(f"the worker can no longer listen on {command.endpoint}")
