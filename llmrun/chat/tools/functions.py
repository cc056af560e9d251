"""The process that runs the functions of a Python file: `functions.py FILE FOLDER`.

A call can't be interrupted: to cancel it, the process is ended.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import docstring_parser
from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import to_json

from llmrun.chat.tools.prompting import ToolPrompt, in_words, limited
from llmrun.protocol.codec import load_json

Adapters = Mapping[str, TypeAdapter[Any]]


class _Untitled(GenerateJsonSchema):
    """JSON schemas without titles, which only repeat the names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def main() -> None:
    """Answer calls of the functions of a file."""
    chat = ToolPrompt()
    file, folder = sys.argv[1:]
    os.chdir(folder)
    is_safe = getattr(sys.flags, "safe_path", False)  # PYTHONSAFEPATH, from Python 3.11 on: there is no such place
    sys.path[: 0 if is_safe else 1] = [os.path.dirname(file)]  # noqa: PTH120 - what `python FILE` has there
    answer_calls(chat, lambda: public_functions(_loaded(file)))


def answer_calls(
    chat: ToolPrompt,
    load: Callable[[], Mapping[str, Callable[..., Any]]],
    during: Callable[[dict[str, Any]], AbstractContextManager[object]] = nullcontext,
    at_end: Callable[[], object] = int,
) -> None:
    """Answer calls until the chat ends.

    Args:
        load: returns the functions by name.
        during: entered with each call while it runs.
        at_end: called before a cancel, or the end of the chat, ends this process.
    """
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(chat.requests, requests, at_end), daemon=True).start()
    listing = requests.get()
    try:
        functions = load()
        tools = [described(name, function) for name, function in functions.items()]
    except BaseException as error:  # even SystemExit
        chat.tell(listing, end=in_words(error))
        return
    chat.tell(listing, tools=tools)
    adapters = {name: adapter(function) for name, function in functions.items()}
    while True:
        call = requests.get()
        with during(call):
            answer = answered(adapters, call)
        chat.tell(call, **answer)


def _read(descriptor: int, requests: queue.SimpleQueue[dict[str, Any]], at_end: Callable[[], object]) -> None:
    """Queue requests. A cancel, or the end of the chat, ends this process and all that the functions started."""
    with os.fdopen(descriptor) as lines:
        for line in lines:
            request = load_json(line)
            if "cancel" in request:
                break
            requests.put(request)
    at_end()
    if sys.platform == "win32":
        os._exit(1)
    os.killpg(0, signal.SIGKILL)


def _loaded(file: str) -> ModuleType:
    name = f"tools of {file}"  # a unique name
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def public_functions(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """Return the public functions defined in a module itself."""
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    }


def adapter(function: Any) -> TypeAdapter[Any]:
    """Return the adapter of a function's arguments. Validating arguments with it calls the function."""
    return TypeAdapter(function)


def described(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Return a function as a model sees it: type hints as a schema, and the docstring, in any of the usual styles.

    Raises:
        TypeError: its arguments can't be an object.
    """
    doc = docstring_parser.parse(inspect.getdoc(function) or "")
    try:
        schema = adapter(function).json_schema(schema_generator=_Untitled)
    except Exception as error:
        raise TypeError(f"{name}() can't be a tool: {in_words(error)}") from error
    if schema.get("type") != "object":
        raise TypeError(f"{name}() can't be a tool: it takes arguments that have no names")
    for parameter in doc.params:
        if parameter.arg_name in schema.get("properties", {}) and parameter.description:
            schema["properties"][parameter.arg_name].setdefault("description", parameter.description)
    return {"name": name, "description": (doc.description or "").strip(), "parameters": schema}


def answered(adapters: Adapters, request: Mapping[str, Any]) -> dict[str, str]:
    """Call a function; return its result or its error."""
    try:
        value = adapters[request["call"]].validate_python(request["arguments"])
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        text = value if isinstance(value, str) else to_json(value, fallback=str).decode()
    except BaseException as error:  # the model gets every error
        return {"error": limited(in_words(error))}
    return {"result": limited(text)}
