"""`llmrun embed` and `llmrun rerank`: embeddings of texts, and documents sorted by relevance."""

from __future__ import annotations

import io
import json as json_module
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import typer

from llmrun.cli.completion import complete_words
from llmrun.cli.loading import open_model
from llmrun.cli.options import (
    CtxOption,
    LoadingOptions,
    ModelArgument,
    VerboseOption,
    YesOption,
    check_output_file,
    engine_options,
    kernels,
    with_options,
)
from llmrun.errors import UsageError
from llmrun.model.embeddings import Embedding, EmbedOptions, Ranking, joined
from llmrun.planning.preferences import LoadPreferences
from llmrun.planning.speculation import OFF
from llmrun.storage import decode_text, write_whole
from llmrun.ui.terminal.activity import Activity
from llmrun.ui.terminal.format import counted
from llmrun.ui.terminal.output import Output

if TYPE_CHECKING:
    from llmrun.model import Model
    from llmrun.model.embeddings import TextVectors

_MOST_COMPARED = 12
"""Texts; a larger table of similarities fits no terminal."""


@with_options(engine=engine_options("threads", "gpu_layers"), kernels=kernels)
def embed_loading(
    n_ctx: CtxOption = None,
    *,
    engine: dict[str, Any],
    kernels: str | None,
    verbose: VerboseOption = False,
    yes: YesOption = False,
) -> LoadingOptions:
    """Collect the options of loading a model for embeddings."""
    return LoadingOptions(LoadPreferences(n_ctx, **engine), OFF, verbose, yes, kernels=kernels)


def embedding(
    role: Annotated[
        Literal["query", "document", "none"],
        typer.Option(
            "--as",
            metavar="query|document|none",
            help="Role of the texts: put the prompt that the model recommends for it before each text.",
            autocompletion=complete_words("query", "document", "none"),
        ),
    ] = "document",
    prompt: Annotated[str | None, typer.Option("--prompt", help="Prompt to put before each text instead.")] = None,
    dimensions: Annotated[
        int | None, typer.Option("--dimensions", help="Shorten the vectors, if the model was trained for it.")
    ] = None,
    pooling: Annotated[
        str | None,
        typer.Option(
            "--pooling",
            metavar="mean|cls|last",
            help="Pooling of the token vectors. Default: as the model file says.",
            autocompletion=complete_words("mean", "cls", "last"),
        ),
    ] = None,
    normalize: Annotated[
        bool, typer.Option("--normalize/--no-normalize", help="Scale vectors to length 1, or leave them as they are.")
    ] = True,
    truncate: Annotated[
        bool,
        typer.Option("--truncate/--no-truncate", help="Cut off texts that are too long, or refuse them with an error."),
    ] = True,
) -> EmbedOptions:
    """Collect the options of embeddings."""
    return EmbedOptions(None if role == "none" else role, prompt, pooling, dimensions, normalize, truncate)


@with_options(options=embedding, loading=embed_loading)
def embed(
    model: ModelArgument,
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXT|FILE|-", help="Texts, or files with one text per line; - is stdin."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE.npy", help="Write a NumPy array (float32, one row per text)."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON lines on a terminal too.")] = False,
    *,
    options: EmbedOptions,
    loading: LoadingOptions,
) -> None:
    """Compute embeddings of texts.

    Prints JSON lines in a pipe, and the similarity of the texts on a terminal.
    """
    output = Output(json=json)
    if out is not None:
        _check_array(out)
        check_output_file(output, out, yes=loading.yes)
    given = read_texts(output, texts or [], "llmrun embed MODEL TEXT...")
    if out is None and output.stdout_is_terminal and not json and len(given) > _MOST_COMPARED:
        raise UsageError(f"{len(given):,} vectors are not for a terminal", hint="-o FILE.npy, --json, or a pipe")
    with open_model(output, model, loading, embeds=True) as loaded:
        parts = _shown_parts(output, loaded, given, options)
        if out is not None:
            _write_array(output, parts, out)
        elif json or not output.stdout_is_terminal:
            _print_lines(output, given, parts)
        else:
            from llmrun.ui.views.embeddings import show_similarities

            show_similarities(output, given, joined(parts))


@with_options(loading=embed_loading)
def rerank(
    model: ModelArgument,
    query: Annotated[str, typer.Argument(metavar="QUERY", help="Query to rank the documents by.")],
    documents: Annotated[
        list[str] | None,
        typer.Argument(metavar="DOCUMENT|FILE|-", help="Documents, or files with one per line; - is stdin."),
    ] = None,
    top: Annotated[int | None, typer.Option("--top", min=1, help="Print only the best N.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    *,
    loading: LoadingOptions,
) -> None:
    """Sort documents by relevance to a query.

    A model without a ranking head ranks by the cosine similarity of embeddings.
    """
    output = Output(json=json)
    given = read_texts(output, documents or [], "llmrun rerank MODEL QUERY DOCUMENT...")
    with open_model(output, model, loading, embeds=True) as loaded:
        for note in Ranking(loaded.header, loaded.spec.embedding).notes:
            output.note(note)
        ranked = loaded.rerank(query, given)[:top]
    if json:
        rows = [{"index": one.index, "score": one.score, "document": given[one.index]} for one in ranked]
        output.result_json(rows)
    elif output.stdout_is_terminal:
        from llmrun.ui.views.embeddings import show_ranked

        show_ranked(output, given, ranked)
    else:
        for one in ranked:
            output.text(f"{one.score:.6f}\t{given[one.index]}")


def read_texts(output: Output, words: Sequence[str], usage: str) -> list[str]:
    """Return the texts of arguments: the argument, or the lines of a file of that name, or of stdin for "-".

    Raises:
        UsageError: there is no text, one is blank, or a file can't be read.
    """
    if not words and not output.stdin_is_terminal:
        words = ["-"]
    texts = [text for word in words for text in _texts_of(output, word)]
    if not texts:
        raise UsageError("there is no text", hint=usage)
    return texts


def _texts_of(output: Output, word: str) -> list[str]:
    if word == "-":
        stdin: Any = getattr(output.stdin, "buffer", None)
        return _lines(output, stdin.read() if stdin else output.stdin.read().encode(), "stdin")
    if os.path.isfile(word):  # noqa: PTH113 - pathlib raises where a text is no file's name
        try:
            return _lines(output, Path(word).read_bytes(), word)
        except OSError as error:
            raise UsageError(f"can't read {word!r}", why=error.strerror or str(error)) from None
    return [os.fsencode(word).decode("utf-8", "replace")]


def _lines(output: Output, data: bytes, name: str) -> list[str]:
    if not data.strip():
        raise UsageError(f"{name} is empty", why="each of its lines is a text")
    decoded = decode_text(data, f"the text of {name} can't be read")
    if decoded.note:
        output.note(f"{name}: {decoded.note}")
    lines = [line.removesuffix("\r") for line in decoded.text.removesuffix("\n").split("\n")]
    blank = next((number for number, line in enumerate(lines, 1) if not line.strip()), None)
    if blank is not None:
        raise UsageError(f"line {blank} of {name} is empty", why="each line is a text", hint="remove empty lines")
    return lines


def _check_array(file: Path) -> None:
    """Raise UsageError unless an array file can have the name."""
    if file.suffix.lower() != ".npy":
        raise UsageError(f"invalid --output {file}", why="its name must end in .npy", hint="JSON lines: > FILE.jsonl")


def _shown_parts(output: Output, model: Model, texts: Sequence[str], options: EmbedOptions) -> Iterator[TextVectors]:
    """Yield the vectors as they are computed; show the progress, and note truncated texts at the end."""
    for note in Embedding(model.header, model.spec.embedding, options).notes:
        output.note(note)
    done, truncated = 0, 0
    with Activity(output) as activity:
        for part in model.embed_each(texts, options):
            yield part
            done, truncated = done + len(part.tokens), truncated + len(part.truncated)
            if done < len(texts):
                activity.show(f"{done:,} of {len(texts):,} texts", done / len(texts))
    if truncated:
        output.note(f"{truncated:,} of {len(texts):,} texts were too long: their ends are cut off (--no-truncate)")


def _print_lines(output: Output, texts: Sequence[str], parts: Iterator[TextVectors]) -> None:
    start = 0
    for part in parts:
        lines = []
        for place, (vector, tokens) in enumerate(zip(part.vectors.tolist(), part.tokens, strict=True)):
            facts = {"index": start + place, "text": texts[start + place], "tokens": tokens}
            facts |= {"truncated": True} if place in part.truncated else {}
            lines.append(json_module.dumps({**facts, "embedding": [float(f"{value:.8g}") for value in vector]}))
        output.text("\n".join(lines))
        start += len(part.tokens)


def _write_array(output: Output, parts: Iterator[TextVectors], file: Path) -> None:
    vectors = joined(parts).vectors
    data = io.BytesIO()
    np.save(data, vectors, allow_pickle=False)
    write_whole(file, data.getvalue())
    output.note(f"{counted(vectors.shape[0], 'vector')} of {vectors.shape[1]:,} dimensions in {file}")
