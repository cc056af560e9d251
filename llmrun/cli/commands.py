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
    "run": CommandEntry(TALK, "run_command", "run", "Answer one prompt. What comes in on stdin stands before it."),
    "chat": CommandEntry(TALK, "chat", "chat", "Talk to a model. Ctrl-C stops an answer and keeps it, Ctrl-D leaves."),
    "batch": CommandEntry(TALK, "batch", "batch", "Answer a file of prompts, many side by side."),
    "serve": CommandEntry(TALK, "serve", "serve", "Serve models over HTTP to OpenAI, Anthropic and Ollama clients."),
    "worker": CommandEntry(TALK, "worker", "worker", "Hold layers of a model that runs on another machine."),
    "embed": CommandEntry(TALK, "embed", "embed", "Turn texts into vectors: similar meaning, similar direction."),
    "rerank": CommandEntry(TALK, "embed", "rerank", "Sort documents by how well they answer a query."),
    "ps": CommandEntry(TALK, "serving", "list_servers", "List the servers that run, and their models."),
    "stop": CommandEntry(TALK, "serving", "stop", "End a server that runs."),
    "sessions": CommandEntry(TALK, "sessions", "app", "The saved chats."),
    "replay": CommandEntry(TALK, "replay", "replay", "Answer a recorded prompt again, and compare the bytes."),
    "list": CommandEntry(
        MODELS, "models", "list_models", "List the models on this disk, Ollama's and LM Studio's too."
    ),
    "search": CommandEntry(MODELS, "models", "search", "Search for models by name, here and on the hub."),
    "show": CommandEntry(MODELS, "show", "show", "Show what a model's file says about itself, fetched or not."),
    "plan": CommandEntry(MODELS, "plan", "plan", "Show what each quant of a model needs and gives on this machine."),
    "pull": CommandEntry(
        MODELS, "models", "pull", "Download a model or its newer file, or finish an interrupted download."
    ),
    "import": CommandEntry(MODELS, "storage", "import_file", "Give a model file a name that every command knows."),
    "verify": CommandEntry(MODELS, "storage", "verify", "Read all bytes of models again and compare their checksums."),
    "rm": CommandEntry(MODELS, "storage", "remove", "Remove models from this disk."),
    "gc": CommandEntry(
        MODELS, "storage", "collect_garbage", "Remove what interrupted downloads and updates left behind."
    ),
    "quantize": CommandEntry(SMALLER, "quantize", "quantize", "Make a smaller file of a model."),
    "convert": CommandEntry(SMALLER, "convert", "convert", "Make a GGUF file from a Hugging Face folder."),
    "evaluate": CommandEntry(SMALLER, "evaluate", "evaluate", "Measure how well a model predicts a text."),
    "report": CommandEntry(SMALLER, "report", "report", "Compare several quants of a model: size, speed, quality."),
    "bench": CommandEntry(MEASURE, "bench", "bench", "Measure how fast models run here, and how sure that is."),
    "tune": CommandEntry(MEASURE, "tune", "tune", "Find and remember the fastest settings for a model here."),
    "doctor": CommandEntry(MEASURE, "doctor", "doctor", "Check this machine and installation, and say what to fix."),
    "explain": CommandEntry(LOOK, "explain", "explain", "Show what a model does between a prompt and its answer."),
    "tokenize": CommandEntry(LOOK, "tokenize", "tokenize", "Show a text as a model's tokens."),
    "score": CommandEntry(LOOK, "score", "score", "Show how likely each token of a text is to a model."),
    "watermark": CommandEntry(LOOK, "watermark", "app", "Find the mark that `--watermark` left in a text."),
    "help": CommandEntry("", "help", "show_help", "Help on a command or topic."),
}
"""Name -> command, in the order in which the help shows them; `help` itself is in no panel."""

ALIASES = {"ls": "list", "remove": "rm"}
"""Names that people are used to from elsewhere; the help does not show them."""
