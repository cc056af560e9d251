"""Servers that outlive their command: `serve --background`, `logs`, and `serve --install`."""

from __future__ import annotations

import io
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.installed import SECONDS, eventually

from llmrun.cli import background
from llmrun.cli.app import call
from llmrun.cli.servers import logs
from llmrun.config import load_settings
from llmrun.errors import BadModelError, DiskFullError, EngineCrashedError, UsageError
from llmrun.server.registry import RunningServer, running_servers
from llmrun.ui.terminal.output import Output

pytestmark = pytest.mark.usefixtures("package_on_path")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Nothing else runs there, and nothing does afterwards."""
    for name in [name for name in os.environ if name.startswith("LLMRUN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LLMRUN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    yield tmp_path
    for server in servers():
        server.stop(now=True)
        assert eventually(lambda pid=server.pid: not _runs(pid), SECONDS)


def _runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def servers() -> list[RunningServer]:
    return running_servers(load_settings().state_dir)


def test_a_server_in_the_background(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["serve", "--background", "--port", "0"]) == 0
    told = capsys.readouterr()
    (server,) = servers()
    assert told.out == f"{server.address}\n"
    assert f"process {server.pid}" in told.err
    assert f"llmrun stop --port {server.port}" in told.err
    assert background.answers(server)
    call(["logs"])
    assert re.search(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d Serving at", capsys.readouterr().out, re.MULTILINE)
    call(["logs", "-n", "1", "--port", str(server.port)])
    assert len(capsys.readouterr().out.splitlines()) == 1
    following = threading.Thread(target=call, args=(["logs", "-f"],), daemon=True)
    following.start()
    call(["stop"])
    following.join(SECONDS)
    assert not following.is_alive()
    assert eventually(lambda: not servers(), SECONDS)
    capsys.readouterr()
    call(["logs"])
    told = capsys.readouterr()
    assert "Serving at" in told.out, "of a server that has ended"
    assert "No server is running" in told.err


def test_a_log_that_is_too_long_begins_anew_for_its_writer_and_its_readers(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of the log on the disk is bounded, and `logs -f` misses no line."""
    log = home / "serve.log"
    server = RunningServer(1, "", 1, 0.0, log=str(log))
    rounds = iter(range(3))

    def running(state_dir: Path) -> list[RunningServer]:
        """Write to the log before each look of `logs -f`."""
        number = next(rounds, None)
        if number is None:
            return []
        with log.open("ab", buffering=0) as file:
            background.rotate(log, file.fileno(), limit=38)
            file.write(b"line %d of this log\n" % number)
        return [server]

    monkeypatch.setattr("llmrun.cli.servers.running_servers", running)
    monkeypatch.setattr("llmrun.cli.servers._log", lambda *_: log)
    with log.open("ab", buffering=0) as file:
        background.rotate(log, file.fileno(), limit=0)
        file.write(b"the first line of it\n")
        background.rotate(log, 0, limit=0)
        assert log.stat().st_size == 21, "the descriptor is another file's"
    logs(follow=True)
    assert capsys.readouterr().out.splitlines() == [
        "the first line of it", *(f"line {number} of this log" for number in range(3))
    ]  # fmt: skip
    assert background.previous_log(log).read_text() == "the first line of it\nline 0 of this log\n"
    logs(lines=3)
    assert capsys.readouterr().out.splitlines() == [f"line {number} of this log" for number in range(3)]


def test_a_server_that_dies_at_its_start_says_why(home: Path) -> None:
    missing = str(home / "no-keys")
    with pytest.raises(EngineCrashedError, match="before it answered") as error:
        background.start_server(["serve", "--port", "0", "--key-file", missing], home / "log", background.answers)
    assert missing in error.value.why
    assert "error:" in error.value.why
    assert error.value.hint.startswith("llmrun serve")


def test_what_a_user_would_not_see_is_refused_before(home: Path) -> None:
    bad = home / "bad.gguf"
    bad.write_bytes(b"nothing")
    with pytest.raises(BadModelError):
        call(["serve", str(bad), "--background", "--port", "0"])
    assert not servers()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")  # noqa: PTH110
def test_a_full_disk(home: Path) -> None:
    log = home / "log"
    log.symlink_to("/dev/full")
    with pytest.raises(DiskFullError, match="can't be written"):
        background.start_server(["serve", "--port", "0"], log, background.answers)
    with open("/dev/full", "w", encoding="utf-8") as full:  # noqa: PTH123
        Output(stderr=io.TextIOWrapper(full.buffer.raw)).note("a server goes on without its log")  # type: ignore[attr-defined]


@pytest.mark.parametrize(("server", "words"), [(True, "writes to its terminal"), (False, "no server ran")])
def test_no_log(server: bool, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    running = [RunningServer(1, "http://127.0.0.1:8080", 8080, 0.0)] if server else []
    monkeypatch.setattr("llmrun.cli.servers.running_servers", lambda _: running)
    with pytest.raises(UsageError) as error:
        call(["logs"])
    assert words in error.value.why
    assert "--background" in error.value.hint


def test_the_log_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    several = [RunningServer(1, f"http://127.0.0.1:{port}", port, 0.0, log="log") for port in (80, 81)]
    monkeypatch.setattr("llmrun.cli.servers.running_servers", lambda _: several)
    with pytest.raises(UsageError, match="2 servers run") as error:
        call(["logs"])
    assert error.value.hint == "llmrun logs --port 80 or llmrun logs --port 81"


# ---- a service


def unit_file() -> Path:
    return Path(os.environ["XDG_CONFIG_HOME"], "systemd/user/llmrun.service")


FAKE = """#!{python}
import os, shlex, subprocess, sys
if {broken}:
    sys.exit(1)
words = sys.argv[2:]
with open({said!r}, "a") as file:
    print(*words, file=file)
if words[0] == "is-failed":
    sys.exit(1)
if words[0] == "restart":
    lines = [line.partition("=") for line in open({unit!r}).read().splitlines() if "=" in line]
    environment = dict(os.environ, **dict(shlex.split(value)[0].split("=", 1) for name, _, value in lines
                                          if name == "Environment"))
    log = open(environment["LLMRUN_SERVE_LOG"], "a")
    command = next(shlex.split(value) for name, _, value in lines if name == "ExecStart")
    subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
"""


def fake_systemctl(folder: Path, monkeypatch: pytest.MonkeyPatch, *, broken: bool) -> Path:
    """Put a program that does what systemd would into PATH; return the file of its commands."""
    program, said = folder / "bin/systemctl", folder / "said"
    program.parent.mkdir()
    program.write_text(FAKE.format(python=sys.executable, broken=broken, said=str(said), unit=str(unit_file())))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    return said


@pytest.mark.skipif(sys.platform != "linux", reason="systemd")
def test_a_service_is_installed_and_removed(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = fake_systemctl(home, monkeypatch, broken=False)
    call(["serve", "--install", "--port", "0", "--keep", "7m"])
    (server,) = servers()
    assert capsys.readouterr().out == f"{server.address}\n"
    assert said.read_text().splitlines()[:4] == [
        "show-environment", "daemon-reload", "enable llmrun.service", "restart llmrun.service",
    ]  # fmt: skip
    assert '"serve" "--port" "0" "--keep" "7m"' in unit_file().read_text()
    call(["logs"])
    assert "Serving at" in capsys.readouterr().out
    call(["serve", "--uninstall"])
    assert not unit_file().exists()
    assert "disable --now llmrun.service" in said.read_text()
    with pytest.raises(UsageError, match="no service is installed"):
        call(["serve", "--uninstall"])


@pytest.mark.skipif(sys.platform != "linux", reason="systemd")
def test_without_systemd_the_command_is_told(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_systemctl(home, monkeypatch, broken=True)
    call(["serve", "--install", "--port", "0"])
    assert "systemctl --user enable --now llmrun.service" in capsys.readouterr().err
    assert unit_file().exists()


def test_words_of_a_unit_are_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRUN_SERVER_KEY", "secret")
    monkeypatch.setenv("HF_HOME", "/a b")
    text = background.unit(
        ["/usr/bin/python", "a b", 'say "%n"', "$HOME\\"], Path("/x%y"), background._kept(os.environ), Path("/l"), None
    )
    assert 'ExecStart="/usr/bin/python" "a b" "say \\"%%n\\"" "$$HOME\\\\"' in text
    assert "WorkingDirectory=/x%%y" in text
    assert 'Environment="HF_HOME=/a b"' in text
    assert "TimeoutStopSec=infinity" in text
    assert "secret" not in text


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_have_no_service(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmrun.cli.background.sys.platform", platform)
    for command in (["serve", "--install", "--port", "0"], ["serve", "--uninstall"]):
        with pytest.raises(UsageError, match="--install needs systemd"):
            call(command)
