"""Backends that are files of their own, in the best variant or the one that the user names; submodules alone."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from llmrun.engine.llama import library as library_module
from llmrun.engine.llama.library import (
    _load_backends,
    cpu_variant,
    cpu_variants,
    distinct_variants,
    folder_of,
    import_submodule,
    runnable_variants,
    use_variant,
)
from llmrun.errors import UsageError
from llmrun.protocol.llama_folder import has_variants


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """libggml without a backend, in a folder with two variants of the processor's."""
    for name in (
        "libggml.so",
        "libggml-base.so",
        "libggml-vulkan.so",
        "libggml-cpu-x64.so",
        "libggml-cpu-armv8.2_1.so",
    ):
        (tmp_path / name).touch()
    monkeypatch.delenv("LLMRUN_CPU", raising=False)
    monkeypatch.setattr(library_module, "_variant_in_use", lambda library: "armv8.2_1")
    fake = Mock(_name=str(tmp_path / "libllama.so"))
    registries = iter([None])
    fake.ggml_backend_reg_by_name = Mock(side_effect=lambda name: next(registries, 7))
    return fake


def test_variants_are_found_by_their_names(library: Any, tmp_path: Path) -> None:
    assert cpu_variants(tmp_path) == {
        "x64": tmp_path / "libggml-cpu-x64.so",
        "armv8.2_1": tmp_path / "libggml-cpu-armv8.2_1.so",
    }


def test_ggml_chooses_from_the_librarys_own_folder(library: Any, tmp_path: Path) -> None:
    """Without a folder it would look in the current one, too."""
    _load_backends(library)
    library.ggml_backend_load_all_from_path.assert_called_once_with(bytes(tmp_path))
    library.ggml_backend_load.assert_not_called()
    assert library.ggml_log_set.call_args.args == (None, None)


def test_a_variant_that_the_user_names(library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRUN_CPU", "x64")
    _load_backends(library)
    assert library.ggml_backend_unload.call_args.args[0].value == 7
    library.ggml_backend_load.assert_called_once_with(bytes(tmp_path / "libggml-cpu-x64.so"))


def test_the_variant_that_ggml_chose_is_not_loaded_twice(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unloading it would leave no backend."""
    monkeypatch.setenv("LLMRUN_CPU", "armv8.2_1")
    _load_backends(library)
    library.ggml_backend_load.assert_not_called()
    library.ggml_backend_unload.assert_not_called()


@pytest.mark.parametrize("name", ["zen9", "x64"])
def test_a_variant_that_can_not_be_had(library: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("LLMRUN_CPU", name)
    library.ggml_backend_load.return_value = None  # as for a processor that lacks an instruction set
    with pytest.raises(UsageError, match=f"can't run LLMRUN_CPU={name}") as caught:
        _load_backends(library)
    assert "armv8.2_1, x64" in caught.value.hint
    assert library.ggml_log_set.call_args.args == (None, None)


def test_backends_that_are_linked_are_there_already(library: Any) -> None:
    library.ggml_backend_reg_by_name = Mock(return_value=7)
    _load_backends(library)
    library.ggml_backend_load_all_from_path.assert_not_called()


@pytest.mark.skipif(has_variants(), reason="the wheel of a release has variants")
def test_a_linked_backend_has_no_variant() -> None:
    assert cpu_variant() == ""
    assert runnable_variants() == {}
    use_variant("")
    use_variant("haswell")
    assert cpu_variant() == ""


def test_variants_are_ordered_by_what_they_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variants for other processors have score 0."""
    scores = {"x64": 1, "haswell": 64, "zen4": 0, "alderlake": 128, "cannonlake": 256, "skylakex": 255, "sse42": 2}
    for name in scores:
        (tmp_path / f"libggml-cpu-{name}.so").touch()
    monkeypatch.setattr(library_module, "import_llama", lambda: Mock(_lib=Mock(_name=str(tmp_path / "libllama.so"))))
    monkeypatch.setattr(library_module, "_first_variant", lambda: "haswell")
    monkeypatch.setattr(library_module, "_device_of", lambda backend: 10 * backend.ggml_backend_score())
    score = {
        f"libggml-cpu-{name}.so": Mock(ggml_backend_score=lambda value=value: value) for name, value in scores.items()
    }
    monkeypatch.setattr(library_module, "_small_signal_stack", nullcontext)
    monkeypatch.setattr(library_module.ctypes, "CDLL", lambda path: score[Path(path).name])
    assert [*runnable_variants()] == ["haswell", "cannonlake", "skylakex", "alderlake", "sse42", "x64"]
    assert distinct_variants() == {"haswell": 640, "skylakex": 2550, "alderlake": 1280, "sse42": 20}


def test_another_variant_is_used(library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_use = ["x64"]
    monkeypatch.setattr(library_module, "import_llama", lambda: Mock(_lib=library))
    monkeypatch.setattr(library_module, "cpu_variant", lambda: in_use[0])
    monkeypatch.setattr(library_module, "_variant_in_use", lambda library: in_use[0])
    monkeypatch.setattr(library_module, "_first_variant", lambda: "x64")
    monkeypatch.setattr(library_module, "_choose_kernels", Mock())
    for name in ("", "x64", "zen9"):  # in use, or not there
        use_variant(name)
    library.ggml_backend_load.assert_not_called()
    use_variant("armv8.2_1")
    library.ggml_backend_load.assert_called_once_with(bytes(tmp_path / "libggml-cpu-armv8.2_1.so"))
    library.ggml_backend_unload.assert_called_once()
    in_use[0] = "armv8.2_1"
    use_variant("")  # back to ggml's choice
    assert library.ggml_backend_load.call_args.args == (bytes(tmp_path / "libggml-cpu-x64.so"),)
    monkeypatch.setenv("LLMRUN_CPU", "armv8.2_1")
    use_variant("x64")
    assert library.ggml_backend_load.call_count == 2


def test_folder_of() -> None:
    folder = folder_of("jinja2")
    assert folder is not None
    assert (folder / "sandbox.py").is_file()
    assert folder_of("no_such_package_anywhere") is None


def test_missing_package() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_package_anywhere"):
        import_submodule("no_such_package_anywhere", "module")


def test_init_is_not_run(tmp_path: Path) -> None:
    package = tmp_path / "heavy"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('was run')\n")
    (package / "part.py").write_text("from heavy.other import VALUE\n")
    (package / "other.py").write_text("VALUE = 7\n")
    code = (
        "from llmrun.engine.llama.library import import_submodule\n"
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "assert import_submodule('heavy', 'part').VALUE == 7\n"
        "assert import_submodule('heavy', 'other').VALUE == 7\n"
        "import importlib.util\n"
        "assert importlib.util.find_spec('heavy').submodule_search_locations\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)
