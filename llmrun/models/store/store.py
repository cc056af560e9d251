"""Which models are on this disk, in the standard Hugging Face cache that other tools share.

Owns the cache's layout; must not know the network nor what is inside a model file:

    <hub_cache>/models--OWNER--REPO/blobs/<sha256>                      the bytes
                                    snapshots/<commit>/<filename>       relative symlink to them
                                    refs/<revision>                     the commit a branch stood at
    <hub_cache>/.locks/models--OWNER--REPO/<sha256>.lock                the same lock that other tools take
    <hub_cache>/llmrun-urls/<hash>/{<filename>, link.txt}               models from plain links, which have no
                                                                        repository; ours alone
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from llmrun.config import Settings
from llmrun.gguf import filenames
from llmrun.models.registry import ModelSpec, load_catalogue
from llmrun.models.store import other_programs
from llmrun.models.store.disk import disk_errors
from llmrun.models.store.installed import LINK, Installed, measure
from llmrun.storage import sync_folder, write_whole

_COMMIT = re.compile(r"[0-9a-f]{40}")
_PREFIX = "models--"
_LINKS = "llmrun-urls"
_LINK_FILE = "link.txt"


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """A file as a snapshot shows it.

    Attributes:
        path: in the snapshot.
        commit: the snapshot's.
        name: relative to the snapshot, with forward slashes.
        blob: where its bytes are: what the symlink says; where symlinks are impossible the blob that is the same file,
            or the path itself.
    """

    path: Path
    commit: str
    name: str
    blob: Path


def is_commit(revision: str) -> bool:
    """Whether a revision always stands for the same files, as no branch or tag does."""
    return _COMMIT.fullmatch(revision) is not None


def everything(settings: Settings) -> list[Installed]:
    """Every model on this disk by its shortest name, also those of other programs."""
    catalogue = load_catalogue()
    ours = [
        replace(model, name=catalogue.short_name(model.repository, model.filename) or model.name)
        for model in Store(settings).installed()
    ]
    return sorted([*ours, *other_programs.models()], key=_by_name)


class Store:
    """The models of one cache. Nothing is remembered between calls: other tools change the cache too."""

    def __init__(self, settings: Settings) -> None:
        self.root = settings.hub_cache
        self.links = self.root / _LINKS

    # ---- where things are

    def blob(self, repository: str, sha256: str) -> Path:
        """Where the bytes with this hash belong."""
        return self._folder(repository) / "blobs" / sha256

    def lock(self, repository: str, sha256: str) -> Path:
        """The lock to hold while blob() is written."""
        return self.root / ".locks" / self._folder(repository).name / f"{sha256}.lock"

    def link_target(self, url: str) -> Path:
        """Where the file of a plain link belongs. A link's query does not count: signed ones change it."""
        plain = _plain_link(url)
        import hashlib

        folder = hashlib.sha256(plain.encode()).hexdigest()[:16]
        name = unquote(urlsplit(plain).path).rpartition("/")[2]
        return self.links / folder / (re.sub(r"[^\w.+-]", "_", name).lstrip(".") or "model.gguf")

    def link_lock(self, url: str) -> Path:
        """The lock to hold while link_target() is written."""
        return self.root / ".locks" / _LINKS / f"{self.link_target(url).parent.name}.lock"

    def _folder(self, repository: str) -> Path:
        return self.root / (_PREFIX + repository.replace("/", "--"))

    def _folder_there(self, repository: str) -> Path:
        """The repository's folder, also when it was written with other capitals: the hub does not mind them."""
        folder = self._folder(repository)
        if folder.is_dir():
            return folder
        wanted = folder.name.lower()
        return next((path for path in _folders(self.root) if path.name.lower() == wanted), folder)

    # ---- what is there

    def find(self, spec: ModelSpec) -> Installed | None:
        """The model a spec means, if it is on this disk; of several snapshots the newest that has it.

        What Ollama or LM Studio fetched from the same repository counts too, and where no quant was asked for, so does
        any quant.
        """
        if spec.url is not None:
            return self._of_link(self.link_target(spec.url))
        if spec.repository is None:
            return None
        snapshots = self._snapshots(self._folder_there(spec.repository), spec.revision)
        found = self._find(snapshots, spec, spec.filename, spec.quant)
        return found or (self._find(snapshots, spec, None, None) if spec.any_quant else None)

    def _find(
        self, snapshots: list[Path], spec: ModelSpec, filename: str | None, quant: str | None
    ) -> Installed | None:
        for snapshot in snapshots:
            names = [name for name, _ in _model_files(snapshot)]
            chosen = filename or filenames.choose(names, quant)
            if chosen and chosen in names:
                repository = _repository(snapshot.parents[1].name)
                model = self._model(repository or "", snapshot, chosen, names)
                if model:
                    return model
        if spec.repository is None or spec.revision != "main":
            return None
        return other_programs.of_repository(spec.repository, filename, quant)

    def installed(self) -> list[Installed]:
        """Every model of the cache by name, also what other tools fetched; of each the newest snapshot's."""
        models = [model for folder in self.repositories() for model in self._models(folder)]
        links = (self._of_link(path) for path in self.links.glob("*/*.[gG][gG][uU][fF]"))
        return sorted([*models, *(model for model in links if model)], key=_by_name)

    def repositories(self) -> list[Path]:
        """The folders of the repositories in the cache."""
        return [folder for folder in _folders(self.root) if _repository(folder.name) is not None]

    def snapshot_files(self, folder: Path) -> list[SnapshotFile]:
        """Every file of a repository's snapshots, also those whose bytes are missing."""
        paths = [
            (snapshot.name, snapshot, Path(inside, name))
            for snapshot in _snapshot_folders(folder)
            for inside, _, names in os.walk(snapshot)
            for name in names
        ]
        hard = _hard_links(folder / "blobs") if any(not path.is_symlink() for _, _, path in paths) else {}
        return [
            SnapshotFile(path, commit, path.relative_to(snapshot).as_posix(), hard.get(_inode(path)) or one_step(path))
            for commit, snapshot, path in paths
        ]

    def _models(self, folder: Path) -> list[Installed]:
        found: dict[str, Installed] = {}
        repository = _repository(folder.name) or ""
        for snapshot in self._snapshots(folder, "main"):
            names = [name for name, _ in _model_files(snapshot)]
            for filename in names:
                if filename not in found and not filenames.is_later_part(filename):
                    model = self._model(repository, snapshot, filename, names)
                    if model:
                        found[filename] = model
        return list(found.values())

    def _snapshots(self, folder: Path, revision: str) -> list[Path]:
        """The snapshots a revision may mean, the newest first. "main" is any: old is better than none."""
        snapshots = _snapshot_folders(folder)
        if revision != "main":
            commit = revision if is_commit(revision) else self._ref(folder, revision)
            snapshots = [path for path in snapshots if path.name == commit]
        return sorted(snapshots, key=_changed, reverse=True)

    def _ref(self, folder: Path, revision: str) -> str:
        try:
            return (folder / "refs" / revision).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return ""

    def _model(self, repository: str, snapshot: Path, filename: str, names: list[str]) -> Installed | None:
        """None when a part is missing. `names` are the snapshot's model files."""
        measured = measure(snapshot / name for name in filenames.all_parts(filename))
        if measured is None:
            return None
        quant = filenames.quant_of(filename) or ""
        # Without a quant, or beside another file of the same one, only the file's own name leads back to it.
        short = bool(quant) and filenames.choose(names, quant) == filename
        return Installed(
            name=f"{repository}:{quant}" if short else f"{repository}/{filename}",
            repository=repository,
            filename=filename,
            revision=snapshot.name,
            size=measured.size,
            quant=quant,
            path=snapshot / filename,
            modified=measured.modified,
            used=measured.used,
        )

    def _of_link(self, path: Path) -> Installed | None:
        measured = measure([path])
        try:
            url = path.with_name(_LINK_FILE).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return None
        if measured is None:
            return None
        quant = filenames.quant_of(path.name) or ""
        return Installed(url, "", path.name, "", measured.size, quant, path, LINK, measured.modified, measured.used)

    # ---- what comes in

    def install(self, repository: str, commit: str, filename: str, sha256: str, revision: str = "main") -> Path:
        """Make a blob that is there appear as a file of a snapshot; gives its path there.

        Args:
            commit, filename, sha256: checked by whoever got them; they become paths.
            revision: the branch or tag that stands at this commit.

        Raises:
            ResourceError: the cache can't be written.
        """
        folder = self._folder(repository)
        path = folder / "snapshots" / commit / filename
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            _link(self.blob(repository, sha256), path)
            if not is_commit(revision):
                write_whole(folder / "refs" / revision, commit, makes_folder=True)
        return path

    def install_link(self, url: str) -> None:
        """Note what link a file at link_target() came from, without what may be secret in it."""
        path = self.link_target(url).with_name(_LINK_FILE)
        write_whole(path, _plain_link(url), makes_folder=True)


def _plain_link(url: str) -> str:
    """The link without user, password, query and fragment."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _repository(folder_name: str) -> str | None:
    """models--OWNER--REPO -> OWNER/REPO."""
    if not folder_name.startswith(_PREFIX):
        return None
    return folder_name.removeprefix(_PREFIX).replace("--", "/", 1)


def _by_name(model: Installed) -> tuple[str, str]:
    return model.name.lower(), model.filename


def _snapshot_folders(folder: Path) -> list[Path]:
    return [path for path in _folders(folder / "snapshots") if _COMMIT.fullmatch(path.name)]


def one_step(path: Path) -> Path:
    """What a symlink leads to, one step and without looking whether it is there; any other path itself."""
    try:
        return Path(os.path.normpath(path.parent / path.readlink()))
    except OSError:
        return path


def _hard_links(blobs: Path) -> dict[tuple[int, int] | None, Path]:
    """Files that have another name too, by what makes them the same."""
    try:
        return {_inode(path): path for path in blobs.iterdir() if path.lstat().st_nlink > 1}
    except OSError:
        return {}


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        fact = path.lstat()
    except OSError:
        return None
    return fact.st_dev, fact.st_ino


def _folders(path: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(path) if entry.is_dir()]
    except OSError:
        return []


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # somebody removed it just now
        return 0


def _model_files(snapshot: Path) -> Iterator[tuple[str, Path]]:
    """Names, relative to the snapshot, of the model files in it. Broken links are left out."""
    for folder, _, names in os.walk(snapshot):
        for name in names:
            path = Path(folder, name)
            if filenames.is_model(name) and path.is_file():
                yield path.relative_to(snapshot).as_posix(), path


def _link(blob: Path, path: Path) -> None:
    """Make `path` lead to the blob, at once: by a relative symlink, else a hard link, else a copy."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        temporary.symlink_to(os.path.relpath(blob, path.parent))
    except OSError:  # Windows without developer mode, some network disks
        try:
            os.link(blob, temporary)
        except OSError:
            import shutil

            shutil.copyfile(blob, temporary)
    temporary.replace(path)
    sync_folder(path.parent)
