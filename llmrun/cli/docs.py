"""`--docs FOLDER` of `chat` and `run`: its options, and the folder's documents made ready to be searched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from llmrun.cli.completion import complete_model
from llmrun.cli.loading import find_model, open_model
from llmrun.cli.options import LoadingOptions
from llmrun.config import load_settings
from llmrun.errors import NetworkError, UsageError
from llmrun.gguf.reader import read_header
from llmrun.planning.plan import trained_context
from llmrun.planning.preferences import LoadPreferences
from llmrun.planning.speculation import OFF
from llmrun.system import user_path
from llmrun.ui.terminal.activity import Activity
from llmrun.ui.terminal.format import counted
from llmrun.ui.terminal.output import Output

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    from llmrun.chat.passages import Embed, FolderIndex, FolderState, Passage
    from llmrun.model import Model

DEFAULT_MODEL = "bge-small"
NO_MODEL = "none"
_PANEL = "Documents"
_WINDOW = 512  # tokens; a passage has half of them


class DocsOptions(NamedTuple):
    """A folder of documents, and the model that embeds them."""

    folder: str | None
    model: str | None  # None: the default one if it can be had, else none
    lists: bool = False  # name every file that is left out


def documents(
    docs: Annotated[
        str | None,
        typer.Option(
            "--docs",
            metavar="FOLDER",
            help="Send passages of this folder's documents along with each question. See llmrun help documents.",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    docs_model: Annotated[
        str | None,
        typer.Option(
            "--docs-model",
            metavar="NAME",
            help=f"Embedding model that finds them; {NO_MODEL} finds them by their words. Default: {DEFAULT_MODEL}.",
            autocompletion=complete_model,
            rich_help_panel=_PANEL,
        ),
    ] = None,
    docs_list: Annotated[
        bool,
        typer.Option(
            "--docs-list",
            help="Name every file of the folder that is left out, with the reason.",
            rich_help_panel=_PANEL,
        ),
    ] = False,
) -> DocsOptions:
    """Collect the options of documents.

    Raises:
        UsageError: there is a model, or a list, without a folder.
    """
    if docs_model and not docs:
        raise UsageError("--docs-model needs --docs", hint=f"--docs FOLDER --docs-model {docs_model}")
    if docs_list and not docs:
        raise UsageError("--docs-list needs --docs", hint="--docs FOLDER --docs-list")
    return DocsOptions(docs, docs_model, docs_list)


@contextmanager
def open_documents(output: Output, options: DocsOptions, loading: LoadingOptions) -> Iterator[FolderIndex | None]:
    """Bring the index of the folder up to date, and keep the embedding model loaded for questions; None without one.

    Before the model that answers is loaded, so that its plan sees the memory that is left.

    Args:
        loading: of the model that answers.

    Raises:
        UsageError: it is not a folder, or has too many files.
        LlmrunError: the embedding model can't be loaded.
    """
    if options.folder is None:
        yield None
        return
    from llmrun.chat.passages import FolderIndex

    index = FolderIndex(user_path(options.folder), load_settings().state_dir)
    path = _embedding_model(output, options, yes=loading.yes)
    if path is None:
        _refresh(output, index, lists=options.lists)
        yield index
        return
    trained = trained_context(read_header(path))
    preferences = LoadPreferences(
        _WINDOW if trained > _WINDOW else None,
        threads=loading.preferences.threads,
        gpu_layers=loading.preferences.gpu_layers,
    )
    own = LoadingOptions(preferences, OFF, loading.verbose, loading.yes)
    with open_model(output, options.model or DEFAULT_MODEL, own, embeds=True, another=True) as model:
        used = model.used
        _refresh(
            output, index, _embedder(output, model), used.sha256 or f"{used.path} {used.modified}", lists=options.lists
        )
        yield index


def _embedding_model(output: Output, options: DocsOptions, *, yes: bool) -> Path | None:
    """Return the file of the embedding model, downloaded if necessary; None to search by words alone.

    Raises:
        LlmrunError: the model that the user named can't be had.
    """
    if options.model == NO_MODEL:
        return None
    try:
        return find_model(output, options.model or DEFAULT_MODEL, yes=yes)[1]
    except NetworkError as error:
        if options.model:
            raise
        output.note(f"{DEFAULT_MODEL} can't be downloaded ({error.why or error.what}): words find the passages.")
        return None


def _embedder(output: Output, model: Model) -> Embed:
    """Return a function that computes vectors. Raises UsageError if the model ranks."""
    from llmrun.model.embeddings import Embedding, EmbedOptions  # without --docs, no answer needs them

    for note in Embedding(model.header, model.spec.embedding, EmbedOptions()).notes:
        output.note(note)

    def embed(texts: Iterable[str], role: Literal["query", "document"]) -> Iterator[NDArray[numpy.float32]]:
        for part in model.embed_each(texts, EmbedOptions(role)):
            yield part.vectors

    return embed


def _refresh(output: Output, index: FolderIndex, embed: Embed | None = None, model: str = "", *, lists: bool) -> None:
    """Bring the index up to date, and print what is new and what is left out: all of it, or the first and a count."""
    with Activity(output) as activity:

        def show(file: str, done: int, total: int) -> None:
            activity.show(f"{done:,} of {counted(total, 'file')}: {file}", done / total)

        state = index.refresh(embed, model, show)
    if state.read:
        changed = f"{counted(state.read, 'file')} new or changed"
        output.note(f"Documents: {counted(state.passages, 'passage')} of {counted(state.files, 'file')}; {changed}.")
    if lists:
        show_left_out(output, state)
        if not state.left_out:
            output.note("No file is left out.")
    else:
        for what, lines in (("Left out", state.left_out), ("Note", state.notes)):
            more = f"; and {len(lines) - 1:,} more (--docs-list names them)" if len(lines) > 1 else ""
            if lines:
                output.note(f"{what}: {lines[0]}{more}")
    if not state.passages:
        output.note("There is no text in this folder.")


def show_left_out(output: Output, state: FolderState) -> None:
    """Print each file that is left out, and each of which some is missing or whose encoding was guessed."""
    for what, lines in (("Left out", state.left_out), ("Note", state.notes)):
        for line in lines:
            output.note(f"{what}: {line}")


def show_found(output: Output, passages: tuple[Passage, ...], *, hint: str = "") -> None:
    """Print how many passages are sent with a question."""
    from llmrun.chat.passages import passages_line

    output.note(f"Sent with {passages_line(passages)}{hint}." if passages else "No passage fits the question.")
