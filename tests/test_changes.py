"""What a newcomer's change touches: each is made in a copy of the package, and the files are counted.

A field of a request is to reach what `keep_reasoning` reaches: options, presets, the server's defaults, every protocol,
remote servers, recordings, batches, the Python API, and the prompt. A setting of a load is to reach options, presets,
the server's defaults, the plan and llama.cpp. A rule of admission is to reach the generation loop.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.gguf_writer import runnable_model, write

import llmrun

PACKAGE = Path(llmrun.__file__).parent
MOST_FILES = 5
FIELD = {
    "protocol/messages.py": (
        "    arrived: float = request_field(0.0)\n",
        '    mood: str | None = request_field(\n'
        '        None, choices=("calm", "wild"), flag="--mood", metavar="MOOD", help="Mood of the answer.",\n'
        '        in_server=True, preset="model", keys=("mood",), servers={"llmrun": "mood"}, words="a mood",\n'
        '        in_python=True, in_prompt=True, needs_template=True,\n'
        "    )\n",
    ),
    "engine/prompt/writer.py": (
        '        with self.clock.phase("template"):\n            send(Rendering(',
        "        if request.mood is not None:\n"
        "            first = replace(messages[0], content=request.mood + messages[0].content)\n"
        "            messages = (first, *messages[1:])\n",
    ),
}  # fmt: skip
SETTING = {
    "protocol/settings.py": (
        "    @property\n    def kv_element_bytes(self)",
        '    swa_full: str = setting(\n'
        '        "off", "whole windows", option="--swa-full", help="Cache all tokens of sliding windows.",\n'
        '        metavar="on|off", unset="off", choices=("on", "off"), in_preset=True,\n'
        "    )\n\n",
    ),
    "planning/preferences.py": (
        "    parallel: int = 1  # answers",
        "    swa_full: str | None = None\n",
    ),
    "engine/llama/parameters.py": (
        "    params.type_k, params.type_v =",
        '    params.swa_full = load.swa_full == "on"\n',
    ),
}  # fmt: skip
RULE = {
    "engine/core/scheduler.py": (
        "        cached = slots.cached_prefix(",
        "        if sum(running.asked.owner == sequence.asked.owner for running in active) > 1:\n"
        "            continue  # two at a time of an owner\n",
    ),
}
"""Changes: file -> the lines that stand there, and the lines that the change adds before them."""


def changed(folder: Path, change: Mapping[str, tuple[str, str]]) -> int:
    """Make a copy of the package with a change, and return the number of files that differ."""

    def copy(source: str, target: str) -> None:
        if source.endswith(".py"):
            shutil.copyfile(source, target)
        else:
            Path(target).symlink_to(Path(source).resolve())

    shutil.copytree(PACKAGE, folder, copy_function=copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name, (before, added) in change.items():
        path = folder / name
        text = path.read_text(encoding="utf-8")
        assert text.count(before) == 1, f"{name} has no such line any more: {before}"
        path.write_text(text.replace(before, added + before), encoding="utf-8")
    return sum((PACKAGE / path.relative_to(folder)).read_bytes() != path.read_bytes() for path in folder.rglob("*.py"))


def seen(folder: Path, what: str, *arguments: Path) -> dict[str, Any]:
    """What a function of this file, run with a copy of the package, sees of a change."""
    paths = os.pathsep.join([str(folder.parent), str(Path(__file__).parent)])
    environment = {
        **os.environ, "PYTHONPATH": paths, "LLMRUN_HOME": str(folder.parent / "home"),
        "LLMRUN_CONFIG": str(folder.parent / "config.toml"),
    }  # fmt: skip
    words = [sys.executable, __file__, what, *map(str, arguments)]
    done = subprocess.run(words, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    found: dict[str, Any] = json.loads(done.stdout)
    assert Path(found.pop("package")) == folder, "another llmrun comes first on the path"
    return found


pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the copy has symbolic links")


def test_a_new_field_of_a_request_touches_few_files(tmp_path: Path) -> None:
    assert changed(tmp_path / "llmrun", FIELD) <= MOST_FILES
    found = seen(
        tmp_path / "llmrun", "field", write(tmp_path / "a.gguf", runnable_model({"llama.context_length": 512}))
    )
    assert found.pop("commands") == ["batch", "chat", "run", "serve"]
    assert set(found.pop("protocols").values()) == {"wild"}
    assert found.pop("tokens") == len("wild")
    assert found == {
        "preset": "wild", "default": "wild", "row": "wild", "plain": None, "invalid": "mood",
        "sent": {"llmrun": "wild", "openai": "refused"}, "recorded": "wild", "argument": True,
    }  # fmt: skip


def test_a_new_setting_of_a_load_touches_few_files(tmp_path: Path) -> None:
    assert changed(tmp_path / "llmrun", SETTING) <= MOST_FILES
    found = seen(tmp_path / "llmrun", "setting", write(tmp_path / "a.gguf", runnable_model()))
    assert set(found.pop("commands")) >= {"batch", "chat", "explain", "run", "serve"}
    assert found == {
        "preset": ["on", "preset"], "environment": ["off", "environment"], "served": "on", "typed": "off",
        "invalid": "--swa-full", "remote": True, "planned": {"on": True, "off": False, "open": False},
    }  # fmt: skip


def test_a_new_rule_of_admission_touches_few_files(tmp_path: Path) -> None:
    assert changed(tmp_path / "llmrun", RULE) <= MOST_FILES
    assert seen(tmp_path / "llmrun", "rule") == {"started": [1, 2, 4, 3]}


def commands_with(flag: str) -> list[str]:
    """Return the commands of the package that have an option."""
    import typer

    from llmrun.cli.app import RootCommand
    from llmrun.cli.commands import COMMANDS

    root = RootCommand(name="llmrun")
    commands = {name: root.get_command(typer.Context(root), name) for name in COMMANDS}
    return sorted(
        name for name, command in commands.items() if any(flag in parameter.opts for parameter in command.params)
    )


def setting(model: str) -> dict[str, Any]:
    """What the package sees of the setting `swa_full`."""
    from llmrun.cli.defaults import preset_layer
    from llmrun.engine.llama.library import import_llama
    from llmrun.engine.llama.parameters import context_parameters
    from llmrun.errors import UsageError
    from llmrun.gguf.reader import read_header
    from llmrun.planning.hardware import probe
    from llmrun.planning.plan import make_plan
    from llmrun.planning.preferences import LoadPreferences
    from llmrun.protocol.exclusions import conflict

    file = {"models.a.swa-full": "on"}
    preset = preset_layer(file, "a")
    os.environ["LLMRUN_SWA_FULL"] = "off"
    by_environment = preset_layer(file, "a")
    preferences: Any = LoadPreferences
    header, hardware = read_header(Path(model)), probe()
    try:
        invalid = str(preferences(swa_full="maybe"))
    except UsageError as error:
        invalid = str(error).split()[1]
    planned = {
        word: context_parameters(import_llama(), make_plan(header, hardware, each).load).swa_full
        for word, each in (
            ("on", preferences(swa_full="on")), ("off", preferences(swa_full="off")), ("open", preferences()),
        )
    }  # fmt: skip
    return {
        "commands": commands_with("--swa-full"),
        "preset": preset["swa_full"],
        "environment": by_environment["swa_full"],
        "served": preferences().completed(preset).swa_full,
        "typed": preferences(swa_full="off").completed(preset).swa_full,
        "invalid": invalid,
        "remote": conflict({"--at": "x", "--swa-full": "on"}) is not None,
        "planned": planned,
    }


def rule() -> dict[str, Any]:
    """What the generation loop does with two answers at a time of an owner."""
    from support.conversation import Conversation
    from support.fake_context import endless

    from llmrun.protocol.messages import Started

    talk = Conversation(endless, n_seq_max=4)
    for request, (owner, prompt) in enumerate((("ann", "abc"), ("ann", "def"), ("ann", "ghi"), ("bob", "jkl")), 1):
        talk.ask(prompt, most=20, request=request)
        sequence = talk.engine._waiting[-1]
        sequence.asked = replace(sequence.asked, owner=owner)
    talk.run()
    return {"started": [event.request for event in talk.events if isinstance(event, Started)]}


def field(model: str) -> dict[str, Any]:
    """What the package sees of the field `mood`."""
    from llmrun.cli import settings_file
    from llmrun.errors import UsageError
    from llmrun.protocol.codec import as_dict
    from llmrun.protocol.layers import layer
    from llmrun.protocol.messages import AnswerRequest, Message, given_values, with_defaults, without
    from llmrun.remote.request_body import body_of
    from llmrun.remote.server import ServedModel
    from llmrun.reply import FOR_CHATS
    from llmrun.server.pool import completed
    from llmrun.server.protocols import anthropic, ollama, openai_chat, openai_responses

    mood: Any = {"mood": "wild"}
    asked = AnswerRequest((Message("user", "Hi"),), **mood)
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, **mood}
    requests = {
        "openai": openai_chat.read(body), "anthropic": anthropic.read(body), "ollama": ollama.read_chat(body),
        "responses": openai_responses.read({"model": "m", "input": "Hi", **mood}),
    }  # fmt: skip
    sent = {owner: body_of(asked, ServedModel("m", owner)) for owner in ("llmrun", "openai")}
    try:
        invalid = str(AnswerRequest(mood=5))  # type: ignore[arg-type]
    except UsageError as error:
        invalid = str(error).split()[1]
    with llmrun.load(model, n_ctx=512, threads=1) as loaded:
        template: Any = {"template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
        plain, moody = (loaded.count("Hi", **template, **options).total for options in ({}, mood))
    return {
        "commands": commands_with("--mood"),
        "protocols": {name: getattr(each.request, "mood", None) for name, each in requests.items()},
        "preset": settings_file.parse("models.a.mood", "wild", "mood"),
        "default": getattr(completed(AnswerRequest(prompt="Hi"), layer("flag", mood)), "mood", None),
        "row": getattr(with_defaults(AnswerRequest(prompt="Hi"), asked), "mood", None),
        "plain": getattr(without(asked, needs_template=True), "mood", ""),
        "invalid": invalid,
        "sent": {owner: "refused" if "mood" in each.refused else each.body.get("mood") for owner, each in sent.items()},
        "recorded": {name: value for name, value in as_dict(asked).items() if name in given_values(asked)}.get("mood"),
        "argument": "mood" in FOR_CHATS,
        "tokens": moody - plain,
    }


if __name__ == "__main__":
    shown = globals()[sys.argv[1]](*sys.argv[2:])
    sys.stdout.write(json.dumps({"package": str(PACKAGE), **shown}))
