"""Saved chats as text for other programs and people: Markdown, JSON, JSONL, OpenAI's fine-tuning lines."""

from __future__ import annotations

import json
import math
import re
from datetime import datetime, timezone
from typing import Any, Literal, get_args

from llmrun.chat.media import MediaFile
from llmrun.chat.passages import Passage
from llmrun.chat.store.rows import checked_name
from llmrun.chat.store.turns import (
    INTERRUPTED,
    Answer,
    Question,
    Tree,
    TurnEntry,
    answer_of,
    plain_facts,
    round_messages,
)
from llmrun.errors import LlmrunError, UsageError
from llmrun.protocol.codec import as_dict, from_json, load_json
from llmrun.protocol.messages import Message

Format = Literal["markdown", "json", "jsonl", "openai"]
FORMATS: tuple[Format, ...] = get_args(Format)
_BY_SUFFIX: dict[str, Format] = {".md": "markdown", ".markdown": "markdown", ".json": "json", ".jsonl": "jsonl"}

_KIND, _VERSION = "llmrun-chat", 1
_TICKS = re.compile(r"^ {0,3}(`{3,}|~{3,})", re.MULTILINE)


def format_for(name: str) -> Format | None:
    """Return the format that the suffix of a file name stands for."""
    return next((form for suffix, form in _BY_SUFFIX.items() if name.lower().endswith(suffix)), None)


def export(tree: Tree, form: Format, branch: str = "") -> str:
    """Return a chat in a format, with a newline at the end.

    Args:
        form: "json" has every branch and can be imported; "markdown" is for people; "jsonl" has one message a line, an
            OpenAI message with its settings and statistics; "openai" is one line with the messages alone.
        branch: for all but "json": the conversation, by default the current one.

    Raises:
        UsageError: there is no such branch.
    """
    if form == "json":
        return json.dumps(_document(tree), ensure_ascii=False, indent=1, allow_nan=False) + "\n"
    if branch and branch not in tree.branches:
        raise UsageError(f"{tree.name} has no branch {branch!r}", why=f"it has {', '.join(sorted(tree.branches))}")
    path = tree.path(branch)
    if form == "markdown":
        return _markdown(tree, path)
    if form == "jsonl":
        return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in _lines(tree, path))
    shared = ("role", "content", "tool_calls", "tool_call_id")
    messages = [{name: line[name] for name in shared if name in line} for line in _lines(tree, path)]
    return json.dumps({"messages": messages}, ensure_ascii=False) + "\n"


def read_json(text: str) -> Tree:
    """Return the chat of a JSON export.

    Raises:
        UsageError: it is invalid, damaged, or of a newer llmrun.
    """
    try:
        document = load_json(text)
        if not isinstance(document, dict) or document.get("format") != _KIND:
            raise UsageError("this is not an exported chat", hint="llmrun sessions export NAME --format json makes one")
        if document["version"] > _VERSION:
            raise UsageError("this chat was exported by a newer llmrun", hint="pip install --upgrade llmrun")
        return _tree(document)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise UsageError("this exported chat can't be read", why=f"{type(error).__name__}: {error}") from None
    except LlmrunError as error:
        if isinstance(error, UsageError) and error.hint:
            raise
        raise UsageError("this exported chat can't be read", why=str(error)) from None


def iso_time(seconds: float) -> str:
    """Return seconds since 1970 as ISO 8601, in UTC."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")


# ---- JSON ------------------------------------------------------------------------------------------


def _document(tree: Tree) -> dict[str, Any]:
    return {
        "format": _KIND,
        "version": _VERSION,
        "name": tree.name,
        "system": tree.system,
        "created": tree.created,
        "updated": tree.updated,
        "branch": tree.branch,
        "branches": dict(tree.branches),
        "messages": [_message(entry) for entry in tree.entries],
    }


def _message(entry: TurnEntry) -> dict[str, Any]:
    plain: dict[str, Any] = {"id": entry.id, "parent": entry.parent, "created": entry.created, "role": entry.role}
    plain["content"] = entry.part.content
    if isinstance(entry.part, Question):
        others = {
            "typed": entry.part.typed,
            "pictures": [as_dict(file) for file in entry.part.media],
            "passages": [as_dict(passage) for passage in entry.part.passages],
        }
        return plain | {name: value for name, value in others.items() if value}
    return {
        **plain,
        **({"reasoning": entry.part.reasoning} if entry.part.reasoning else {}),
        **plain_facts(entry.part),
    }


def _tree(document: dict[str, Any]) -> Tree:
    entries: dict[int, TurnEntry] = {}
    for item in document["messages"]:
        entry = TurnEntry(_whole(item["id"]), item["parent"], _time(item["created"]), _part(item))
        above = entries[entry.parent] if entry.parent is not None else None
        if entry.id in entries or (above.role if above else "assistant") == entry.role:
            raise ValueError(f"message {entry.id} comes twice, or at a place where it can't be")
        entries[entry.id] = entry
    branches = {checked_name(name): head for name, head in document["branches"].items()}
    if document["branch"] not in branches or any(
        head is not None and head not in entries for head in branches.values()
    ):
        raise ValueError("a branch leads nowhere")
    return Tree(
        checked_name(document["name"]),
        _string(document["system"]),
        _time(document["created"]),
        _time(document["updated"]),
        _string(document["branch"]),
        branches,
        tuple(entries.values()),
    )


def _part(item: dict[str, Any]) -> Question | Answer:
    content = _string(item["content"])
    if item["role"] == "user":
        media = tuple(from_json(MediaFile, file) for file in item.get("pictures", ()))
        passages = tuple(from_json(Passage, passage) for passage in item.get("passages", ()))
        return Question(content, _string(item.get("typed", "")), media, passages)
    if item["role"] != "assistant":
        raise ValueError(f"there is no role {item['role']!r}")
    return answer_of(content, _string(item.get("reasoning", "")), item)


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise TypeError(f"{value!r} is not an id")
    return value


def _time(value: Any) -> float:
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise TypeError(f"{value!r} is not a time")
    iso_time(value)  # or it can't be shown
    return float(value)


# ---- lines and Markdown ----------------------------------------------------------------------------


def _lines(tree: Tree, path: tuple[TurnEntry, ...]) -> list[dict[str, Any]]:
    system: list[dict[str, Any]] = [{"role": "system", "content": tree.system}] if tree.system else []
    for entry in path:
        plain = _message(entry)
        plain.pop("rounds", None)
        if isinstance(entry.part, Answer):
            system += map(_openai_message, round_messages(entry.part.rounds))
        system.append({"role": plain.pop("role"), "content": plain.pop("content"), **plain})
    return system


def _openai_message(message: Message) -> dict[str, Any]:
    """Return a message with calls, or the result of one."""
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.role == "tool":
        return {**plain, "tool_call_id": message.tool_call_id}
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    return {**plain, "tool_calls": calls}


def _markdown(tree: Tree, path: tuple[TurnEntry, ...]) -> str:
    parts = [f"# {tree.name}", f"*{iso_time(tree.created)}*"]
    if tree.system:
        parts += ["## System prompt", _closed(tree.system)]
    for entry in path:
        if isinstance(entry.part, Question):
            parts += ["## You", *(f"*{file.path}*" for file in entry.part.media), _closed(entry.part.content)]
            continue
        if entry.part.reasoning:
            quoted = "\n".join(f"> {line}".rstrip() for line in entry.part.reasoning.strip().splitlines())
            parts += ["## Reasoning", quoted]
        model = entry.part.model.name
        parts.append(f"## {model or 'Answer'}")
        for content, calls, results, *_ in entry.part.rounds:
            parts += [_closed(content)] if content else []
            for call, result in zip(calls, results, strict=True):
                parts += [f"Called `{call.name}`:", _code(call.arguments), _code(result)]
        parts.append(_closed(entry.part.content))
        parts += [f"*{ending(entry.part)}*"] if ending(entry.part) else []
    return "\n\n".join(parts) + "\n"


def ending(answer: Answer) -> str:
    """Return in words why an answer ended early, "" otherwise."""
    words = {
        "length": "cut off: no more tokens were allowed",
        "cancelled": "stopped",
        INTERRUPTED: f"cut off: {'the server broke off' if answer.model.server else 'llmrun or its engine died'}",
    }
    return "" if answer.finish == "stop" else words.get(answer.finish, answer.finish)


def _code(text: str) -> str:
    """Return text as a code block that no fence in the text can close."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}"


def _closed(text: str) -> str:
    """Return text with an open code block closed, so that the rest is not code: an answer may be cut off inside one."""
    fence = ""
    for mark in _TICKS.findall(text):
        if not fence:
            fence = mark
        elif mark[0] == fence[0] and len(mark) >= len(fence):
            fence = ""
    return f"{text.strip()}\n{fence}" if fence else text.strip()
