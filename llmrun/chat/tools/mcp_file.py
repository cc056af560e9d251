"""MCP servers in a file, in the form that Claude Desktop, Cursor and VS Code use.

    {"mcpServers": {"files": {"command": "npx", "args": ["-y", "SERVER", "."], "env": {"KEY": "${KEY}"}},
                    "far": {"url": "https://example.com/mcp", "headers": {"Authorization": "Bearer ${env:TOKEN}"}}}}

VS Code calls the object "servers". ${NAME}, ${NAME:-DEFAULT} and ${env:NAME} are variables of the environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from llmrun.errors import UsageError
from llmrun.protocol.codec import load_json

_MAX_BYTES = 1 << 20
_VARIABLE = re.compile(r"\$\{(?:env:)?([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_OVER_URL: dict[str | None, Literal["http", "sse"]] = {
    None: "http",
    "http": "http",
    "streamable-http": "http",
    "streamableHttp": "http",
    "sse": "sse",
}


class Server(NamedTuple):
    """An MCP server: a command to start, or the address of one that runs.

    Attributes:
        command: the program and its arguments; empty if it has an address.
        environment: variables of the program beside those of the shell.
        folder: where the program runs.
        url: its address; empty if it has a command.
        headers: of each HTTP request.
        transport: over HTTP: "http" is the protocol's streamable HTTP, "sse" the older one with two addresses.
    """

    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}
    folder: str = ""
    url: str = ""
    headers: Mapping[str, str] = {}
    transport: Literal["", "http", "sse"] = ""


def read_servers(path: Path, environment: Mapping[str, str] | None = None) -> dict[str, Server]:
    """Return the servers of a file by their names, without the disabled ones.

    Raises:
        UsageError: the file can't be read, or an entry is invalid.
    """
    variables = os.environ if environment is None else environment
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        content = load_json(data.decode("utf-8-sig")) if len(data) <= _MAX_BYTES else None
    except OSError as error:
        raise UsageError(f"{path} can't be read", why=error.strerror or str(error)) from None
    except ValueError as error:
        raise UsageError(f"{path} is not JSON", why=str(error)) from None
    servers = content.get("mcpServers", content.get("servers")) if isinstance(content, dict) else None
    if not isinstance(servers, dict):
        hint = '{"mcpServers": {"time": {"command": "uvx", "args": ["mcp-server-time"]}}}'
        raise UsageError(f"{path} has no MCP servers", why='it needs an object "mcpServers"', hint=hint)
    read = {name: _Entry(path, name, entry, variables).server() for name, entry in servers.items()}
    return {name: server for name, server in read.items() if server is not None}


class _Entry:
    """One entry of the file, and the errors that name it."""

    def __init__(self, path: Path, name: str, entry: Any, variables: Mapping[str, str]) -> None:
        self._path, self._name, self._variables = path, name, variables
        self._entry: dict[str, Any] = entry if isinstance(entry, dict) else self._fail("must be an object")

    def _fail(self, why: str) -> Any:
        raise UsageError(f"invalid MCP server {self._name!r:.80} in {self._path}", why=why)

    def server(self) -> Server | None:
        """Return the server, or None if it is disabled."""
        entry = self._entry
        if entry.get("disabled") is True or entry.get("enabled") is False:
            return None
        transport, command, url = entry.get("type", entry.get("transport")), self._text("command"), self._text("url")
        if bool(command) == bool(url):
            self._fail('it needs either "command" or "url"')
        if transport not in (_OVER_URL if url else {None, "stdio"}):
            self._fail('"type" must be "http" or "sse"' if url else '"type" must be "stdio"')
        if url and (urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname):
            self._fail('"url" must be an address such as http://127.0.0.1:8000/mcp')
        arguments = entry.get("args", [])
        if not isinstance(arguments, list) or not all(isinstance(argument, str) for argument in arguments):
            self._fail('"args" must be a list of strings')
        if url:
            return Server(url=url, headers=self._texts("headers"), transport=_OVER_URL[transport])
        folder = str(Path(self._text("cwd") or ".").expanduser().absolute())
        return Server((command, *map(self._expanded, arguments)), self._texts("env"), folder)

    def _text(self, key: str) -> str:
        value = self._entry.get(key, "")
        if not isinstance(value, str):
            self._fail(f'"{key}" must be a string')
        return self._expanded(value)

    def _texts(self, key: str) -> dict[str, str]:
        values = self._entry.get(key, {})
        if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
            self._fail(f'"{key}" must be an object of strings')
        return {name: self._expanded(value) for name, value in values.items()}

    def _expanded(self, text: str) -> str:
        def value(match: re.Match[str]) -> str:
            name, default = match.groups()
            if name not in self._variables and default is None:
                self._fail(f"the environment has no variable {name}")
            return self._variables.get(name) or default or ""

        return _VARIABLE.sub(value, text)
