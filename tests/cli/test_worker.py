"""What `llmrun worker` refuses before it serves anything, and what it says when it does."""

from __future__ import annotations

import socket
from ipaddress import IPv4Address

import pytest
from support.stand_in_worker import closing, good, worker

from llmrun.cli import worker as command
from llmrun.cli.app import call
from llmrun.errors import NetworkError, UsageError
from llmrun.protocol.devices import Gpu
from llmrun.protocol.jobs.machine import ServedDevices
from llmrun.ui.terminal.output import Output

SERVED = ServedDevices((Gpu("CPU", "a processor", 24 * 10**9, 24 * 10**9),), "0.25.3 (abc)")


def refused(*words: str) -> UsageError:
    with pytest.raises(UsageError) as error:
        call(("worker", *words))
    return error.value


@pytest.mark.parametrize("host", ["nowhere.invalid", "::1", "10.0.0", ""])
def test_a_host_is_an_address(host: str) -> None:
    assert refused("--host", host).what == f"invalid --host {host}"


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1"])
def test_beyond_loopback_somebody_has_to_want_it(host: str) -> None:
    error = refused("--host", host)
    assert "opens this machine to others" in error.what
    assert "CVE-2024-42479" in error.why
    assert "ssh -L" in error.hint


@pytest.mark.parametrize("words", [("--port", "0"), ("--port", "65536"), ("--threads", "0")])
def test_numbers_out_of_bounds(words: tuple[str, str]) -> None:
    assert refused(*words).what.startswith(f"invalid {words[0]}")


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"llmrun worker --port {port + 1}" in refused("--port", str(port)).hint


def test_what_is_served_and_how_to_get_there(capsys: pytest.CaptureFixture[str]) -> None:
    with worker(good()) as endpoint:
        port = int(endpoint.rpartition(":")[2])
        command._shown(Output(), IPv4Address("127.0.0.1"), port)(SERVED)
    said = capsys.readouterr().err
    assert f"a processor with 24.0 GB: served at 127.0.0.1:{port} (RPC 7.0.0, ggml 0.25.3 (abc))" in said
    assert f"ssh -N -L {port}:127.0.0.1:{port}" in said
    assert "warning" not in said


def test_a_warning_where_everybody_can_come(capsys: pytest.CaptureFixture[str]) -> None:
    with worker(good()) as endpoint:
        command._shown(Output(), IPv4Address("0.0.0.0"), int(endpoint.rpartition(":")[2]))(SERVED)
    said = capsys.readouterr().err
    assert "warning: ggml's RPC has no authentication" in said
    assert "ssh" not in said


def test_a_worker_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_START_SECONDS", 0.0)
    with worker(closing) as endpoint, pytest.raises(NetworkError, match="closed the connection"):
        command._wait_for(endpoint)
