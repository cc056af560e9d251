"""The process that runs an MCP server: `servers.py FOLDER COMMAND ARGUMENT...`.

Owns the session with the server, which it starts and ends; must not know the chat. A cancelled call leaves the server
alive.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from mcp import Client, MCPError, StdioServerParameters
from mcp.types import CONNECTION_CLOSED, CallToolResult, TextContent

from llmrun.chat.tools.prompting import ToolPrompt, in_words, limited
from llmrun.protocol.codec import load_json

_MAX_BYTES = 1 << 26  # of a request


def main() -> None:
    """Answer calls until the chat ends."""
    chat = ToolPrompt()
    logging.disable()  # stderr is the server's
    folder, *command = sys.argv[1:]
    asyncio.run(_serve(chat, folder, command))


async def _serve(chat: ToolPrompt, folder: str, command: Sequence[str]) -> None:
    # The server gets what any command gets that is typed into the same shell.
    server = StdioServerParameters(command=command[0], args=[*command[1:]], env=dict(os.environ), cwd=folder)
    requests = asyncio.StreamReader(limit=_MAX_BYTES)
    protocol = asyncio.StreamReaderProtocol(requests)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(chat.requests, "rb"))
    request = load_json(await requests.readline())
    try:
        async with Client(server) as client:
            chat.tell(request, tools=await _tools(client))
            coming = asyncio.ensure_future(requests.readline())
            while line := await coming:
                coming = asyncio.ensure_future(requests.readline())
                if "call" not in (message := load_json(line)):
                    continue  # the call ended before its cancel came
                request = message
                call = asyncio.ensure_future(_answer(client, request))
                await asyncio.wait((call, coming), return_when=asyncio.FIRST_COMPLETED)
                if not call.done() and call.cancel():
                    await asyncio.wait((call,))
                chat.tell(request, **({"error": "it was stopped"} if call.cancelled() else call.result()))
    except Exception as error:  # of the server
        chat.tell(request, end=in_words(error))


async def _tools(client: Client) -> list[dict[str, Any]]:
    tools: list[dict[str, Any]] = []
    cursor = None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += [
            {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
            for tool in page.tools
        ]
        cursor = page.next_cursor
        if not cursor:
            return tools


async def _answer(client: Client, request: dict[str, Any]) -> dict[str, str]:
    """Call a tool; return its result or its error.

    Raises:
        MCPError: the server is gone.
    """
    try:
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
