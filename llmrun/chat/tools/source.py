"""A process with tools, as the chat sees it: started early, listed once, then called.

It ends with the chat, however that ends, because it reads the pipe to its end.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from llmrun.chat.store.turns import ToolOutput
from llmrun.chat.tools import guard
from llmrun.chat.tools.guard import LEAVE_SECONDS
from llmrun.chat.tools.mcp_file import Server, read_servers
from llmrun.chat.tools.ready import is_ready, notes_of, ready_sets
from llmrun.config import config_file
from llmrun.errors import UsageError
from llmrun.protocol.codec import load_json
from llmrun.protocol.media import Media
from llmrun.protocol.messages import Tool
from llmrun.runner.launch import EngineHandle, launch
from llmrun.system import PipeReader, user_path

_START_SECONDS = 120  # a server may be downloaded first
_CANCEL_SECONDS = 2  # for a call to end
_MAX_BYTES = 1 << 26  # of an answer
_LOG_TAIL = 4096
_MOST_LINES = 1000  # that are read at a look for changes

STOPPED = "the user stopped it"


class _ToolProcessExited(Exception):  # noqa: N818 - what it is in the middle of decides about the error
    """The process ended, or had to be ended."""


class CallResult(NamedTuple):
    """The result of a call, or the error in words."""

    text: str
    failed: bool = False
    media: tuple[Media, ...] = ()  # images and audio in it

    @property
    def output(self) -> ToolOutput:
        """The result as the model gets it."""
        before = "Error: " if self.failed else ""
        return ToolOutput(before + self.text, tuple(each._replace(at=each.at + len(before)) for each in self.media))


class Offer(NamedTuple):
    """A "resource" of an MCP server, with its address, or a "prompt", with its name."""

    kind: str
    name: str
    about: str


class ToolSource:
    """One process with tools.

    Args:
        name: as errors call it.
        command: that starts the process.
        server: an MCP server that it connects to.
        is_of_file: it is one of the servers of a file, and `name` its name there.
        notes: lines that the user has to know.

    Attributes:
        offers: what a server has beside tools, once tools() has waited for it.
    """

    def __init__(
        self,
        name: str,
        command: list[str],
        server: Server | None = None,
        *,
        is_of_file: bool = False,
        notes: Iterable[str] = (),
    ) -> None:
        self.name, self._command, self.notes = name, command, tuple(notes)
        self._first = {"list": server._asdict() if server is not None else True}
        self.is_of_file = is_of_file
        self.offers: tuple[Offer, ...] = ()
        self._received = bytearray()
        self._changed: dict[str, Any] | None = None  # the last list of tools that nobody has taken yet
        self._is_cancelled = False
        self._start()

    def _start(self) -> None:
        self._launched: EngineHandle | None = launch(self._command)
        assert self._launched.process.stdout is not None
        self._reader = PipeReader(self._launched.process.stdout)
        self._listing = ""  # the id of the request for the tools
        with suppress(_ToolProcessExited):  # tools() reports the reason
            self._listing = self._send(**self._first)

    def tools(self) -> list[Tool]:
        """Return the tools; waits until the process is ready.

        Raises:
            UsageError: the process can't be used.
        """
        try:
            answer = self._answer(self._listing, _START_SECONDS)
            if answer is None:
                raise _ToolProcessExited(f"it is not ready after {_START_SECONDS} seconds")
            return self._listed(answer)
        except _ToolProcessExited as error:
            why = "; ".join(filter(None, (str(error), self._last_log_line())))
            raise UsageError(f"there are no tools in {self.name}", why=why) from None

    def changed_tools(self) -> list[Tool] | None:
        """Return the tools if the server has changed them since they were listed last; does not wait."""
        with suppress(_ToolProcessExited):  # the next call says why
            for _ in range(_MOST_LINES if self._launched is not None else 0):
                if (line := self._line(time.monotonic())) is None:
                    break
                self._taken(line, "")
        changed, self._changed = self._changed, None
        return None if changed is None else self._listed(changed)

    def _listed(self, answer: dict[str, Any]) -> list[Tool]:
        self.offers = tuple(Offer(**offer) for offer in answer.get("offers", ()))
        return [Tool(tool["name"], tool["description"], json.dumps(tool["parameters"])) for tool in answer["tools"]]

    def call(self, name: str, arguments: dict[str, Any], seconds: float) -> CallResult:
        """Call a tool; cancel() ends it.

        Args:
            seconds: limit of the time until it ends, or since the server's last notice of its progress.
        """
        self._is_cancelled = False
        try:
            if self._launched is None:
                self._start()
                self.tools()
            request = self._send(call=name, arguments=arguments)
            answer = self._answer(request, seconds)
            if answer is None:
                self._end_call(request)
                return CallResult(f"it took longer than {seconds:g} seconds and was stopped", failed=True)
            media = tuple(Media(**each) for each in answer.get("media", ()))
        except (_ToolProcessExited, UsageError) as error:
            self.close()
            answer, media = {"error": str(error)}, ()
        if "error" not in answer:
            return CallResult(answer["result"], media=media)
        return CallResult(STOPPED if self._is_cancelled else answer["error"], failed=True, media=media)

    def cancel(self) -> None:
        """Cancel the running call; the second time, kill its process. Safe in a signal handler."""
        if self._is_cancelled:
            self._kill()
            return
        self._is_cancelled = True
        if self._launched is not None:
            with suppress(_ToolProcessExited):
                self._send(cancel=True)

    def let_go(self) -> None:
        """Close the pipe, which tells the process to end."""
        if self._launched is not None:
            assert self._launched.process.stdin is not None
            self._launched.process.stdin.close()

    def close(self) -> None:
        """End the process. An MCP server gets some time for that, as the protocol says."""
        if self._launched is None:
            return
        self.let_go()
        process = self._launched.process
        assert process.stdout is not None
        try:
            process.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
            process.wait()
        for file in (process.stdout, self._launched.log):
            if file is not None:
                file.close()
        self._launched = None
        self._received.clear()

    def _kill(self) -> None:
        if self._launched is not None:
            guard.end(self._launched.process.pid)

    def _end_call(self, request: str) -> None:
        """Cancel a call that is too slow. A function's process ends with it, an MCP server continues."""
        try:
            self._send(cancel=True)
            if self._answer(request, _CANCEL_SECONDS) is None:
                self.close()
        except _ToolProcessExited:
            self.close()

    def _send(self, **request: Any) -> str:
        """Send a request; return its id, which the answer repeats."""
        name = secrets.token_hex(16)
        data = (json.dumps({"id": name, **request}) + "\n").encode()
        assert self._launched is not None
        assert self._launched.process.stdin is not None
        try:
            while data:
                data = data[os.write(self._launched.process.stdin.fileno(), data) :]
        except (OSError, ValueError):  # broken, or closed
            raise self._gone() from None
        return name

    def _answer(self, request: str, seconds: float) -> dict[str, Any] | None:
        """Return the answer to a request, None after the deadline, which each notice of progress moves.

        Other output of the process is ignored, but for another list of its tools.
        """
        ends = time.monotonic() + seconds
        while (line := self._line(ends)) is not None:
            answer = self._taken(line, request)
            if answer is None:
                continue
            if "progress" not in answer:
                return answer
            ends = time.monotonic() + seconds
        return None

    def _taken(self, line: bytes, request: str) -> dict[str, Any] | None:
        """Return what a line says to a request, None for another line; keep another list of tools.

        Raises:
            _ToolProcessExited: it is not of the protocol, or says that the process can't continue.
        """
        try:
            answer = load_json(line)
        except ValueError:
            raise _ToolProcessExited("its process sent garbage") from None
        if not isinstance(answer, dict) or answer.get("id") not in (request, self._listing):
            return None
        if "end" in answer:
            raise _ToolProcessExited(answer["end"])
        if answer["id"] == request:
            return answer
        self._changed = answer
        return None

    def _line(self, ends: float) -> bytes | None:
        """Return the next line of the process, None after the deadline."""
        assert self._launched is not None
        assert self._launched.process.stdout is not None
        while (end := self._received.find(b"\n")) < 0:
            data = self._reader.read(ends - time.monotonic())
            if data is None:
                return None
            if not data or len(self._received) > _MAX_BYTES:
                raise self._gone()
            self._received += data
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return line

    def _gone(self) -> _ToolProcessExited:
        """Return the error for a process that has ended, or is ending."""
        assert self._launched is not None
        with suppress(subprocess.TimeoutExpired):
            self._launched.process.wait(_CANCEL_SECONDS)
        return _ToolProcessExited(f"its process ended with status {self._launched.process.poll()}")

    def _last_log_line(self) -> str:
        log = self._launched.log if self._launched else None
        if log is None:
            return ""
        log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL))
        lines = log.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1].strip() if lines else ""


def open_sources(name: str, search: str = "") -> list[ToolSource]:
    """Start the processes of a --tools: ready-made tools, a Python file, "mcp:" and a command, or a file mcp.json.

    Args:
        search: the address of a SearXNG server; without one, ready-made tools can't search the web.

    Raises:
        UsageError: it is none of these, or a package is missing.
    """
    if is_ready(name):
        return [ToolSource(each.kind, _host("ready", *each), notes=notes_of(each)) for each in ready_sets(name, search)]
    path = own_file() if name == "mcp" else user_path(name)
    if name.startswith("mcp:"):
        try:
            words = shlex.split(name.removeprefix("mcp:"))
        except ValueError as error:
            raise UsageError(f"invalid --tools {name}", why=str(error)) from None
        if not words:
            raise UsageError("--tools mcp: needs a command", hint="--tools 'mcp:uvx mcp-server-time'")
        return _connected({name: Server(tuple(words), folder=str(Path.cwd()))}, is_of_file=False)
    if path.suffix == ".py" and path.is_file():
        return [ToolSource(name, _host("functions", str(path.absolute()), str(Path.cwd())))]
    if name == "mcp" or path.suffix == ".json":
        return _connected(read_servers(path), is_of_file=True)
    if path.suffix == ".py" or path.parent != Path():  # meant as a file
        why = "there is no such file" if not path.exists() else "it is not a file of Python code"
        raise UsageError(f"--tools {name} can't be read", why=why)
    why = "must be a Python file, mcp: and the command of a server, a file mcp.json, or files, web, python or all"
    raise UsageError(f"invalid --tools {name}", why=why)


def own_file() -> Path:
    """Return the user's own file of MCP servers, which need not exist."""
    return config_file().with_name("mcp.json")


def own_servers() -> dict[str, Server]:
    """Return the servers of the user's own file by their names. Raises UsageError as read_servers()."""
    path = own_file()
    return read_servers(path) if path.exists() else {}


def open_server(name: str) -> ToolSource:
    """Start a server of the user's own file. Raises UsageError if it is not there, or as open_sources()."""
    found = own_servers()
    if name not in found:
        raise UsageError(f"there is no MCP server {name!r:.80}", why=f"{own_file()} does not list it")
    return _connected({name: found[name]}, is_of_file=True)[0]


def _connected(servers: Mapping[str, Server], *, is_of_file: bool) -> list[ToolSource]:
    """Start the processes that connect to servers. Raises UsageError without the package for that."""
    if importlib.util.find_spec("mcp") is None:
        raise UsageError(
            "tools of MCP servers need the mcp package", why="it is not installed", hint="pip install 'llmrun[mcp]'"
        )
    return [ToolSource(name, _host("servers"), server, is_of_file=is_of_file) for name, server in servers.items()]


def _host(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", f"from llmrun.chat.tools.guard import run; run({module!r})", *arguments]
