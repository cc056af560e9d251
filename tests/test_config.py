"""Variables of the environment mean what they mean to huggingface_hub."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from llmrun.config import load_settings

_ASK = """
import json
from huggingface_hub import constants
print(json.dumps([constants.HF_HUB_CACHE, constants.ENDPOINT, constants.HF_HUB_OFFLINE]))
"""
_NAMES = (
    "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
)  # fmt: skip


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"HF_HUB_CACHE": "/a/hub", "HUGGINGFACE_HUB_CACHE": "/b", "HF_HOME": "/c"},
        {"HUGGINGFACE_HUB_CACHE": "/b", "HF_HOME": "/c"},
        {"HF_HOME": "/c", "XDG_CACHE_HOME": "/d"},
        {"XDG_CACHE_HOME": "/d"},
        {"HF_HOME": "$DISK/models"},
        {"HF_HOME": "~/models"},
        {"HF_HUB_CACHE": "~/${DISK}/hub"},
        {"HUGGINGFACE_HUB_CACHE": "$DISK/hub"},
        {"HF_HOME": "$NOWHERE/models"},
        {"HF_ENDPOINT": "https://hub.test/", "HF_HUB_OFFLINE": "yes"},
        {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "1"},
        {"TRANSFORMERS_OFFLINE": "true"},
    ],
    ids=str,
)
def test_as_huggingface_hub_reads_them(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"DISK": "/disk", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NOWHERE", raising=False)
    done = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, check=True)
    cache, endpoint, offline = json.loads(done.stdout)
    ours = load_settings()
    assert (str(ours.hub_cache), ours.endpoint, ours.offline) == (str(Path(cache).absolute()), endpoint, offline)
