"""Every chat template of a folder, such as llama.cpp's models/templates: rendered, or refused with the reason.

    python tests/benchmarks/templates.py FOLDER [--llama-server PATH]

Each gets a conversation without and with a system prompt, and one whose messages are full of the control tokens that
the template writes: the prompt must then have no more of them. With --llama-server, which takes a minute or two,
llama.cpp's own server renders the second conversation too, and each difference is shown.
"""

from __future__ import annotations

import difflib
import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import peers

from llmrun.engine.prompt.template import ChatTemplate, ControlTexts, Part
from llmrun.errors import BadTemplateError
from llmrun.protocol.messages import Message

BOS, EOS = "<|im_start|>", "<|im_end|>"  # SmolLM2's, which llama-server would put in
CONTROL = re.compile(r"<[|｜][^<>|｜{}'\" ]+[|｜]>|\[/?[A-Z_]+\]|</?s>|<(?:start|end)_of_turn>|<(?:bos|eos)>")
QUESTION = [Message("user", "Why is the sky blue?")]
TURNS = [
    Message("system", "Be brief."),
    Message("user", " Why is the sky <b>blue</b>?\n"),
    Message("assistant", 'Rayleigh\'s "é".'),
    Message("user", "And at night?"),
]


class Outcome(NamedTuple):
    """What became of a template."""

    name: str
    milliseconds: float
    refused: str
    injected: int


def control_tokens(parts: Sequence[Part], control: ControlTexts) -> list[str]:
    """Those that the tokenizer would make."""
    return [token for part in parts if part.special for token in control.pattern.findall(part.text)]


def outcome(path: Path) -> Outcome:
    """Render one template."""
    source = path.read_text(encoding="utf-8")
    control = ControlTexts({*CONTROL.findall(source), BOS, EOS})
    evil = " ".join({*CONTROL.findall(source), BOS, EOS})
    forged = [Message(message.role, evil) for message in TURNS]
    harmless = [Message(message.role, "harmless") for message in TURNS]
    started = time.perf_counter()
    try:
        template = ChatTemplate(source, bos=BOS, eos=EOS)
        template.render(QUESTION, control)
        template.render(TURNS, control)
        took = (time.perf_counter() - started) * 1000
        innocent = control_tokens(template.render(harmless, control), control)
        injected = control_tokens(template.render(forged, control), control)
    except BadTemplateError as error:
        return Outcome(path.name, (time.perf_counter() - started) * 1000, f"{error.what}: {error.why}", 0)
    return Outcome(path.name, took, "", int(injected != innocent))


def server_prompt(server: str, model: str, path: Path) -> str:
    """What llama-server makes of the conversation with this template."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    arguments = ["-m", model, "-c", "256", "-t", "1", "--no-warmup", "--jinja", "--chat-template-file", str(path)]
    command = [server, *arguments, "--port", address.rpartition(":")[2]]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        messages = [{"role": message.role, "content": message.content} for message in TURNS]
        body = json.dumps({"messages": messages}).encode()
        while process.poll() is None:
            with suppress(urllib.error.URLError):  # it is not up yet
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                request = urllib.request.Request(f"{address}/apply-template", body)
                with urllib.request.urlopen(request, timeout=30) as answer:
                    return str(json.load(answer)["prompt"])
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()
    return f"(llama-server ended with {process.returncode})"


def difference(theirs: str, path: Path) -> str:
    """Where llama-server's prompt and ours differ; nothing if they do not."""
    template = ChatTemplate(path.read_text(encoding="utf-8"), bos=BOS, eos=EOS)
    ours = "".join(part.text for part in template.render(TURNS, ControlTexts([]), thinking=True))
    lines = difflib.unified_diff(theirs.split("\n"), ours.split("\n"), "llama-server", "llmrun", lineterm="", n=0)
    return "\n    ".join(lines)


def main() -> int:
    """Render and print."""
    parser = peers.parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--llama-server", metavar="PATH", help="compare with this")
    options = parser.parse_args()
    paths = sorted(options.folder.glob("*.jinja"))
    outcomes = [outcome(path) for path in paths]
    for name, milliseconds, refused, injected in outcomes:
        print(f"{name:60} {milliseconds:6.1f} ms  {refused or ('INJECTED' if injected else 'rendered')}")
    if options.llama_server:
        server = peers.find_tool("llama-server", options.llama_server)
        model = peers.model_file(peers.find_llmrun(options.llmrun), options.model)
        differences = {path.name: difference(server_prompt(server, model, path), path) for path in paths}
        for name, how in differences.items():
            if how:
                print(f"{name} differs:\n    {how}")
        print(f"{list(differences.values()).count('')} of {len(paths)} prompts are llama-server's")
    rendered = [each for each in outcomes if not each.refused]
    slowest = max((each.milliseconds for each in outcomes), default=0)
    injected = sum(each.injected for each in outcomes)
    print(f"{len(rendered)} of {len(outcomes)} rendered, the others refused; slowest {slowest:.0f} ms")
    print(f"{injected} take a control token from a message")
    return 1 if injected or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
