"""Which servers run: known by locks, so that no process id of a dead one is ever believed."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

from llmrun.protocol.messages import PromptDifference
from llmrun.server.registry import RunningServer, ServedDrafts, ServedRequest, registered, running_servers


def server(port: int) -> RunningServer:
    return RunningServer(os.getpid(), at(port), port, 1.0)


def at(port: int, host: str = "127.0.0.1") -> str:
    return f"http://{host}:{port}"


def test_a_server_is_listed_as_long_as_it_runs(tmp_path: Path) -> None:
    assert running_servers(tmp_path) == []
    with registered(tmp_path, at(2)) as later, registered(tmp_path, at(1)) as entry:
        assert entry is not None
        assert later is not None
        entry.write(server(1))
        later.write(server(2))
        assert running_servers(tmp_path) == [server(1), server(2)]
        entry.write(server(1)._replace(models=("tiny",)))
        assert running_servers(tmp_path)[0].models == ("tiny",)
        drafting = server(1)._replace(drafts=(ServedDrafts("tiny", "heads", 5_000_000, 40, 30),))
        entry.write(drafting)
        assert running_servers(tmp_path)[0] == drafting
    assert running_servers(tmp_path) == []


def test_two_servers_at_one_port_of_different_addresses_are_both_listed(tmp_path: Path) -> None:
    with registered(tmp_path, at(1)) as first, registered(tmp_path, at(1, "[::1]")) as second:
        assert first is not None
        assert second is not None
        first.write(server(1))
        second.write(server(1)._replace(address=at(1, "[::1]")))
        assert {each.address for each in running_servers(tmp_path)} == {at(1), at(1, "[::1]")}
    assert running_servers(tmp_path) == []


def test_what_a_dead_server_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "servers/8080.json"
    left.parent.mkdir()
    left.write_text(json.dumps(server(8080)._asdict()))
    assert running_servers(tmp_path) == []
    assert not left.exists()


def test_an_entry_that_is_just_being_written_is_passed_over(tmp_path: Path) -> None:
    with registered(tmp_path, at(1)):
        assert running_servers(tmp_path) == []
        (entry,) = (tmp_path / "servers").iterdir()
        entry.write_text("[" * 50_000)
        assert running_servers(tmp_path) == []


def test_a_folder_that_can_not_be_written_keeps_nobody_from_serving(tmp_path: Path) -> None:
    (tmp_path / "servers").write_text("a file")
    with registered(tmp_path, at(1)) as entry:
        assert entry is None


def test_a_server_that_begins_while_others_look_is_listed(tmp_path: Path) -> None:
    """Whoever looks locks the file for a moment, and removes it where no server holds the lock."""
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            running_servers(tmp_path)

    looking = [threading.Thread(target=look) for _ in range(3)]
    for thread in looking:
        thread.start()
    try:
        for _ in range(50):
            with registered(tmp_path, at(1)) as entry:
                assert entry is not None
                entry.write(server(1))
                assert running_servers(tmp_path) == [server(1)]
    finally:
        ended.set()
        for thread in looking:
            thread.join()


def test_the_last_requests_come_back(tmp_path: Path) -> None:
    facts = {"prompt_tokens": 30, "cached_tokens": 20, "completion_tokens": 10, "decode_seconds": 0.4}
    with registered(tmp_path, at(1)) as file:
        assert file is not None
        requests = (
            ServedRequest.of("/v1/messages", {**facts, "difference": PromptDifference(20, "Monday", "Tuesday")}),
            ServedRequest.of("/v1/completions", facts),
        )
        file.write(server(1)._replace(requests=requests, checkpoint_bytes=5))
        found = running_servers(tmp_path)[0]
        assert found.checkpoint_bytes == 5
        assert found.requests[1] == ("/v1/completions", 30, 20, 25.0, None, 0.0)
        assert found.requests[0].difference is not None
        assert tuple(found.requests[0].difference) == (20, "Monday", "Tuesday")
