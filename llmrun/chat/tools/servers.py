"""The process that has the session with an MCP server, which it starts, or reaches over HTTP.

The first request names the server, see mcp_file.Server: command lines are no place for keys. A cancelled call leaves
the server alive.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, TypeVar

import httpx2
from mcp import Client, MCPError, StdioServerParameters
from mcp.client import Transport
from mcp.client.session import MessageHandlerFnT
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp.client.subscriptions import ListenNotSupportedError, SubscriptionLost
from mcp.types import (
    CONNECTION_CLOSED,
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    PaginatedResult,
    PromptListChangedNotification,
    ResourceListChangedNotification,
    TextContent,
    TextResourceContents,
    ToolListChangedNotification,
)

from llmrun.chat.tools.prompting import ToolPrompt, in_words, limited
from llmrun.protocol.codec import load_json
from llmrun.protocol.media import Media

_MAX_BYTES = 1 << 26  # of a request
_MAX_MEDIA = 1 << 25  # characters of base64 in a result
_READ = {
    "name": "read_resource",
    "description": "Read a resource of the server.",
    "parameters": {"type": "object", "properties": {"uri": {"type": "string"}}, "required": ["uri"]},
}
_LIST_CHANGED = (ToolListChangedNotification, ResourceListChangedNotification, PromptListChangedNotification)
_Page = TypeVar("_Page", bound=PaginatedResult)


def main() -> None:
    """Answer calls until the chat ends."""
    chat = ToolPrompt()
    logging.disable()  # stderr is the server's
    asyncio.run(_serve(chat))


@asynccontextmanager
async def _connected(server: Mapping[str, Any], handler: MessageHandlerFnT) -> AsyncIterator[Client]:
    """Connect to a server, which is a mcp_file.Server as JSON."""
    async with AsyncExitStack() as stack:
        connection: StdioServerParameters | Transport
        if server["transport"] == "sse":
            connection = sse_client(server["url"], server["headers"])
        elif server["transport"] == "http":
            # The chat ends calls that take too long.
            client = httpx2.AsyncClient(headers=server["headers"], timeout=httpx2.Timeout(30, read=None))
            connection = streamable_http_client(server["url"], http_client=await stack.enter_async_context(client))
        else:
            # The server gets what any command gets that is typed into the same shell.
            program, *arguments = server["command"]
            environment = dict(os.environ) | server["environment"]
            connection = StdioServerParameters(command=program, args=arguments, env=environment, cwd=server["folder"])
        yield await stack.enter_async_context(Client(connection, message_handler=handler))


async def _serve(chat: ToolPrompt) -> None:
    requests = asyncio.StreamReader(limit=_MAX_BYTES)
    protocol = asyncio.StreamReaderProtocol(requests)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(chat.requests, "rb"))
    request = load_json(await requests.readline())
    catalog = _Catalog(chat, request)
    try:
        async with _connected(request["list"], catalog.notice) as client:
            await catalog.tell(client)
            watching = asyncio.ensure_future(catalog.watch(client))
            coming = asyncio.ensure_future(requests.readline())
            while line := await coming:
                coming = asyncio.ensure_future(requests.readline())
                if "call" not in (message := load_json(line)):
                    continue  # the call ended before its cancel came
                request = message
                call = asyncio.ensure_future(_answer(client, chat, request, reads=catalog.reads))
                await asyncio.wait((call, coming), return_when=asyncio.FIRST_COMPLETED)
                if not call.done() and call.cancel():
                    await asyncio.wait((call,))
                await catalog.tell_changes(client)  # which the call may have made
                chat.tell(request, **({"error": "it was stopped"} if call.cancelled() else call.result()))
            watching.cancel()
    except Exception as error:  # of the server
        program = request["list"]["command"][:1] if isinstance(request.get("list"), dict) else ()
        if isinstance(error, FileNotFoundError) and program:  # its folder is ours, which exists
            chat.tell(request, end=f"there is no command {program[0]!r} on this machine")
        elif isinstance(error, PermissionError) and program:
            chat.tell(request, end=f"the command {program[0]!r} can't be run: {error.strerror}")
        else:
            chat.tell(request, end=in_words(error))


class _Catalog:
    """The tools and offers of a server, told to the chat at the start, and again when the server says they changed.

    Args:
        listing: the chat's request for them, which every list answers.
    """

    def __init__(self, chat: ToolPrompt, listing: Mapping[str, Any]) -> None:
        self._chat, self._listing = chat, listing
        self._changed = asyncio.Event()
        self._telling = asyncio.Lock()
        self.reads = False  # resources, by a tool of ours

    async def notice(self, message: object) -> None:
        """Take a notification of the server."""
        if isinstance(message, _LIST_CHANGED):
            self._changed.set()

    async def tell(self, client: Client) -> None:
        tools, offers = await _tools(client), await _offers(client)
        self.reads = any(offer["kind"] == "resource" for offer in offers)
        self.reads = self.reads and all(tool["name"] != _READ["name"] for tool in tools)
        self._chat.tell(self._listing, tools=[*tools, _READ] if self.reads else tools, offers=offers)

    async def tell_changes(self, client: Client) -> None:
        """Tell the chat the lists again, if they changed. A server that can't list them then keeps those it had."""
        async with self._telling:
            if self._changed.is_set():
                self._changed.clear()
                with suppress(MCPError):
                    await self.tell(client)

    async def watch(self, client: Client) -> None:
        """Tell each change. Servers since 2026 notify only those who listen; they are listened to until they end."""
        listening = asyncio.ensure_future(_listen(client))
        try:
            while await self._changed.wait():
                await self.tell_changes(client)
        finally:
            listening.cancel()


async def _listen(client: Client) -> None:
    """Keep the notifications of a server coming, which notice() gets."""
    with suppress(ListenNotSupportedError, MCPError, SubscriptionLost):
        async with client.listen(
            tools_list_changed=True, prompts_list_changed=True, resources_list_changed=True
        ) as events:
            async for _ in events:
                pass


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


async def _answer(client: Client, chat: ToolPrompt, request: dict[str, Any], *, reads: bool) -> dict[str, Any]:
    """Call a tool; return its result or its error. Each notice of progress is told to the chat.

    Raises:
        MCPError: the server is gone.
    """
    try:
        if reads and request["call"] == _READ["name"]:
            read = await client.read_resource(str(request["arguments"].get("uri", "")))
            return {"result": limited("\n".join(_resource_text(content) for content in read.contents))}

        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            chat.tell(request, progress=progress)

        result = await client.call_tool(request["call"], request["arguments"], progress_callback=on_progress)
    except MCPError as error:
        if error.code == CONNECTION_CLOSED:
            raise
        return {"error": limited(error.message)}
    text, media = _content(result)
    return {"error" if result.is_error else "result": limited(text), "media": [each._asdict() for each in media]}


def _content(result: CallToolResult) -> tuple[str, list[Media]]:
    """Return the parts of a result that a model can read, as text, and the images and audio between them."""
    lines: list[str] = []
    media: list[Media] = []
    for block in result.content:
        data = _data(block)
        found = Media(data, at=sum(len(line) + 1 for line in lines))
        if found.modality is not None and sum(len(each.data) for each in media) + len(data) <= _MAX_MEDIA:
            media.append(found)
        else:
            lines.append(_block_text(block))
    if result.structured_content is not None and not _is_told(result.structured_content, lines):
        lines.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(lines), media


def _data(block: ContentBlock) -> str:
    """Return an image or audio file in base64; "" for a block of text."""
    if isinstance(block, ImageContent | AudioContent):
        return block.data
    resource = block.resource if isinstance(block, EmbeddedResource) else None
    return resource.blob if isinstance(resource, BlobResourceContents) else ""


def _block_text(block: ContentBlock) -> str:
    if isinstance(block, TextContent):
        return block.text
    if isinstance(block, EmbeddedResource):
        return _resource_text(block.resource)
    return block.model_dump_json(exclude={"data"}, exclude_none=True)


def _is_told(structured: Any, lines: Sequence[str]) -> bool:
    """Return whether texts say the same as structured content, as the protocol advises: whole, or an item each.

    A server may wrap a value that is no object: {"result": VALUE}.
    """
    value = structured["result"] if isinstance(structured, dict) and [*structured] == ["result"] else structured
    told = [_parsed(line) for line in lines]
    items = value if isinstance(value, list) else [value]
    return any(each in (structured, value) for each in told) or (bool(lines) and items in (told, [*lines]))


def _parsed(text: str) -> Any:
    try:
        return load_json(text)
    except ValueError:
        return text


def _resource_text(contents: TextResourceContents | BlobResourceContents) -> str:
    if isinstance(contents, TextResourceContents):
        return contents.text
    return contents.model_dump_json(exclude={"blob"}, exclude_none=True)
