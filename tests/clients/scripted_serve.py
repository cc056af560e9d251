#!/usr/bin/env python
"""`llmrun` with a model that writes answers from a script: everything else is the product's own.

    LLMRUN_SCRIPT=FOLDER python tests/clients/scripted_serve.py serve MODEL ...

A request whose seed is N, and for which FOLDER has a file N.json, is answered by that file's answer in the syntax of
the model's family, token by token, whatever its grammar says; the seed is then forgotten. So prompts, caches, parsing
and usage are those of a model that wrote this.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

FOLDER, FAMILY = "LLMRUN_SCRIPT", "LLMRUN_SCRIPT_FAMILY"
_ENGINE = "scripted-engine"


class Call(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: Mapping[str, Any]


class Answer(NamedTuple):
    """What the model writes."""

    text: str = ""
    reasoning: str = ""
    call: Call | None = None

    @classmethod
    def read(cls, path: Path) -> Answer:
        """Read a file of the script."""
        text, reasoning, call = json.loads(path.read_text(encoding="utf-8"))
        return cls(text, reasoning, Call(*call) if call else None)


class Family(NamedTuple):
    """A family of models: how they write, and the control tokens that their templates name."""

    template: str  # file of llama.cpp's models/templates
    write: Callable[[Answer, bool], str]  # whether the prompt ends inside the reasoning
    controls: Sequence[str] = ()


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _thought(answer: Answer, inside: bool, opening: str = "<think>\n", closing: str = "\n</think>\n\n") -> str:
    return f"{'' if inside else opening}{answer.reasoning}{closing}"


def _qwen(answer: Answer, inside: bool) -> str:
    return (_thought(answer, inside) if inside else "") + _qwen_coder(answer, inside)


def _qwen_coder(answer: Answer, inside: bool) -> str:
    if answer.call is None:
        return answer.text
    values = "".join(
        f"<parameter={name}>\n{_plain(value)}\n</parameter>\n" for name, value in answer.call.arguments.items()
    )
    lead = f"{answer.text}\n\n" if answer.text else ""
    return f"{lead}<tool_call>\n<function={answer.call.name}>\n{values}</function>\n</tool_call>"


def _gpt_oss(answer: Answer, inside: bool) -> str:
    analysis = _thought(answer, inside, "<|channel|>analysis<|message|>", "<|end|><|start|>assistant")
    if answer.call is None:
        return f"{analysis}<|channel|>final<|message|>{answer.text}<|return|>"
    name, arguments = answer.call.name, json.dumps(answer.call.arguments)
    return f"{analysis}<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"


def _glm(answer: Answer, inside: bool) -> str:
    values = ""
    if answer.call is not None:
        values = f"\n<tool_call>{answer.call.name}\n" + "".join(
            f"<arg_key>{name}</arg_key>\n<arg_value>{_plain(value)}</arg_value>\n"
            for name, value in answer.call.arguments.items()
        )
        values += "</tool_call>"
    return _thought(answer, inside, "\n<think>", "</think>") + (f"\n{answer.text}" if answer.text else "") + values


def _devstral(answer: Answer, inside: bool) -> str:
    call = f"[TOOL_CALLS]{answer.call.name}[ARGS]{json.dumps(answer.call.arguments)}" if answer.call else ""
    return answer.text + call


_THINK, _CALL = ("<think>", "</think>"), ("<tool_call>", "</tool_call>")
FAMILIES = {
    "qwen3.5": Family("Qwen3.5-4B.jinja", _qwen, (*_THINK, *_CALL, "<tool_response>", "</tool_response>")),
    "qwen3-coder": Family("Qwen3-Coder.jinja", _qwen_coder, (*_CALL, "<tool_response>", "</tool_response>")),
    "gpt-oss": Family(
        "openai-gpt-oss-120b.jinja",
        _gpt_oss,
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),
    ),
    "glm": Family(
        "GLM-4.6.jinja",
        _glm,
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", *_THINK, *_CALL),
    ),
    "devstral": Family(
        "unsloth-mistral-Devstral-Small-2507.jinja",
        _devstral,
        ("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
         "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    ),
}  # fmt: skip


def _serve_engine() -> None:
    """Run the engine, in which requests of the script have another constraint."""
    from llmrun.engine import service, start
    from llmrun.engine.constraint.matcher import Mask
    from llmrun.engine.core.sampler import SequenceSampler

    folder, family = Path(os.environ[FOLDER]), FAMILIES[os.environ[FAMILY]]

    class Script:
        """The Constraint that allows one token after the other, and then an end."""

        def __init__(self, tokens: list[int], ends: Sequence[int], n_tokens: int) -> None:
            self._tokens, self._ends, self._next = tokens, ends, 0
            self._mask = Mask(n_tokens)

        def mask(self) -> int:
            self._mask.words[:] = [0] * len(self._mask.words)
            self._mask.allow(self._tokens[self._next : self._next + 1] or self._ends)
            return self._mask.address

        def accept(self, token: int) -> None:
            self._next += 1

        def refuses(self, token: int) -> bool:
            return False

        def forced(self) -> list[int]:
            return []

        def allowed(self, tokens: list[int]) -> int:
            return 0

        def closing(self, limit: int) -> list[int] | None:
            return None

        def rewind(self, n_tokens: int) -> None:
            self._next -= n_tokens

    def sampler(params: Any, vocabulary: Any, prompt: Any, constraint: Any, *others: Any, **named: Any) -> Any:
        path = folder / f"{params.seed}.json"
        if params.seed is None or not path.exists():
            return SequenceSampler(params, vocabulary, prompt, constraint, *others, **named)
        remember, logprobs, _, *banned = others
        tail = b"".join(vocabulary.piece(token) or vocabulary.control_piece(token) for token in prompt[-16:])
        text = family.write(Answer.read(path), tail.rstrip().endswith((b"<think>", b"analysis<|message|>")))
        script = Script(vocabulary.tokenize(text, special=True, begins=False), vocabulary.ends, vocabulary.n_tokens)
        return SequenceSampler(
            replace(params, seed=None), vocabulary, prompt, script, remember, logprobs, None, *banned, **named
        )

    service.SequenceSampler = sampler  # type: ignore[assignment, misc]
    start.main()


def _run_command() -> None:
    """Run the command with that engine."""
    from llmrun.cli.main import run
    from llmrun.runner import launch

    launch.launch.__defaults__ = ((sys.executable, __file__, _ENGINE),)
    run()


if __name__ == "__main__":
    if sys.argv[1:] == [_ENGINE]:
        del sys.argv[1:]
        _serve_engine()
    else:
        _run_command()
