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
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from llmrun.config import Settings
from llmrun.models import quants
from llmrun.models.registry import ModelSpec

_COMMIT = re.compile(r"[0-9a-f]{40}")
_PREFIX = "models--"
_LINKS = "llmrun-urls"
_LINK_FILE = "link.txt"


@dataclass(frozen=True, slots=True)
class Installed:
    """A model on this disk.

    Attributes:
        name: what to type to run it, e.g. "owner/repo:Q4_K_M".
        repository: "owner/repo", empty for a model from a plain link.
        filename: in the repository; of a split model the first part's.
        revision: the commit it was taken from, empty for a model from a plain link.
        size: of all its parts, in bytes.
        quant: e.g. "Q4_K_M", empty when the file's name tells none.
        path: of the (first) file.
    """

    name: str
    repository: str
    filename: str
    revision: str
    size: int
    quant: str
    path: Path


class Store:
    """The models of one cache. Nothing is remembered between calls: other tools change the cache too."""

    def __init__(self, settings: Settings) -> None:
        self.root = settings.hub_cache

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
        return self.root / _LINKS / folder / (re.sub(r"[^\w.+-]", "_", name).lstrip(".") or "model.gguf")

    def link_lock(self, url: str) -> Path:
        """The lock to hold while link_target() is written."""
        return self.root / ".locks" / _LINKS / f"{self.link_target(url).parent.name}.lock"

    def _folder(self, repository: str) -> Path:
        return self.root / (_PREFIX + repository.replace("/", "--"))

    # ---- what is there

    def find(self, spec: ModelSpec) -> Installed | None:
        """The model a spec means, if it is on this disk; of several snapshots the newest that has it."""
        if spec.url is not None:
            return self._of_link(self.link_target(spec.url))
        if spec.repository is None:
            return None
        for snapshot in self._snapshots(self._folder(spec.repository), spec.revision):
            names = [name for name, _ in _model_files(snapshot)]
            chosen = spec.filename or quants.choose(names, spec.quant)
            if chosen and chosen in names:
                model = self._model(spec.repository, snapshot, chosen)
                if model:
                    return model
        return None

    def installed(self) -> list[Installed]:
        """Every model of the cache by name, also those of other tools; of each the newest snapshot's."""
        found: dict[tuple[str, str], Installed] = {}
        for folder in _folders(self.root):
            repository = _repository(folder.name)
            if repository is None:
                continue
            for snapshot in self._snapshots(folder, "main"):
                for filename, _ in _model_files(snapshot):
                    if (repository, filename) not in found and not quants.is_later_part(filename):
                        model = self._model(repository, snapshot, filename)
                        if model:
                            found[repository, filename] = model
        links = [self._of_link(path) for path in self.root.glob(f"{_LINKS}/*/*.[gG][gG][uU][fF]")]
        models = [*found.values(), *(model for model in links if model)]
        return sorted(models, key=lambda model: (model.name.lower(), model.filename))

    def _snapshots(self, folder: Path, revision: str) -> list[Path]:
        """The snapshots a revision may mean, the newest first. "main" is any: old is better than none."""
        snapshots = [path for path in _folders(folder / "snapshots") if _COMMIT.fullmatch(path.name)]
        if revision != "main":
            commit = revision if _COMMIT.fullmatch(revision) else self._ref(folder, revision)
            snapshots = [path for path in snapshots if path.name == commit]
        return sorted(snapshots, key=_changed, reverse=True)

    def _ref(self, folder: Path, revision: str) -> str:
        try:
            return (folder / "refs" / revision).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return ""

    def _model(self, repository: str, snapshot: Path, filename: str) -> Installed | None:
        """None when a part is missing."""
        parts = [snapshot / name for name in quants.all_parts(filename)]
        try:
            size = sum(part.stat().st_size for part in parts)
        except OSError:
            return None
        quant = quants.quant_of(filename) or ""
        # Without a quant only the file's own name leads back to it.
        name = f"{repository}:{quant}" if quant else f"{repository}/{filename}"
        return Installed(name, repository, filename, snapshot.name, size, quant, parts[0])

    def _of_link(self, path: Path) -> Installed | None:
        try:
            size = path.stat().st_size
            url = path.with_name(_LINK_FILE).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return None
        return Installed(url, "", path.name, "", size, quants.quant_of(path.name) or "", path)

    # ---- what comes in

    def install(self, repository: str, commit: str, filename: str, sha256: str, revision: str = "main") -> Path:
        """Make a blob that is there appear as a file of a snapshot; gives its path there.

        Args:
            commit, filename, sha256: checked by whoever got them; they become paths.
            revision: the branch or tag that stands at this commit.

        Raises:
            ResourceError: the cache can't be written.
        """
        from llmrun.models.download import disk_errors

        folder = self._folder(repository)
        path = folder / "snapshots" / commit / filename
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            _link(self.blob(repository, sha256), path)
            if not _COMMIT.fullmatch(revision):
                _write(folder / "refs" / revision, commit)
        return path

    def install_link(self, url: str) -> None:
        """Note what link a file at link_target() came from, without what may be secret in it."""
        from llmrun.models.download import disk_errors

        path = self.link_target(url).with_name(_LINK_FILE)
        with disk_errors(path):
            _write(path, _plain_link(url))


def _plain_link(url: str) -> str:
    """The link without user, password, query and fragment."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _repository(folder_name: str) -> str | None:
    """models--OWNER--REPO -> OWNER/REPO."""
    if not folder_name.startswith(_PREFIX):
        return None
    return folder_name.removeprefix(_PREFIX).replace("--", "/", 1)


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
            if quants.is_model(name) and path.is_file():
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
    from llmrun.models.download import sync_folder

    sync_folder(path.parent)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
