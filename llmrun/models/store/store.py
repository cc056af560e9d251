"""Models in the standard Hugging Face cache, which other tools share.

The cache's layout:

    <hub_cache>/models--OWNER--REPO/blobs/<sha256>                      the bytes
                                    snapshots/<commit>/<filename>       relative symlink to them
                                    refs/<revision>                     the branch's commit
    <hub_cache>/.locks/models--OWNER--REPO/<sha256>.lock                the same lock that other tools take
    <hub_cache>/llmrun-urls/<hash>/{<filename>, link.txt}               models from plain links, which have no
                                                                        repository; llmrun's own
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from llmrun.config import Settings
from llmrun.gguf import filenames
from llmrun.models.registry import ModelSpec, load_catalogue
from llmrun.models.store import other_programs
from llmrun.models.store.installed import LINK, InstalledModel, measure
from llmrun.storage import disk_errors, sync_folder, write_whole
from llmrun.system import read_text

_COMMIT = re.compile(r"[0-9a-f]{40}")
_PREFIX = "models--"
_LINKS = "llmrun-urls"
_LINK_FILE = "link.txt"


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """File of a snapshot."""

    path: Path  # in the snapshot
    commit: str
    name: str  # relative to the snapshot, with forward slashes
    blob: Path  # the symlink's target; without symlinks the blob with the same inode, or the path itself


def is_commit(revision: str) -> bool:
    """Return whether a revision is a commit, which never changes, unlike a branch or tag."""
    return _COMMIT.fullmatch(revision) is not None


def all_models(settings: Settings) -> list[InstalledModel]:
    """Return every model on this disk by its shortest name, including those of other programs."""
    catalogue = load_catalogue()
    ours = [
        replace(model, name=catalogue.short_name(model.repository, model.filename) or model.name)
        for model in Store(settings).installed()
    ]
    return sorted([*ours, *other_programs.models()], key=_by_name)


class Store:
    """Models of one cache. Keeps no state between calls, because other tools change the cache too."""

    def __init__(self, settings: Settings) -> None:
        self.root = settings.hub_cache
        self.links = self.root / _LINKS

    # ---- paths

    def blob(self, repository: str, sha256: str) -> Path:
        """Return the path for the bytes with this hash."""
        return self._folder(repository) / "blobs" / sha256

    def lock(self, repository: str, sha256: str) -> Path:
        """Return the lock to hold while blob() is written."""
        return self.root / ".locks" / self._folder(repository).name / f"{sha256}.lock"

    def link_target(self, url: str) -> Path:
        """Return the path for the file of a plain link, ignoring its query: signed ones change it."""
        plain = _plain_link(url)
        import hashlib

        folder = hashlib.sha256(plain.encode()).hexdigest()[:16]
        name = unquote(urlsplit(plain).path).rpartition("/")[2]
        return self.links / folder / (re.sub(r"[^\w.+-]", "_", name).lstrip(".") or "model.gguf")

    def link_lock(self, url: str) -> Path:
        """Return the lock to hold while link_target() is written."""
        return self.root / ".locks" / _LINKS / f"{self.link_target(url).parent.name}.lock"

    def _folder(self, repository: str) -> Path:
        return self.root / (_PREFIX + repository.replace("/", "--"))

    def _existing_folder(self, repository: str) -> Path:
        """Return the repository's folder, also one with other capitals: the hub ignores case."""
        folder = self._folder(repository)
        if folder.is_dir():
            return folder
        name = folder.name.lower()
        return next((path for path in _folders(self.root) if path.name.lower() == name), folder)

    # ---- finding

    def find(self, spec: ModelSpec) -> InstalledModel | None:
        """Return the installed model for a spec, from the newest snapshot that has it.

        Models that Ollama or LM Studio fetched from the same repository count too, and so does any quant when the spec
        only proposes one.
        """
        if spec.url is not None:
            return self._of_link(self.link_target(spec.url))
        if spec.repository is None:
            return None
        snapshots = self._snapshots(self._existing_folder(spec.repository), spec.revision)
        installed = self._find(snapshots, spec, spec.filename, spec.quant)
        return installed or (self._find(snapshots, spec, None, None) if spec.any_quant else None)

    def _find(
        self, snapshots: list[Path], spec: ModelSpec, filename: str | None, quant: str | None
    ) -> InstalledModel | None:
        for snapshot in snapshots:
            names = _model_names(snapshot)
            chosen = filename or filenames.choose(names, quant)
            if chosen and chosen in names:
                repository = _repository(snapshot.parents[1].name)
                model = self._model(repository or "", snapshot, chosen, names)
                if model:
                    return model
        if spec.repository is None or spec.revision != "main":
            return None
        return other_programs.of_repository(spec.repository, filename, quant)

    def installed(self) -> list[InstalledModel]:
        """Return every model of the cache by name, from the newest snapshot of each."""
        models = [model for folder in self.repositories() for model in self._models(folder)]
        links = (self._of_link(path) for path in self.links.glob("*/*.[gG][gG][uU][fF]"))
        return sorted([*models, *(model for model in links if model)], key=_by_name)

    def repositories(self) -> list[Path]:
        """Return the folders of the cache's repositories."""
        return [folder for folder in _folders(self.root) if _repository(folder.name) is not None]

    def snapshot_files(self, folder: Path) -> list[SnapshotFile]:
        """Return every file of a repository's snapshots, including those whose bytes are missing."""
        paths = [
            (snapshot.name, snapshot, Path(inside, name))
            for snapshot in _snapshot_folders(folder)
            for inside, _, names in os.walk(snapshot)
            for name in names
        ]
        hard = _hard_links(folder / "blobs") if any(not path.is_symlink() for _, _, path in paths) else {}
        return [
            SnapshotFile(
                path, commit, path.relative_to(snapshot).as_posix(), hard.get(_inode(path)) or symlink_target(path)
            )
            for commit, snapshot, path in paths
        ]

    def _models(self, folder: Path) -> list[InstalledModel]:
        models: dict[str, InstalledModel] = {}
        repository = _repository(folder.name) or ""
        for snapshot in self._snapshots(folder, "main"):
            names = _model_names(snapshot)
            for filename in names:
                if filename not in models and not filenames.is_later_part(filename):
                    model = self._model(repository, snapshot, filename, names)
                    if model:
                        models[filename] = model
        return list(models.values())

    def _snapshots(self, folder: Path, revision: str) -> list[Path]:
        """Return a revision's snapshots, the newest first. "main" stands for any: an old model is better than none."""
        snapshots = _snapshot_folders(folder)
        if revision != "main":
            commit = revision if is_commit(revision) else read_text(folder / "refs" / revision)
            snapshots = [path for path in snapshots if path.name == commit]
        return sorted(snapshots, key=_changed, reverse=True)

    def _model(self, repository: str, snapshot: Path, filename: str, names: list[str]) -> InstalledModel | None:
        """Return the model, None when a part is missing. `names` are the snapshot's model files."""
        measured = measure(snapshot / name for name in filenames.all_parts(filename))
        if measured is None:
            return None
        size, modified = measured
        quant = filenames.quant_of(filename) or ""
        # Without a quant, or beside another file of the same quant, only the file's own name is unambiguous.
        short = bool(quant) and filenames.choose(names, quant) == filename
        return InstalledModel(
            name=f"{repository}:{quant}" if short else f"{repository}/{filename}",
            repository=repository,
            filename=filename,
            revision=snapshot.name,
            size=size,
            quant=quant,
            path=snapshot / filename,
            modified=modified,
        )

    def _of_link(self, path: Path) -> InstalledModel | None:
        measured = measure([path])
        url = read_text(path.with_name(_LINK_FILE))
        if measured is None or not url:
            return None
        (size, modified), quant = measured, filenames.quant_of(path.name) or ""
        return InstalledModel(url, "", path.name, "", size, quant, path, LINK, modified)

    # ---- adding

    def install(self, repository: str, commit: str, filename: str, sha256: str, revision: str = "main") -> Path:
        """Add an existing blob to a snapshot; return its path there.

        The caller validates commit, filename and sha256, because they become paths. `revision` is a branch or tag at
        this commit.
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
        """Record the link of a file at link_target(), without its secrets."""
        path = self.link_target(url).with_name(_LINK_FILE)
        write_whole(path, _plain_link(url), makes_folder=True)


def _plain_link(url: str) -> str:
    """Return the link without user, password, query and fragment."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _repository(folder_name: str) -> str | None:
    """Return OWNER/REPO for models--OWNER--REPO."""
    if not folder_name.startswith(_PREFIX):
        return None
    return folder_name.removeprefix(_PREFIX).replace("--", "/", 1)


def _by_name(model: InstalledModel) -> tuple[str, str]:
    return model.name.lower(), model.filename


def _snapshot_folders(folder: Path) -> list[Path]:
    return [path for path in _folders(folder / "snapshots") if is_commit(path.name)]


def symlink_target(path: Path) -> Path:
    """Return a symlink's target, even if missing, following one link only; any other path itself."""
    try:
        return Path(os.path.normpath(path.parent / path.readlink()))
    except OSError:
        return path


def _hard_links(blobs: Path) -> dict[tuple[int, int] | None, Path]:
    """Return the blobs that have another name too, by device and inode."""
    try:
        return {_inode(path): path for path in blobs.iterdir() if path.lstat().st_nlink > 1}
    except OSError:
        return {}


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _folders(path: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(path) if entry.is_dir()]
    except OSError:
        return []


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # removed meanwhile
        return 0


def _model_names(snapshot: Path) -> list[str]:
    """Return the relative names of the snapshot's model files, without broken links."""
    paths = [Path(folder, name) for folder, _, names in os.walk(snapshot) for name in names if filenames.is_model(name)]
    return [path.relative_to(snapshot).as_posix() for path in paths if path.is_file()]


def _link(blob: Path, path: Path) -> None:
    """Link `path` to the blob atomically: by a relative symlink, else a hard link, else a copy."""
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
