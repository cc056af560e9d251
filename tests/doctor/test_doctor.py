"""The doctor: what is missing or short is found and comes with a fix; nothing is changed or loaded."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path

import pytest
from support.damaged_chats import HURT, NAMES, ROWS, hurt, make_chats

from llmrun.chat.store.rows import FILE
from llmrun.chat.store.store import folder_in
from llmrun.config import Settings
from llmrun.doctor import doctor
from llmrun.doctor.doctor import Finding, TrialResult, examine
from llmrun.errors import BadModelError, EngineCrashedError, LlmrunError
from llmrun.planning.hardware import Details, Hardware
from llmrun.planning.measurements import remember_variants
from llmrun.protocol.devices import Gpu
from llmrun.protocol.jobs.machine import Build
from llmrun.protocol.speculation import VariantTime

GIB = 1 << 30
MACHINE = Hardware("Good CPU", ("avx", "avx2"), 4, 8, None, 16 * GIB, 8 * GIB)
BUILD = Build({"CPU": ("AVX", "AVX2", "LLAMAFILE")}, (), offload=False)


@pytest.fixture(autouse=True)
def says(monkeypatch: pytest.MonkeyPatch) -> Callable[[Build], None]:
    """says(build): what llama.cpp says of itself."""

    def say(build: Build) -> None:
        monkeypatch.setattr(doctor, "_read_build", lambda: build)

    say(BUILD)
    return say


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("LLMRUN_HOME", str(tmp_path / "state"))
    return Settings(tmp_path / "hub", "https://hub.invalid", offline=True, debug=False)


def findings(settings: Settings, hardware: Hardware = MACHINE, **more: object) -> dict[str, Finding]:
    more.setdefault("details", Details())
    found = examine(settings, hardware=hardware, **more)  # type: ignore[arg-type]
    assert len({finding.topic for finding in found}) == len(found)
    return {finding.topic: finding for finding in found}


def test_rpc(settings: Settings, says: Callable[[Build], None]) -> None:
    without = findings(settings)["RPC"]
    assert (without.status, "-DGGML_RPC=ON" in without.fix) == ("ok", True)
    says(replace(BUILD, rpc=True))
    assert findings(settings)["RPC"].fix == ""


def test_good_machine(settings: Settings) -> None:
    found = findings(settings)
    for topic in ("Python", "build", "processor", "hub", "threads", "memory", "hub cache", "state", "catalogue"):
        assert found[topic].status == "ok", found[topic]
    assert found["threads"].text.startswith("4 used: 4 cores, 8 hardware threads")
    assert found["memory"].text == "8.6 GB of 17.2 GB free"
    assert "smollm2 by default" in found["catalogue"].text
    assert not {"models", "answer", "GPU", "power", "heat", "NUMA"} & set(found)


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


@pytest.mark.usefixtures("source_install")
def test_missing_packages(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", version)
    found = findings(settings)
    assert found["llmrun"].status == "warning"
    assert found["llama-cpp-python"].status == "problem"
    assert found["llama-cpp-python"].fix


@pytest.mark.usefixtures("source_install")
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
    other = tmp_path / "other"
    other.mkdir()
    (other / "libllama.so").touch()
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(other))
    assert findings(settings)["llama.cpp library"].text == str(other / "libllama.so")


@pytest.mark.usefixtures("source_install")
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


# ---- build and GPUs ---------------------------------------------------------------------------------


def test_processor_can_more_than_the_build(settings: Settings) -> None:
    finding = findings(settings, replace(MACHINE, cpu_flags=("avx", "avx2", "avx512f", "avx512_vnni")))["build"]
    assert finding.status == "warning"
    assert "AVX512, AVX512_VNNI, which this processor has, stays unused" in finding.text
    assert re.match('CMAKE_ARGS=".*" pip install --force-reinstall', finding.fix)


def test_variant_and_backends_in_use(settings: Settings, says: Callable[[Build], None]) -> None:
    """A build with variants has the best one for this processor."""
    says(replace(BUILD, cpu_variant="haswell", backends=("Vulkan", "CPU")))
    finding = findings(settings, replace(MACHINE, cpu_flags=("avx", "avx2", "avx512f")))["build"]
    assert finding.status == "ok"
    assert finding.text == "variant haswell (ggml's choice), for AVX, AVX2; backends in use: Vulkan, CPU"


def test_backends_without_a_device(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Callable[[Build], None]
) -> None:
    says(replace(BUILD, backends=("CUDA", "Vulkan", "CPU"), offload=True))
    assert findings(settings)["GPU"] == Finding("GPU", "ok", "none: no device for CUDA, Vulkan")
    monkeypatch.setattr(doctor, "backend_folders", lambda: [tmp_path, tmp_path])
    assert findings(settings)["GPU"].status == "ok"
    says(replace(BUILD, backends=("CPU",)))  # no driver
    finding = findings(settings)["GPU"]
    assert (finding.status, finding.text) == ("warning", "llmrun-cuda is installed, but can't be loaded")


def test_which_variant_is_fastest(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "has_variants", lambda: True)
    monkeypatch.delenv("LLMRUN_CPU", raising=False)
    assert findings(settings)["variants"].text == "not compared yet: an idle chat or server does that, once"
    times = (
        VariantTime("Q4_0", "zen4", 1.0, 0.1), VariantTime("Q4_0", "haswell", 2.0, 0.2),
        VariantTime("Q4_1", "zen4", 1.0, 0.1), VariantTime("Q4_1", "haswell", 0.8, 0.08),
    )  # fmt: skip
    remember_variants(times, MACHINE, settings.state_dir)
    assert findings(settings)["variants"].text == "the fastest here, × ggml's choice: Q4_0 zen4, Q4_1 haswell ×1.25"
    monkeypatch.setenv("LLMRUN_CPU", "haswell")
    assert "variants" not in findings(settings)


def test_the_wheels_own_llama_cpp(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "__init__.py").write_text('__version__ = "0.3.36"\n')
    (tmp_path / "lib/libllama.so").touch()
    monkeypatch.setattr("llmrun.protocol.llama_folder._BUNDLED", tmp_path)
    found = findings(settings)
    assert found["llama-cpp-python"].text == "0.3.36, in llmrun's own wheel"
    assert found["llama.cpp library"].text == str(tmp_path / "lib/libllama.so")


def test_build_is_for_another_processor(settings: Settings, says: Callable[[Build], None]) -> None:
    says(replace(BUILD, features={"CPU": ("AVX", "AVX2", "AVX512")}))
    finding = findings(settings)["build"]
    assert (finding.status, finding.exit_status) == ("problem", 1)
    assert "no AVX512" in finding.text


def test_unknown_processor_is_not_accused(settings: Settings) -> None:
    assert findings(settings, replace(MACHINE, cpu_flags=()))["build"].status == "ok"


def test_llama_cpp_that_can_not_be_asked(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> None:
        raise EngineCrashedError("the engine died", hint="do this")

    monkeypatch.setattr(doctor, "_read_build", ask)
    finding = findings(settings)["build"]
    assert (finding.status, finding.exit_status, finding.fix) == ("problem", 8, "do this")


def test_gpu_that_is_used(settings: Settings, says: Callable[[Build], None]) -> None:
    says(replace(BUILD, gpus=(Gpu("CUDA0", "Card", 8 * GIB, 6 * GIB),)))
    finding = findings(settings, details=Details(graphics=("NVIDIA",)))["GPU"]
    assert (finding.status, finding.text) == ("ok", "Card (CUDA0), 6.4 GB of 8.6 GB free")


@pytest.mark.parametrize(
    ("maker", "offload", "status", "fix"),
    [
        ("NVIDIA", False, "warning", "-DGGML_CUDA=on"),
        ("AMD", False, "warning", "-DGGML_HIP=on"),
        ("NVIDIA", True, "warning", "driver"),
        ("Intel", False, "ok", ""),
    ],
)
def test_gpu_that_is_not_used(
    settings: Settings,
    says: Callable[[Build], None],
    monkeypatch: pytest.MonkeyPatch,
    maker: str,
    offload: bool,
    status: str,
    fix: str,
) -> None:
    monkeypatch.setattr("shutil.which", lambda name, path=None: None)
    says(replace(BUILD, offload=offload))
    finding = findings(settings, details=Details(graphics=(maker, maker)))["GPU"]
    assert finding.status == status
    assert fix in finding.fix


@pytest.mark.parametrize(
    ("maker", "compilers", "command"),
    [
        ("NVIDIA", {"nvcc", "glslc"}, 'CMAKE_ARGS="-DGGML_CUDA=on" pip install'),
        ("NVIDIA", {"/usr/local/cuda/bin/nvcc"}, 'PATH=/usr/local/cuda/bin:$PATH CMAKE_ARGS="-DGGML_CUDA=on" pip'),
        ("NVIDIA", {"glslc"}, 'CMAKE_ARGS="-DGGML_VULKAN=on" pip install'),
        ("NVIDIA", set(), 'install the CUDA toolkit, then CMAKE_ARGS="-DGGML_CUDA=on" pip install'),
        ("AMD", {"hipcc"}, 'CMAKE_ARGS="-DGGML_HIP=on" pip install'),
        ("AMD", {"glslc"}, 'CMAKE_ARGS="-DGGML_VULKAN=on" pip install'),
    ],
)
def test_the_command_uses_the_compilers_of_this_machine(
    settings: Settings,
    says: Callable[[Build], None],
    monkeypatch: pytest.MonkeyPatch,
    maker: str,
    compilers: set[str],
    command: str,
) -> None:
    def which(name: str, path: str | None = None) -> str | None:
        return name if (f"{path}/{name}" if path else name) in compilers else None

    monkeypatch.setattr("shutil.which", which)
    monkeypatch.setattr("llmrun.doctor.gpu_build._INCLUDED", Path("not there"))
    says(replace(BUILD, offload=False))
    assert findings(settings, details=Details(graphics=(maker,)))["GPU"].fix.startswith(command)


@pytest.mark.parametrize(
    ("details", "topic"),
    [
        (Details(on_battery=True), "power"),
        (Details(governor="powersave"), "power"),
        (Details(throttled=3), "heat"),
        (Details(numa_nodes=2), "NUMA"),
    ],
)
def test_what_slows_the_processor_down(settings: Settings, details: Details, topic: str) -> None:
    finding = findings(settings, details=details)[topic]
    assert (finding.status, bool(finding.fix)) == ("warning", True)


def test_a_laptop_on_mains_is_fine(settings: Settings) -> None:
    fine = Details(on_battery=False, governor="powersave", throttled=0, numa_nodes=1)
    assert not {"power", "heat", "NUMA"} & set(findings(settings, details=fine))


# ---- hub -------------------------------------------------------------------------------------------


class FakeHub(BaseHTTPRequestHandler):
    """A hub with one answer."""

    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.mark.parametrize(("status", "found"), [(200, "ok"), (404, "warning"), (503, "warning")])
def test_hub_that_answers(settings: Settings, monkeypatch: pytest.MonkeyPatch, status: int, found: str) -> None:
    monkeypatch.setattr(FakeHub, "status", status)
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeHub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = replace(settings, endpoint=f"http://127.0.0.1:{server.server_port}", offline=False)
        finding = findings(here)["hub"]
        server.shutdown()
    assert finding.status == found


def test_hub_that_is_not_there(settings: Settings) -> None:
    with socket.socket() as nobody:  # bound, but nobody listens
        nobody.bind(("127.0.0.1", 0))
        here = replace(settings, endpoint=f"http://127.0.0.1:{nobody.getsockname()[1]}", offline=False)
        finding = findings(here)["hub"]
    assert finding.status == "warning"
    assert "HF_ENDPOINT" in finding.fix


def test_hub_that_never_answers(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_HUB_SECONDS", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        here = replace(settings, endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}", offline=False)
        assert findings(here)["hub"].status == "warning"


@pytest.mark.parametrize("endpoint", ["no link", "http://", "https://[::1", "ftp://x.test"])
def test_hub_that_can_not_be(settings: Settings, endpoint: str) -> None:
    assert findings(replace(settings, endpoint=endpoint, offline=False))["hub"].status == "warning"


def test_offline_asks_nobody(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.socket.connect", lambda *arguments: pytest.fail("it connects"))
    assert "HF_HUB_OFFLINE" in findings(settings)["hub"].text


# ---- trial -----------------------------------------------------------------------------------------

TRIAL = TrialResult("smollm2", "llama 135M Q4_1", ("CPU",), 0.25, 200, 131.25)


def test_an_answer(settings: Settings) -> None:
    finding = findings(settings, trial=TRIAL)["answer"]
    assert finding.status == "ok"
    assert finding.text == "smollm2 (llama 135M Q4_1) loaded in 0.2 s on CPU, 200 tokens at 131.2 tokens/s"


@pytest.mark.parametrize(("predicted", "status"), [(0.0, "ok"), (150.0, "ok"), (300.0, "warning")])
def test_an_answer_slower_than_it_should_be(settings: Settings, predicted: float, status: str) -> None:
    finding = findings(settings, trial=replace(TRIAL, predicted_rate=predicted))["answer"]
    assert (finding.status, bool(finding.fix)) == (status, status == "warning")


def test_a_model_that_fails(settings: Settings) -> None:
    finding = findings(settings, trial=BadModelError("it is damaged", why="a field", hint="fetch it again"))["answer"]
    assert finding == Finding("answer", "problem", "it is damaged: a field", "fetch it again", 7)


def test_llama_cpp_is_not_imported() -> None:
    code = (
        "import sys; from llmrun.config import load_settings; from llmrun.doctor.doctor import examine; "
        "examine(load_settings()); sys.exit('llama_cpp' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)


def test_damaged_chats_are_named(settings: Settings) -> None:
    assert "saved chats" not in findings(settings)
    folder = folder_in(settings.state_dir)
    make_chats(folder)
    assert findings(settings)["saved chats"].text == f"{len(NAMES)}, all of them can be read"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    statement, said = ROWS["its own parent"]
    hurt(folder, statement)
    found = findings(settings)["saved chats"]
    assert (found.status, found.exit_status) == ("problem", 6)
    assert said in found.text
    assert f"id {HURT}" in found.text
    assert "llmrun sessions rm" in found.fix
    (folder / FILE).write_bytes(b"no database")
    assert "can't be read" in findings(settings)["saved chats"].text
    assert (folder / FILE).read_bytes() == b"no database"
    assert before.keys() == {path.name for path in folder.iterdir()}, "nothing is changed"
