"""`llmrun doctor --install-gpu` with a fake pip: a build that works stays; any other changes nothing."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from llmrun.cli.app import app
from llmrun.doctor import gpu_build
from llmrun.doctor.gpu_build import GpuBuild, cuda_package, install, install_package, require_build
from llmrun.errors import LlmrunError, UsageError
from llmrun.protocol.llama_folder import is_bundled, llama_version

BUILD = GpuBuild("Vulkan", "-DGGML_VULKAN=on", folder="/opt/compiler/bin")
# Replaces the package in the folder argv[1], as pip does; argv[2] is its exit status.
PIP = """
import os, pathlib, sys
site, status = pathlib.Path(sys.argv[1]), int(sys.argv[2])
info = site / "llama_cpp_python-1.0.dist-info"
(site / "llama_cpp/old.so").unlink()
(site / "llama_cpp/new.so").write_text(os.environ["CMAKE_ARGS"] + os.environ["PATH"].split(os.pathsep)[0])
(site / "asked").write_text(" ".join(sys.argv[3:]))
(info / "RECORD").write_text("llama_cpp/new.so,,\\n" + "llama_cpp_python-1.0.dist-info/RECORD,,\\n" +
    "llama_cpp_python-1.0.dist-info/METADATA,,\\n")
sys.exit(status)
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source_install: None) -> Path:
    """A folder with an installed llama-cpp-python."""
    folder = tmp_path / "site"
    info = folder / "llama_cpp_python-1.0.dist-info"
    for file, text in {
        folder / "llama_cpp/old.so": "old",
        info / "METADATA": "Metadata-Version: 2.1\nName: llama-cpp-python\nVersion: 1.0\n",
        info / "RECORD": "llama_cpp/old.so,,\n" + "".join(f"{info.name}/{name},,\n" for name in ("RECORD", "METADATA")),
    }.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(gpu_build, "_INCLUDED", tmp_path / "not there")  # an installed llmrun has it
    fake_pip(monkeypatch, folder, 0)
    return folder


def fake_pip(monkeypatch: pytest.MonkeyPatch, site: Path, status: int) -> None:
    monkeypatch.setattr(gpu_build, "_installer", lambda: [sys.executable, "-c", PIP, str(site), str(status)])


def installed(site: Path) -> dict[str, str]:
    return {file.name: file.read_text(encoding="utf-8") for file in (site / "llama_cpp").iterdir()}


def test_a_build_that_works_stays(site: Path) -> None:
    tried = []
    install(BUILD, lambda: tried.append(installed(site)))
    assert tried == [{"new.so": "-DGGML_VULKAN=on/opt/compiler/bin"}] == [installed(site)]
    asked = (site / "asked").read_text(encoding="utf-8")
    assert asked.endswith("--no-binary llama-cpp-python llama-cpp-python==1.0 --no-deps")


def test_it_builds_each_library_once(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    included = tmp_path / "llama.cmake"
    included.touch()
    monkeypatch.setattr(gpu_build, "_INCLUDED", included)
    assert f'CMAKE_ARGS="-DCMAKE_PROJECT_llama_cpp_INCLUDE={included} -DGGML_VULKAN=on" pip install' in BUILD.command
    install(BUILD, lambda: None)
    assert installed(site)["new.so"].startswith(f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={included} -DGGML_VULKAN=on")


@pytest.mark.parametrize("fails", [False, True])
def test_beside_the_wheels_own_llama_cpp(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """The new build is chosen for the trial; after a failure the wheel's own is used again."""
    (tmp_path / "__init__.py").write_text('__version__ = "1.0"\n')
    monkeypatch.setattr("llmrun.protocol.llama_folder._BUNDLED", tmp_path)
    monkeypatch.setenv("LLMRUN_LLAMA", "")
    assert BUILD.command.endswith(", then export LLMRUN_LLAMA=llama-cpp-python")
    used = []

    def tries() -> None:
        used.append(is_bundled())
        if fails:
            raise LlmrunError("no GPU")

    if fails:
        with pytest.raises(LlmrunError):
            install(BUILD, tries)
    else:
        install(BUILD, tries)
    assert used == [False]
    assert is_bundled() == fails


@pytest.mark.parametrize("status", [0, 1])
def test_the_old_build_is_back_after_a_failure(site: Path, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, site, status)

    def tries() -> None:
        raise LlmrunError("the new build finds no GPU", hint="install the driver")

    with pytest.raises(LlmrunError, match="the build before is back") as caught:
        install(BUILD, tries)
    assert caught.value.why == ("pip ended with status 1" if status else "the new build finds no GPU")
    assert installed(site) == {"old.so": "old"}
    assert llama_version() == "1.0"
    assert next(str(file) for file in metadata.distribution("llama-cpp-python").files or ()) == "llama_cpp/old.so"


def test_the_old_build_is_back_after_ctrl_c(site: Path) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        install(BUILD, interrupted)
    assert installed(site) == {"old.so": "old"}


def test_what_is_missing_is_said_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name, path=None: None)
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(UsageError, match="no GPU"):
        require_build(())
    with pytest.raises(UsageError, match="can't be built with SYCL yet") as caught:
        require_build(("Intel",))
    assert "oneAPI" in caught.value.why
    monkeypatch.setattr(sys, "platform", "darwin")
    assert require_build(()).backend == "Metal"


def test_it_asks_before_it_installs(monkeypatch: pytest.MonkeyPatch, site: Path) -> None:
    monkeypatch.setattr("llmrun.cli.doctor.require_build", lambda makers: BUILD)
    done = CliRunner().invoke(app, ["doctor", "--install-gpu"])
    assert isinstance(done.exception, UsageError)
    assert "--yes" in done.exception.hint
    assert installed(site) == {"old.so": "old"}


def test_the_command_tries_the_new_build(monkeypatch: pytest.MonkeyPatch, site: Path) -> None:
    monkeypatch.setattr("llmrun.cli.doctor.require_build", lambda makers: BUILD)
    monkeypatch.setattr("llmrun.cli.doctor.this_machine", lambda: type("Machine", (), {"gpus": ()}))
    done = CliRunner().invoke(app, ["doctor", "--install-gpu", "--yes"])
    assert isinstance(done.exception, LlmrunError)
    assert done.exception.why == "the new build finds no GPU"
    assert installed(site) == {"old.so": "old"}


@pytest.mark.parametrize(("status", "works"), [(0, True), (0, False), (1, True)])
def test_the_cuda_backend_comes_as_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, works: bool
) -> None:
    """It is removed if it does not work; where the index has none, that is no error: llama.cpp is compiled."""
    program = "import sys; print(*sys.argv[3:], file=open(sys.argv[1], 'a')); sys.exit(int(sys.argv[2]))"
    log = tmp_path / "pip"
    monkeypatch.setattr(gpu_build, "_installer", lambda: [sys.executable, "-c", program, str(log), str(status)])

    def tries() -> None:
        if not works:
            raise LlmrunError("no GPU")

    if works:
        assert install_package("llmrun-cuda==1", tries) == (status == 0)
    else:
        with pytest.raises(LlmrunError, match="llmrun-cuda does not work here; it is removed"):
            install_package("llmrun-cuda==1", tries)
    removed = [] if works else ["uninstall -y llmrun-cuda"]
    assert log.read_text(encoding="utf-8").splitlines() == ["install llmrun-cuda==1", *removed]


@pytest.mark.usefixtures("source_install")
def test_only_the_wheels_own_llama_cpp_has_a_cuda_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert cuda_package(["NVIDIA"]) == ""
    monkeypatch.setattr("llmrun.protocol.llama_folder._BUNDLED", tmp_path)
    assert cuda_package(["AMD"]) == ""
    assert cuda_package(["Intel", "NVIDIA"]) == f"llmrun-cuda=={metadata.version('llmrun')}"
