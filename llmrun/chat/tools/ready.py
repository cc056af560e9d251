"""Ready-made tools, as one more source beside Python files and MCP servers: `--tools files|web|python|all`.

    files, files:FOLDER         list and read files below a folder
    web, web:HOST,HOST:PORT     read pages; HOSTs may have private addresses
    python                      run Python code

Their functions run in a process like those of a file: `ready.py KIND VALUE SEARCH`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from llmrun.errors import UsageError
from llmrun.protocol.repeating import repeating
from llmrun.system import user_path

if TYPE_CHECKING:
    from llmrun.chat.tools.prompting import ToolPrompt

ALL = "all"
KINDS = ("files", "web", "python")
OF_ALL = KINDS if sys.platform != "win32" else KINDS[:2]
_LOOK_SECONDS = 1.0


class ReadySet(NamedTuple):
    """One kind of ready-made tools: its kind, the folder or the hosts, and the address of the search server."""

    kind: str
    value: str
    search: str


def is_ready(name: str) -> bool:
    """Return whether a source of --tools is ready-made."""
    return name == ALL or name.partition(":")[0] in KINDS


def ready_sets(name: str, search: str) -> list[ReadySet]:
    """Return the sets that a source of --tools names.

    Raises:
        UsageError: its folder is not one, a host is invalid, or the system can't limit Python code.
    """
    if name == ALL:
        return [found for kind in OF_ALL for found in ready_sets(kind, search)]
    kind, colon, value = name.partition(":")
    if kind == "files":
        folder = user_path(value or ".").absolute()
        if not folder.is_dir():
            raise UsageError(f"invalid --tools {name}", why=f"{value!r} is not a folder")
        value = str(folder)
    elif kind == "web":
        value = ",".join(_named(name, each) for each in value.split(",") if each)
    elif colon:
        raise UsageError(f"invalid --tools {name}", hint="--tools python")
    elif sys.platform == "win32":
        raise UsageError("--tools python can't be used", why="Windows can't limit the code")
    return [ReadySet(kind, value, search)]


def notes_of(found: ReadySet) -> Iterator[str]:
    """Yield what the user has to know of a set: what is missing of it."""
    if found.kind == "web" and not found.search:
        yield "search_web is not offered: it needs a SearXNG server, llmrun config set tools.search URL"
    if found.kind == "python":
        from llmrun.chat.tools.sandbox import cuts_off, hides_files

        if not cuts_off():
            yield "run_python can use the network and your files: only Linux takes them away from it"
        elif not hides_files():
            yield "run_python can use your files: this system has no Landlock, which takes them away from it"


def _named(name: str, host: str) -> str:
    """Return a host that the user names, as fetch() takes it."""
    with suppress(ValueError):
        parts = urlsplit(host if "://" in host else f"//{host}")
        if parts.hostname:
            return parts.hostname if parts.port is None else f"{parts.hostname}:{parts.port}"
    raise UsageError(f"invalid --tools {name}", why=f"{host!r} is not a host", hint="--tools web:localhost:8080")


def main() -> None:
    """Answer calls of one set."""
    from llmrun.chat.tools.functions import answer_calls  # pydantic, for this process alone
    from llmrun.chat.tools.prompting import ToolPrompt
    from llmrun.chat.tools.python import Python

    chat, found = ToolPrompt(), ReadySet(*sys.argv[1:])
    python = Python()
    answer_calls(
        chat,
        lambda: {"run_python": python.run_python} if found.kind == "python" else _functions(found),
        during=lambda call: _telling_progress(chat, call),
        at_end=python.close,
    )


def _functions(found: ReadySet) -> Mapping[str, Callable[..., Any]]:
    from llmrun.chat.tools.folder import Folder
    from llmrun.chat.tools.web import Search, Web

    if found.kind == "files":
        folder = Folder(found.value)
        return {"read_file": folder.read_file, "list_files": folder.list_files}
    named = tuple(each for each in found.value.split(",") if each)
    if not found.search:
        return {"read_url": Web(named).read_url}
    web = Search(named, found.search)
    return {"read_url": web.read_url, "search_web": web.search_web}


def _telling_progress(chat: ToolPrompt, call: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Tell the chat while a call computes: that has a limit of its own, and time that passes must not end it."""
    before = _processor_seconds()

    def tell() -> None:
        nonlocal before
        now = _processor_seconds()
        if now > before:
            chat.tell(call, progress=now)
        before = now

    return repeating(_LOOK_SECONDS, tell)


def _processor_seconds() -> float:
    """Return the processor time of the processes that this one has started."""
    import psutil  # type: ignore[import-untyped,unused-ignore]

    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total
