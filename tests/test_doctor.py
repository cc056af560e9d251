"""The doctor: what is missing or short is found and comes with a fix; nothing is changed or loaded."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from llmrun import doctor
from llmrun.config import Settings
from llmrun.doctor import Finding, examine
from llmrun.errors import LlmrunError
from llmrun.hardware import Hardware
from llmrun.messages import Loaded

GIB = 1 << 30
MACHINE = Hardware("Good CPU", ("avx", "avx2"), 4, 8, None, 16 * GIB, 8 * GIB)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("LLMRUN_HOME", str(tmp_path / "state"))
    return Settings(tmp_path / "hub", "https://hub.invalid", offline=True, debug=False)


def findings(settings: Settings, hardware: Hardware = MACHINE, **more: object) -> dict[str, Finding]:
    found = examine(settings, hardware=hardware, **more)  # type: ignore[arg-type]
    assert len({finding.topic for finding in found}) == len(found)
    return {finding.topic: finding for finding in found}


def test_good_machine(settings: Settings) -> None:
    found = findings(settings)
    for topic in ("Python", "processor", "threads", "memory", "hub cache", "state", "catalogue"):
        assert found[topic].status == "ok", found[topic]
    assert found["threads"].text.startswith("4 used: 4 cores, 8 hardware threads")
    assert found["memory"].text == "8.0 GiB of 16.0 GiB free"
    assert "smollm2 by default" in found["catalogue"].text
    assert not {"models", "engine"} & set(found)


def test_nothing_is_made_on_the_disk(settings: Settings, tmp_path: Path) -> None:
    assert "not there yet" in findings(settings)["hub cache"].text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "topic"),
    [
        ({"memory_available": GIB // 2}, "memory"),
        ({"memory_total": 0, "memory_available": 0}, "memory"),
        ({"cpu_quota": 1.5}, "threads"),
        ({"cpu_flags": ("avx",)}, "processor"),
    ],
)
def test_weak_machine_is_a_warning(settings: Settings, change: dict[str, object], topic: str) -> None:
    assert findings(settings, replace(MACHINE, **change))[topic].status == "warning"  # type: ignore[arg-type]


def test_quota_is_named(settings: Settings) -> None:
    assert "1.5 at a time" in findings(settings, replace(MACHINE, cpu_quota=1.5))["threads"].text


def test_cache_that_is_a_file(settings: Settings) -> None:
    settings.hub_cache.touch()
    finding = findings(settings)["hub cache"]
    assert finding.status == "problem"
    assert str(settings.hub_cache) in finding.fix


def test_cache_that_can_not_be_written(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert findings(settings)["hub cache"].status == "problem"


def test_cache_that_can_not_be_seen(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    exists = Path.exists

    def locked(path: Path) -> bool:
        if path == settings.hub_cache:
            raise PermissionError(path)
        return exists(path)

    monkeypatch.setattr(Path, "exists", locked)
    monkeypatch.setattr("os.access", lambda path, mode: path != settings.hub_cache.parent)
    assert findings(settings)["hub cache"].status == "problem"


def test_full_disk(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": GIB}))
    finding = findings(settings)["hub cache"]
    assert (finding.status, bool(finding.fix)) == ("warning", True)


def test_missing_packages(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", version)
    found = findings(settings)
    assert found["llmrun"].status == "warning"
    assert found["llama-cpp-python"].status == "problem"
    assert found["llama-cpp-python"].fix


def test_llama_library(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "llama_cpp"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    assert findings(settings)["llama.cpp library"].status == "problem"
    (package / "lib" / "libllama.so").touch()
    finding = findings(settings)["llama.cpp library"]
    assert (finding.status, finding.text) == ("ok", str(package / "lib" / "libllama.so"))


def test_no_llama_package(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert findings(settings)["llama.cpp library"].status == "problem"


def test_sampler_that_can_not_be_loaded(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llmrun._native", None)
    monkeypatch.delattr("llmrun._native", raising=False)
    finding = findings(settings)["native sampler"]
    assert (finding.status, bool(finding.fix)) == ("problem", True)


def test_damaged_catalogue(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_catalogue() -> None:
        raise LlmrunError("it is damaged", hint="install llmrun again")

    monkeypatch.setattr(doctor, "load_catalogue", load_catalogue)
    finding = findings(settings)["catalogue"]
    assert (finding.status, finding.fix) == ("problem", "install llmrun again")


@pytest.mark.parametrize(("count", "text"), [(0, "none on this disk yet"), (3, "3 on this disk")])
def test_installed_models(settings: Settings, count: int, text: str) -> None:
    assert findings(settings, installed=count)["models"].text == text


def test_engine(settings: Settings) -> None:
    loaded = Loaded(512, 512, 10, "llama 135M Q4_1", True, ("CPU",), 0.25)
    assert findings(settings, engine=loaded)["engine"].text == "llama 135M Q4_1 in 0.2 s on CPU"


def test_llama_cpp_is_not_imported() -> None:
    code = (
        "import sys; from llmrun.config import load_settings; from llmrun.doctor import examine; "
        "examine(load_settings()); sys.exit('llama_cpp' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], check=True)
