"""What `llmrun serve`, `ps` and `stop` refuse before anything is loaded."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from llmrun.cli.app import call
from llmrun.config import load_settings
from llmrun.errors import UsageError
from llmrun.server.registry import RunningServer, ServedDrafts, registered

pytestmark = pytest.mark.usefixtures("home")


def refused(*words: str) -> UsageError:
    with pytest.raises(UsageError) as error:
        call(words)
    return error.value


def test_beyond_loopback_a_key_is_needed() -> None:
    error = refused("serve", "--host", "0.0.0.0", "--port", "0")
    assert "opens the server to other machines" in error.what
    assert "--key-file" in error.hint


def test_a_port_in_use_is_told_with_another_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = refused("serve", "--port", str(port))
    assert error.what == f"port {port} of 127.0.0.1 is in use"
    assert f"llmrun serve --port {port + 1}" in error.hint


def test_a_port_of_a_server_of_ours_is_told_with_its_process_and_model() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        address = f"http://127.0.0.1:{port}"
        with registered(load_settings().state_dir, address) as entry:
            assert entry is not None
            entry.write(RunningServer(4711, address, port, 0.0, ("smollm2",)))
            error = refused("serve", "--port", str(port))
    assert error.why == "llmrun serve with smollm2 runs there, process 4711"
    assert f"llmrun stop --port {port}" in error.hint


def test_beside_the_last_port_the_one_before_is_told() -> None:
    with ExitStack() as stack:
        with suppress(OSError):
            stack.enter_context(socket.create_server(("127.0.0.1", 65_535)))
        assert "llmrun serve --port 65534" in refused("serve", "--port", "65535").hint


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--keep", "soon"), "invalid --keep soon"),
        (("--grace", "5 minutes"), "invalid --grace 5 minutes"),
        (("--grace", "-5m"), "invalid --grace -5m"),
        (("--timeout", "nan"), "invalid --timeout nan"),
        (("--port", "70000"), "invalid --port 70000"),
        (("--parallel", "0"), "invalid --parallel 0"),
        (("--queue", "-1"), "invalid --queue -1"),
        (("--host", "no such host"), "there is no address no such host"),
        (("--host", "a..b"), "there is no address a..b"),
        (("--key-file", "missing.txt"), "--key-file missing.txt can't be read"),
        (("--ctx", "5"), "invalid --ctx 5"),
        (("--alias", "gpt-5"), "invalid --alias 'gpt-5'"),
        (("--any-model",), "--any-model needs a model"),
    ],
)
def test_wrong_options_are_named(words: tuple[str, ...], what: str) -> None:
    assert refused("serve", "--port", "0", *words).what == what


@pytest.mark.parametrize("models", [(), ("a.gguf", "b.gguf")])
def test_a_draft_model_is_for_one_model(models: tuple[str, ...]) -> None:
    assert refused("serve", *models, "--port", "0", "--draft", "c.gguf").what == "--draft drafts for one model"


def test_a_projector_is_for_the_first_model_and_there(tmp_path: Path) -> None:
    refusal = refused("serve", "--port", "0", "--mmproj", "eyes.gguf")
    assert (refusal.what, refusal.hint) == ("--mmproj needs a model", "llmrun serve MODEL --mmproj FILE")
    model = tmp_path / "a.gguf"
    model.touch()
    assert (
        refused("serve", str(model), "--port", "0", "--mmproj", "eyes.gguf").what == "--mmproj eyes.gguf can't be read"
    )


def test_without_a_server_there_is_nothing_to_list_or_stop(capsys: pytest.CaptureFixture[str]) -> None:
    call(["ps", "--json"])
    assert json.loads(capsys.readouterr().out) == []
    call(["ps"])
    assert "No server is running" in capsys.readouterr().err
    assert refused("stop").what == "no server is running"
    assert refused("stop").hint == "llmrun serve MODEL --background starts one"
    assert refused("stop", "--port", "5").what == "no server is running on port 5"


def test_servers_are_listed_and_of_several_one_is_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with registered(home, "http://127.0.0.1:1") as first, registered(home, "http://127.0.0.1:2") as second:
        assert first is not None
        assert second is not None
        drafts = (ServedDrafts("tiny", "heads", 12_300_000, 1204, 903), ServedDrafts("tiny", "text", 0, 0, 0))
        first.write(RunningServer(11, "http://127.0.0.1:1", 1, 0.0, ("tiny",), drafts=drafts))
        second.write(RunningServer(12, "http://127.0.0.1:2", 2, 0.0))
        call(["ps"])
        listed = capsys.readouterr().out
        assert "http://127.0.0.1:1" in listed
        assert "tiny" in listed
        rows = [line.split() for line in listed.splitlines()]
        assert ["tiny", "heads", "12.3", "MB", "1,204", "75%"] in rows
        assert ["tiny", "text", "-", "0", "-"] in rows
        call(["ps", "--json"])
        assert json.loads(capsys.readouterr().out)[0]["drafts"][0]["accepted"] == 903
        assert refused("stop").hint == "llmrun stop --port 1 or llmrun stop --port 2 or llmrun stop --all"
        second.write(RunningServer(12, "http://[::1]:1", 1, 0.0))
        assert refused("stop", "--port", "1").hint == "llmrun stop --all"


@pytest.mark.parametrize(
    ("words", "flag"), [(("--temp", "1"), "--temp"), (("--at", "http://x"), "--at"), (("--private",), "--private")]
)
def test_what_the_page_has_settings_for_is_not_given_beside_web(words: tuple[str, ...], flag: str) -> None:
    error = refused("chat", "tiny", "--web", *words)
    assert error.what == f"--web and {flag} can't be used together"


def test_the_page_needs_a_model_or_a_chat() -> None:
    assert "--web" in refused("chat", "--web").hint
    assert refused("chat", "tiny", "--phone").hint == "llmrun chat --web --phone"
    assert refused("chat", "--web", "--session", "nothing").what == "there is no saved chat 'nothing'"
