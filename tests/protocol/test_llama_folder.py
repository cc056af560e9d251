"""Which llama.cpp is used: llmrun's own, an installed package's, or the libraries in a folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from llmrun.errors import UsageError
from llmrun.protocol import llama_folder
from llmrun.protocol.llama_folder import backend_folders, is_bundled, library_folder, llama_version, package_folder


@pytest.fixture
def bundled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel's llama.cpp, beside an installed llama-cpp-python."""
    folder = tmp_path / "llmrun/llama_cpp"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text('__version__ = "7.8.9"\n')
    installed = tmp_path / "site/llama_cpp"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    monkeypatch.setattr(llama_folder, "_BUNDLED", folder)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
    monkeypatch.delenv("LLMRUN_LLAMA", raising=False)
    monkeypatch.delenv("LLAMA_CPP_LIB_PATH", raising=False)
    return folder


def test_the_wheels_own_comes_first(bundled: Path) -> None:
    assert is_bundled()
    assert (package_folder(), library_folder()) == (bundled, bundled / "lib")
    assert llama_version() == "7.8.9"


def test_the_installed_one_where_the_user_says_so(bundled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRUN_LLAMA", "llama-cpp-python")
    assert not is_bundled()
    assert package_folder() == bundled.parents[1] / "site/llama_cpp"


def test_the_installed_one_without_another(bundled: Path) -> None:
    (bundled / "__init__.py").unlink()
    bundled.rmdir()
    assert not is_bundled()
    assert library_folder() == bundled.parents[1] / "site/llama_cpp/lib"


def test_the_libraries_of_a_folder(bundled: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    assert (package_folder(), library_folder()) == (bundled, tmp_path)


def test_another_word_is_refused(bundled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRUN_LLAMA", "system")
    with pytest.raises(UsageError, match="LLMRUN_LLAMA is system") as caught:
        library_folder()
    assert "LLAMA_CPP_LIB_PATH=FOLDER" in caught.value.hint


def test_none_at_all(bundled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_folder, "_BUNDLED", bundled / "missing")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert (package_folder(), library_folder()) == (None, None)


@pytest.mark.parametrize(("version", "fits"), [("2.0", True), ("1.9", False)])
def test_a_cuda_backend_belongs_to_the_wheels_own(
    bundled: Path, monkeypatch: pytest.MonkeyPatch, version: str, fits: bool
) -> None:
    """ggml's structs differ between versions of llama.cpp, so another version is passed over."""
    site = bundled.parents[1] / "site"
    info = site / f"llmrun_cuda-{version}.dist-info"
    for folder in (info, site / "llmrun_cuda/lib"):
        folder.mkdir(parents=True)
    (site / "llmrun_cuda/__init__.py").touch()
    (info / "METADATA").write_text(f"Name: llmrun-cuda\nVersion: {version}\n")
    own = site / "llmrun-0.dist-info"
    own.mkdir()
    (own / "METADATA").write_text("Name: llmrun\nVersion: 2.0\n")
    assert backend_folders() == [bundled / "lib", *([site / "llmrun_cuda/lib"] if fits else [])]
    monkeypatch.setenv("LLMRUN_LLAMA", "llama-cpp-python")
    assert backend_folders() == [site / "llama_cpp/lib"]
