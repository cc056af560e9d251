"""Models on a disk, as the hub's tools, Ollama and LM Studio leave them there. For tests."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from llmrun.config import Settings
from llmrun.models.store.store import Store
from support.stand_in_hub import sha256

REPOSITORY = "maker/tiny-GGUF"
OLD, NEW = "a" * 40, "b" * 40
DAY = 86_400


def lonely_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder in which no program has put models yet."""
    home.mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USERPROFILE", str(home))
    monkeypatch.setenv("OLLAMA_MODELS", str(home / ".ollama/models"))
    return home


def settings(root: Path) -> Settings:
    """Settings with the cache there, and no hub to be asked."""
    return Settings(root, "http://127.0.0.1:9", offline=False, debug=False)


def put(store: Store, filename: str, commit: str = OLD, repository: str = REPOSITORY, content: bytes = b"GGUF") -> Path:
    """A file as it is after a pull."""
    name = sha256(content)
    blob = store.blob(repository, name)
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(content)
    path = store.install(repository, commit, filename, name)
    order = 1_000_000_000 * (1 + (commit == NEW))
    os.utime(path.parent, ns=(order, order))
    return path


def put_ollama(
    models: Path,
    name: str,
    content: bytes = b"GGUF",
    *,
    file_type: str = "Q4_K_M",
    host: str = "registry.ollama.ai",
    config: Mapping[str, str] = MappingProxyType({}),
    **besides: bytes,
) -> Path:
    """A model as `ollama pull` leaves it; name is NAMESPACE/MODEL:TAG. Gives the path of its weights.

    Args:
        config: more fields of it.
        besides: further layers by the end of their media types.
    """
    stated = json.dumps({"model_format": "gguf", "file_type": file_type, **config}).encode()
    digests = []
    for data in (stated, content, *besides.values()):
        digest = sha256(data)
        blob = models / "blobs" / f"sha256-{digest}"
        blob.parent.mkdir(parents=True, exist_ok=True)
        if not blob.exists():
            blob.write_bytes(data)
        digests.append(f"sha256:{digest}")
    manifest = models / "manifests" / host / name.replace(":", "/")
    manifest.parent.mkdir(parents=True, exist_ok=True)
    layers = [
        {"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:" + "0" * 64},
        {"mediaType": "application/vnd.ollama.image.model", "digest": digests[1], "size": len(content)},
        *(
            {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": digest, "size": len(data)}
            for (kind, data), digest in zip(besides.items(), digests[2:], strict=True)
        ),
    ]
    manifest.write_text(json.dumps({"config": {"digest": digests[0]}, "layers": layers}))
    return models / "blobs" / f"sha256-{sha256(content)}"


def put_lm_studio(models: Path, repository: str, filename: str, content: bytes = b"GGUF") -> Path:
    """A file as LM Studio leaves it."""
    path = models / repository / filename
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def age(path: Path, days: float) -> None:
    """Make a file, or the link itself, so old."""
    then = path.lstat().st_mtime - days * DAY
    os.utime(path, (then, then), follow_symlinks=False)


def tree(folder: Path) -> set[str]:
    """Everything in a folder."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
