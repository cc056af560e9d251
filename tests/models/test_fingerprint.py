"""Identity of the model that answered."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmrun.models.fingerprint import ModelFingerprint, fingerprint_file


def test_a_model_that_is_a_file_is_named_by_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.gguf").write_bytes(b"GGUF")
    used = fingerprint_file("", Path("m.gguf"))
    assert used.name == used.path == str(tmp_path / "m.gguf")
    assert not used.server


def test_a_server_stands_where_the_file_does() -> None:
    assert ModelFingerprint("smollm2", path="http://127.0.0.1:8080/v1").server == "http://127.0.0.1:8080/v1"
