"""Conversations that agents and other clients send, and that some chat templates refuse or shorten."""

from __future__ import annotations

from dataclasses import replace

from llmrun.protocol.messages import Message, Tool, ToolCall

TOOLS = (Tool("tell_time", "Tells the time."),)
_SYSTEM, _LATE = Message("system", "s1"), Message("system", "s2")
_FIRST, _SECOND = Message("user", "u1"), Message("user", "u2")
_ANSWER, _MORE = Message("assistant", "a1"), Message("assistant", "a2")
_CALL = Message("assistant", "", (ToolCall("abcdefghi", "tell_time", '{"town": "Rome"}'),))
_RESULT = Message("tool", "noon", tool_call_id="abcdefghi", name="tell_time")

CONVERSATIONS = {
    "system text later": (_SYSTEM, _FIRST, _ANSWER, _LATE, _SECOND),
    "system text last": (_SYSTEM, _FIRST, _LATE),
    "system text after a result": (_SYSTEM, _FIRST, _CALL, _RESULT, _LATE),
    "system text between call and result": (_FIRST, _CALL, _LATE, _RESULT, _SECOND),
    "two system prompts": (_SYSTEM, _LATE, _FIRST),
    "only a system prompt": (_SYSTEM,),
    "two questions": (_FIRST, _SECOND),
    "two answers": (_FIRST, _ANSWER, _MORE, _SECOND),
    "an empty answer": (_FIRST, replace(_ANSWER, content=""), _SECOND),
    "an answer first": (_ANSWER, _FIRST),
    "an answer last": (_FIRST, _ANSWER),
    "a call first": (_CALL, _RESULT, _SECOND),
    "a result without a call": (_FIRST, _RESULT, _SECOND),
    "a call without a result": (_FIRST, _CALL, _SECOND),
    "reasoning, text and a call": (
        _FIRST,
        replace(_ANSWER, reasoning="r1"),
        _SECOND,
        replace(_CALL, content="a2", reasoning="r2"),
        _RESULT,
    ),
    "text and two rounds of calls": (_FIRST, _ANSWER, _CALL, _RESULT, _CALL, _RESULT, _MORE, _SECOND),
}


def has_tools(name: str) -> bool:
    return any(message.tool_calls or message.role == "tool" for message in CONVERSATIONS[name])
