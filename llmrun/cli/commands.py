"""The table of commands: module, panel and one-line help of each, as data that imports none of them.

The help of all commands and the completion of names read only this table. A command's module is imported when the
command is called or its own help is shown. This is the only door to the laboratory (llmrun.lab).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple


class CommandEntry(NamedTuple):
    """A command in the help of all commands."""

    panel: str
    module: str  # in llmrun
    function: str  # the name of its function or Typer app there
    help: str

    def load(self) -> Any:
        """Import the module, and return the function or the app."""
        return getattr(import_module(f"llmrun.{self.module}"), self.function)


TALK, SERVE, MODELS, SMALLER = "Talk", "Serve", "Models", "Make smaller"
MEASURE, LOOK, SET_UP = "Measure", "Look inside", "Set up"
PANELS = (TALK, SERVE, MODELS, SMALLER, MEASURE, LOOK, SET_UP)

COMMANDS = {
    "run": CommandEntry(TALK, "cli.run", "run", "Answer one prompt. Text from stdin is put before the prompt."),
    "chat": CommandEntry(
        TALK, "cli.chat", "chat", "Chat with a model. Ctrl-C stops an answer and keeps it; Ctrl-D exits."
    ),
    "batch": CommandEntry(TALK, "cli.batch", "batch", "Answer a file of prompts, many in parallel."),
    "embed": CommandEntry(TALK, "cli.embed", "embed", "Compute embeddings of texts."),
    "rerank": CommandEntry(TALK, "cli.embed", "rerank", "Sort documents by relevance to a query."),
    "sessions": CommandEntry(TALK, "cli.sessions", "app", "List, show, search and export saved chats."),
    "serve": CommandEntry(
        SERVE, "cli.serve", "serve", "Serve models over HTTP to OpenAI, Anthropic and Ollama clients."
    ),
    "launch": CommandEntry(SERVE, "cli.launch", "app", "Run a coding agent, such as Claude Code, with a local model."),
    "ps": CommandEntry(SERVE, "cli.servers", "list_servers", "List running servers and their models."),
    "stop": CommandEntry(SERVE, "cli.servers", "stop", "Stop a running server."),
    "logs": CommandEntry(SERVE, "cli.servers", "logs", "Show the log of a server in the background."),
    "worker": CommandEntry(
        SERVE, "cli.worker", "worker", "Run an RPC worker: compute layers of a model for another machine."
    ),
    "list": CommandEntry(
        MODELS,
        "cli.models",
        "list_models",
        "List the models on this disk, including those of Ollama, LM Studio and models.folders.",
    ),
    "search": CommandEntry(
        MODELS, "cli.hub", "search", "Search for models by name, in the built-in list and on the hub."
    ),
    "show": CommandEntry(MODELS, "cli.show", "show", "Show the metadata of a model, downloaded or not."),
    "plan": CommandEntry(
        MODELS, "cli.plan", "plan", "Predict memory and speed of each quant of a model on this machine."
    ),
    "pull": CommandEntry(MODELS, "cli.hub", "pull", "Download a model, update it, or resume an interrupted download."),
    "import": CommandEntry(MODELS, "cli.models", "import_file", "Add a model file to the cache under a name."),
    "verify": CommandEntry(MODELS, "cli.models", "verify", "Verify the checksums of downloaded models."),
    "rm": CommandEntry(MODELS, "cli.models", "remove", "Delete models from this disk."),
    "gc": CommandEntry(
        MODELS, "cli.models", "collect_garbage", "Delete leftovers of interrupted downloads and updates."
    ),
    "quantize": CommandEntry(SMALLER, "lab.cli.quantize", "quantize", "Quantize a model to a smaller file."),
    "convert": CommandEntry(SMALLER, "lab.cli.convert", "convert", "Convert a Hugging Face folder to a GGUF file."),
    "evaluate": CommandEntry(
        SMALLER, "lab.cli.evaluate", "evaluate", "Measure the perplexity of a model, and its distance from a reference."
    ),
    "report": CommandEntry(
        SMALLER, "lab.cli.quantize", "report", "Compare several quants of a model: size, speed, quality."
    ),
    "bench": CommandEntry(MEASURE, "lab.cli.bench", "bench", "Measure the speed of models, with confidence intervals."),
    "tune": CommandEntry(
        MEASURE, "lab.cli.tune", "tune", "Find and save the fastest settings for a model on this machine."
    ),
    "explain": CommandEntry(
        LOOK, "lab.cli.explain", "explain", "Show what a model computes between a prompt and its answer."
    ),
    "tokenize": CommandEntry(LOOK, "lab.cli.tokenize", "tokenize", "Split a text into the tokens of a model."),
    "score": CommandEntry(
        LOOK, "lab.cli.evaluate", "score", "Show the probability of each token of a text, and the perplexity."
    ),
    "replay": CommandEntry(LOOK, "cli.replay", "replay", "Answer a recorded prompt again and compare the bytes."),
    "watermark": CommandEntry(LOOK, "lab.cli.watermark", "app", "Detect the watermark of `--watermark` in a text."),
    "config": CommandEntry(
        SET_UP, "cli.config", "app", "Show and change the settings: default model, presets, server."
    ),
    "doctor": CommandEntry(
        SET_UP, "cli.doctor", "doctor", "Check this machine and the installation, and suggest fixes."
    ),
    "help": CommandEntry("", "cli.help", "show_help", "Show the help of a command or topic."),
}
"""Name -> command, in the order of the help; `help` itself is in no panel."""

# Options in `llmrun COMMAND --help` of commands with many options; `--help-all` shows all.
BASICS = {
    "run": "--system --file --image --max-tokens --json-schema --think --stats --json --temp --seed --ctx --gpu-layers",
    "chat": "--web --continue --session --private --system --file --think --temp --at --ctx --gpu-layers",
    "batch": "--output --prompt --parallel --retry-errors --dry-run --system --max-tokens --json-schema --temp --at",
    "serve": "--host --port --background --install --key-file --allow-origin --keep --parallel --timeout --ctx "
    "--gpu-layers --speculate --draft",
    "bench": "--n-prompt --n-gen --n-depth --threads --gpu-layers --repetitions --output --compare --vs --clients "
    "--speculate",
    "explain": "--answer --raw --system --html --json --temp --seed --ctx",
    "replay": "--model --ctx --threads --gpu-layers --speculate --verbose",
    "quantize": "--type --size --fit --imatrix --types --report --report-to --threads --dry-run",
    "evaluate": "--reference --text --chunks --long --ctx --threads --gpu-layers --json",
}

# Topic of `llmrun help` -> the command and panel whose options it lists.
OPTION_TOPICS = {
    "answer": ("run", "Answer"),
    "beams": ("run", "Beam search"),
    "documents": ("chat", "Documents"),
    "engine": ("run", "Engine"),
    "prompt": ("run", "Prompt"),
    "sampling": ("run", "Sampling"),
    "servers": ("run", "Remote server"),
    "tools": ("chat", "Tools"),
}

BENCH_COMMANDS = {
    "bench history": CommandEntry("", "lab.cli.bench_history", "history", "List saved results, or show one."),
    "bench compare": CommandEntry("", "lab.cli.bench_history", "compare", "Compare two results: different, or noise."),
    "bench rm": CommandEntry("", "lab.cli.bench_history", "remove", "Remove results from the history."),
}
"""Commands of two words; other words after `bench` are models."""

# What chats and the page of the server open of the laboratory.
EXPLAIN_IN_CHAT = CommandEntry(
    "", "lab.cli.explain", "explain_last_answer", "Show how the model made the last answer, from tokens to choices."
)
EXPLAIN_ON_PAGE = CommandEntry("", "lab.cli.explain", "explain_for_page", "Explain an answer of the page.")

ALIASES = {
    "ls": "list",
    "remove": "rm",
    "delete": "rm",
    "download": "pull",
    "get": "pull",
    "info": "show",
    "server": "serve",
    "cli": "chat",
    "perplexity": "evaluate",
}
"""Names of the same commands in other programs; the help does not show them."""
