"""Finds the documents that answer twenty questions among 300: `python tests/benchmarks/docs.py [MODEL] [FOLDER]`.

The documents are the docstrings of the standard library's modules, each module one file with a number for a name. A
question is answered if one of the first three passages is of the right file. Prints the figure for the ranking by words
alone, by the meaning alone and by both. MODEL is an embedding model, by default bge-small; none is by words alone.
FOLDER keeps documents and index for the next run, which then only asks.
"""

from __future__ import annotations

import ast
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import llmrun
from llmrun.chat import passages
from llmrun.chat.passages import Embed, FolderIndex
from llmrun.model import Model
from llmrun.model.embeddings import EmbedOptions

N_FILES, N_PASSAGES = 300, 3
LEAST_CHARACTERS = 200  # of the docstrings of a module
LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages", "ensurepip", "pydoc_data"}
QUESTIONS = {
    "How can I read settings from an INI file?": "configparser",
    "Which code splits a shell command line into its words, respecting quotes?": "shlex",
    "How do I keep a list in order while new elements arrive?": "bisect",
    "What gives me the smallest elements first, as a priority queue?": "heapq",
    "How can a program fetch a page from a web server?": "urllib.request",
    "Which class parses command line options and writes a usage message?": "argparse",
    "How do I compute the median and the standard deviation of numbers?": "statistics",
    "How can I make a temporary folder that is removed afterwards?": "tempfile",
    "How are two sequences of lines compared to show what changed between them?": "difflib",
    "What wraps a paragraph so that no line is wider than 70 columns?": "textwrap",
    "How do I compress data and read .gz files?": "gzip",
    "Where is exact arithmetic with ratios of whole numbers?": "fractions",
    "How do I measure how long a small piece of code takes?": "timeit",
    "How can I store Python objects under keys in a file on the disk?": "shelve",
    "What creates a calendar of a month as text or HTML?": "calendar",
    "How do I run another program and read what it prints?": "subprocess",
    "What is used to draw lots: to shuffle a list or pick an element by chance?": "random",
    "How do I copy a whole directory tree, or delete one?": "shutil",
    "How do I hide what somebody types when a password is asked for?": "getpass",
    "What finds files whose names match a pattern with stars?": "glob",
}


def docstrings(file: Path) -> str:
    """The docstrings of a module, with the names of its classes and functions above them."""
    tree = ast.parse(file.read_bytes())
    found = [ast.get_docstring(tree) or ""]
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
            text = ast.get_docstring(node)
            found += [f"{node.name}\n{text}"] if text else []
    return "\n\n".join(filter(None, found))


def documents() -> dict[str, str]:
    """Name of a module -> its docstrings: those that the questions are about, then the first others."""
    library = Path(sysconfig.get_path("stdlib"))
    asked, found = {*QUESTIONS.values()}, dict[str, str]()
    for file in sorted(library.rglob("*.py")):
        parts = file.relative_to(library).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if LEFT_OUT & {*parts} or any(part[0] == "_" for part in parts):
            continue
        name, text = ".".join(parts), docstrings(file)
        if len(text) >= LEAST_CHARACTERS or name in asked:
            found[name] = text
    names = [*sorted(asked), *(name for name in found if name not in asked)][:N_FILES]
    return {name: found[name] for name in sorted(names)}


def embedding(model: Model) -> Embed:
    def embed(texts: object, role: object) -> Iterator[object]:
        for part in model.embed_each(texts, EmbedOptions(role)):  # type: ignore[arg-type]
            yield part.vectors

    return embed  # type: ignore[return-value]


def hits(index: FolderIndex, files: dict[str, str], weight: float, questions: dict[str, str]) -> list[str]:
    """The questions that are answered, with a weight of the meaning."""
    passages._MEANING_WEIGHT = weight
    found = {question: [each.file for each in index.search(question, N_PASSAGES)] for question in questions}
    return [question for question, name in questions.items() if files[name] in found[question]]


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "bge-small"
    texts = documents()
    files = {module: f"{number:03}.txt" for number, module in enumerate(texts)}
    with nullcontext(sys.argv[2]) if len(sys.argv) > 2 else tempfile.TemporaryDirectory() as place:
        folder = Path(place, "documents")
        folder.mkdir(parents=True, exist_ok=True)
        for module, text in texts.items():
            (folder / files[module]).write_text(text)
        model = None if name == "none" else llmrun.load(name, n_ctx=512)
        index = FolderIndex(folder, Path(place))
        embed = embedding(model) if model else None
        began = time.monotonic()
        state = index.refresh(embed, name)
        seconds = time.monotonic() - began
        print(f"{state.files} files, {state.passages} passages, indexed in {seconds:.1f} s; {name}")
        weights = {"words": 0.0, "meaning": 1.0, "both": passages._MEANING_WEIGHT} if model else {"words": 0.0}
        for words, weight in weights.items():
            answered = hits(index, files, weight, QUESTIONS)
            print(f"{words:8} {len(answered)} of {len(QUESTIONS)} in the first {N_PASSAGES} passages")
        for question in QUESTIONS:
            if question not in answered:
                print(f"  missed: {question} ({QUESTIONS[question]})")
        began = time.monotonic()
        again = index.refresh(embed, name)
        print(f"refreshed in {time.monotonic() - began:.2f} s: {again.read} files read")
        if model:
            model.close()


if __name__ == "__main__":
    main()
