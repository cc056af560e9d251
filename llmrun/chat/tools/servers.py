"""The process that has the session with an MCP server, which it starts, or reaches over HTTP.

The first request names the server, see mcp_file.Server: command lines are no place for keys. A cancelled call leaves
the server alive.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

import httpx2
from mcp import Client, MCPError, StdioServerParameters
from mcp.client import Transport
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import (
    CONNECTION_CLOSED,
    BlobResourceContents,
    CallToolResult,
    PaginatedResult,
    TextContent,
    TextResourceContents,
)

from llmrun.chat.tools.prompting import ToolPrompt, in_words, limited
from llmrun.protocol.codec import load_json

_MAX_BYTES = 1 << 26  # of a request
_READ = {
    "name": "read_resource",
    "description": "Read a resource of the server.",
    "parameters": {"type": "object", "properties": {"uri": {"type": "string"}}, "required": ["uri"]},
}
_Page = TypeVar("_Page", bound=PaginatedResult)


def main() -> None:
    """Answer calls until the chat ends."""
    chat = ToolPrompt()
    logging.disable()  # stderr is the server's
    asyncio.run(_serve(chat))


@asynccontextmanager
async def _connected(server: Mapping[str, Any]) -> AsyncIterator[Client]:
    """Connect to a server, which is a mcp_file.Server as JSON."""
    async with AsyncExitStack() as stack:
        connection: StdioServerParameters | Transport
        if server["transport"] == "sse":
            connection = sse_client(server["url"], server["headers"])
        elif server["transport"] == "http":
            client = httpx2.AsyncClient(headers=server["headers"], timeout=httpx2.Timeout(30, read=300))
            connection = streamable_http_client(server["url"], http_client=await stack.enter_async_context(client))
        else:
            # The server gets what any command gets that is typed into the same shell.
            program, *arguments = server["command"]
            environment = dict(os.environ) | server["environment"]
            connection = StdioServerParameters(command=program, args=arguments, env=environment, cwd=server["folder"])
        yield await stack.enter_async_context(Client(connection))


async def _serve(chat: ToolPrompt) -> None:
    requests = asyncio.StreamReader(limit=_MAX_BYTES)
    protocol = asyncio.StreamReaderProtocol(requests)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(chat.requests, "rb"))
    request = load_json(await requests.readline())
    try:
        async with _connected(request["list"]) as client:
            tools, offers = await _tools(client), await _offers(client)
            reads = any(offer["kind"] == "resource" for offer in offers)
            reads = reads and all(tool["name"] != _READ["name"] for tool in tools)
            chat.tell(request, tools=[*tools, _READ] if reads else tools, offers=offers)
            coming = asyncio.ensure_future(requests.readline())
            while line := await coming:
                coming = asyncio.ensure_future(requests.readline())
                if "call" not in (message := load_json(line)):
                    continue  # the call ended before its cancel came
                request = message
                call = asyncio.ensure_future(_answer(client, request, reads=reads))
                await asyncio.wait((call, coming), return_when=asyncio.FIRST_COMPLETED)
                if not call.done() and call.cancel():
                    await asyncio.wait((call,))
                chat.tell(request, **({"error": "it was stopped"} if call.cancelled() else call.result()))
    except Exception as error:  # of the server
        program = request["list"]["command"][:1] if isinstance(request.get("list"), dict) else ()
        if isinstance(error, FileNotFoundError) and program:  # its folder is ours, which exists
            chat.tell(request, end=f"there is no command {program[0]!r} on this machine")
        elif isinstance(error, PermissionError) and program:
            chat.tell(request, end=f"the command {program[0]!r} can't be run: {error.strerror}")
        else:
            chat.tell(request, end=in_words(error))


async def _tools(client: Client) -> list[dict[str, Any]]:
    return [
        {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
        async for page in _pages(client.list_tools)
        for tool in page.tools
    ]


async def _offers(client: Client) -> list[dict[str, str]]:
    """Return what a server has beside tools: its resources and prompts."""
    offers: list[dict[str, str]] = []
    if client.server_capabilities.resources:
        async for listed in _pages(client.list_resources):
            offers += [
                {"kind": "resource", "name": resource.uri, "about": resource.name} for resource in listed.resources
            ]
    if client.server_capabilities.prompts:
        async for prompts in _pages(client.list_prompts):
            offers += [
                {"kind": "prompt", "name": prompt.name, "about": prompt.description or ""} for prompt in prompts.prompts
            ]
    return offers


async def _pages(list_some: Callable[..., Awaitable[_Page]]) -> AsyncIterator[_Page]:
    """Yield the pages of a list of the server's."""
    cursor = None
    while True:
        page = await list_some(cursor=cursor)
        yield page
        cursor = page.next_cursor
        if not cursor:
            return


async def _answer(client: Client, request: dict[str, Any], *, reads: bool) -> dict[str, str]:
    """Call a tool; return its result or its error.

    Raises:
        MCPError: the server is gone.
    """
    try:
        if reads and request["call"] == _READ["name"]:
            read = await client.read_resource(str(request["arguments"].get("uri", "")))
            return {"result": limited("\n".join(_resource_text(content) for content in read.contents))}
        result = await client.call_tool(request["call"], request["arguments"])
    except MCPError as error:
        if error.code == CONNECTION_CLOSED:
            raise
        return {"error": limited(error.message)}
    return {"error" if result.is_error else "result": limited(_text(result))}


def _text(result: CallToolResult) -> str:
    """Return the part of a result that a model can read."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(
        block.text if isinstance(block, TextContent) else block.model_dump_json(exclude={"data"}, exclude_none=True)
        for block in result.content
    )


def _resource_text(contents: TextResourceContents | BlobResourceContents) -> str:
    if isinstance(contents, TextResourceContents):
        return contents.text
    return contents.model_dump_json(exclude={"blob"}, exclude_none=True)
