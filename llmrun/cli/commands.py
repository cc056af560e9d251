"""Which commands there are: their modules, panels and one-line help, as data that needs no import of them.

Help of all commands and the completion of a name read only this; a command's module is imported when it is called, or
its own help is asked for.
"""

from __future__ import annotations

from typing import NamedTuple


class CommandEntry(NamedTuple):
    """A command: the panel of the help that shows it, its function or app in a module of this package, its help."""

    panel: str
    module: str
    function: str
    help: str


TALK, MODELS, SMALLER, MEASURE, LOOK = "Talk", "Models", "Make smaller", "Measure", "Look inside"
PANELS = (TALK, MODELS, SMALLER, MEASURE, LOOK)

COMMANDS = {
    "run": CommandEntry(TALK, "run_command", "run", "Answer one prompt. Text from stdin is put before it."),
    "chat": CommandEntry(TALK, "chat", "chat", "Chat with a model. Ctrl-C stops an answer and keeps it, Ctrl-D quits."),
    "batch": CommandEntry(TALK, "batch", "batch", "Answer a file of prompts, many in parallel."),
    "serve": CommandEntry(TALK, "serve", "serve", "Serve models over HTTP to OpenAI, Anthropic and Ollama clients."),
    "launch": CommandEntry(TALK, "launch", "app", "Run a coding agent, such as Claude Code, with a local model."),
    "worker": CommandEntry(
        TALK, "worker", "worker", "Run an RPC worker: hold layers of a model that runs on another machine."
    ),
    "embed": CommandEntry(TALK, "embed", "embed", "Turn texts into embedding vectors."),
    "rerank": CommandEntry(TALK, "embed", "rerank", "Sort documents by how well they answer a query."),
    "ps": CommandEntry(TALK, "serving", "list_servers", "List running servers and their models."),
    "stop": CommandEntry(TALK, "serving", "stop", "Stop a running server."),
    "sessions": CommandEntry(TALK, "sessions", "app", "List, show, search, export and repair saved chats."),
    "replay": CommandEntry(TALK, "replay", "replay", "Repeat a recorded answer and compare the bytes."),
    "list": CommandEntry(MODELS, "models", "list_models", "List installed models, also Ollama's and LM Studio's."),
    "search": CommandEntry(MODELS, "models", "search", "Search for models by name, here and on the hub."),
    "show": CommandEntry(MODELS, "show", "show", "Show the facts in a model's file, installed or on the hub."),
    "plan": CommandEntry(MODELS, "plan", "plan", "Predict memory and speed of each quant of a model on this machine."),
    "pull": CommandEntry(
        MODELS, "models", "pull", "Download a model or its newer file, or finish an interrupted download."
    ),
    "import": CommandEntry(MODELS, "storage", "import_file", "Give a model file a name for all commands."),
    "verify": CommandEntry(MODELS, "storage", "verify", "Verify the checksums of installed models."),
    "rm": CommandEntry(MODELS, "storage", "remove", "Remove models from this disk."),
    "gc": CommandEntry(MODELS, "storage", "collect_garbage", "Remove leftovers of interrupted downloads and updates."),
    "quantize": CommandEntry(SMALLER, "quantize", "quantize", "Make a smaller file of a model."),
    "convert": CommandEntry(SMALLER, "convert", "convert", "Make a GGUF file from a Hugging Face folder."),
    "evaluate": CommandEntry(SMALLER, "evaluate", "evaluate", "Measure how well a model predicts a text."),
    "report": CommandEntry(SMALLER, "report", "report", "Compare several quants of a model: size, speed, quality."),
    "bench": CommandEntry(MEASURE, "bench", "bench", "Measure the speed of models, with confidence intervals."),
    "tune": CommandEntry(MEASURE, "tune", "tune", "Find and save the fastest settings for a model on this machine."),
    "doctor": CommandEntry(MEASURE, "doctor", "doctor", "Check this machine and installation, and recommend fixes."),
    "explain": CommandEntry(LOOK, "explain", "explain", "Show what a model computes between a prompt and its answer."),
    "tokenize": CommandEntry(LOOK, "tokenize", "tokenize", "Show a text as a model's tokens."),
    "score": CommandEntry(LOOK, "score", "score", "Show the probability of each token of a text."),
    "watermark": CommandEntry(LOOK, "watermark", "app", "Find the watermark that `--watermark` left in a text."),
    "help": CommandEntry("", "help", "show_help", "Show help on a command or topic."),
}
"""Name -> command, in the order in which the help shows them; `help` itself is in no panel."""

ALIASES = {"ls": "list", "remove": "rm"}
"""Names that people are used to from elsewhere; the help does not show them."""
