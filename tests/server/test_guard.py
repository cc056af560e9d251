"""What reaches a server on loopback and must not be believed: other hosts, foreign pages, no keys, endless bytes."""

from __future__ import annotations

import http.client
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.served import CHAT, HI, SECONDS, LiveServer, parse

from llmrun.errors import UsageError
from llmrun.server.guard import MOST_BODY_BYTES, Policy, read_keys

pytestmark = pytest.mark.usefixtures("package_on_path")
KEY = "a key of the test"
UNFINISHED = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: 9\r\n\r\n{"
)
PATHS = (
    "/etc/passwd", "../../etc/passwd", "~/x.gguf", "./tiny.gguf", "tiny.gguf", "file:///etc/passwd", "a\0b",
    "http://127.0.0.1:9/x.gguf", "x" * 100_000,
)  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Without keys; a foreign page and an app are allowed."""
    policy = Policy(origins=frozenset({"https://allowed.example", "app://"}))
    with LiveServer(tmp_path_factory.mktemp("server"), policy=policy) as live:
        yield live.once_loaded()


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server that waits half a second for a request."""
    with LiveServer(tmp_path_factory.mktemp("impatient"), receive_seconds=0.5) as live:
        yield live


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server that wants a key."""
    with LiveServer(tmp_path_factory.mktemp("locked"), policy=Policy(keys=(b"another key", KEY.encode()))) as live:
        yield live.once_loaded()


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:8080", "[::1]:80", "[::1]"])
def test_this_machine_may_be_called_so(server: LiveServer, host: str) -> None:
    assert server.get("/health", host=host).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil", "0.0.0.0"]
)
def test_a_rebound_name_is_refused_before_anything_is_computed(server: LiveServer, host: str) -> None:
    refused = server.post(CHAT, host=host)
    assert (refused.status, refused.code) == (403, "host-refused")
    assert server.get("/health", host=host).status == 403


def test_a_request_without_host_or_with_two_is_refused(server: LiveServer) -> None:
    assert parse(server.raw(b"GET /health HTTP/1.1\r\n\r\n")).status == 400
    twice = b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    assert parse(server.raw(twice)).status in {400, 403}
    assert parse(server.raw(b"GET /v1/models HTTP/1.0\r\n\r\n")).status == 403
    assert parse(server.raw(b"GET /health HTTP/1.0\r\n\r\n")).status == 200, "a load balancer's"
    assert parse(server.raw(b"GET /health HTTP/1.0\r\nhost: evil.example\r\n\r\n")).status == 403


def test_a_target_in_absolute_form_has_the_host(server: LiveServer) -> None:
    for host, status in ((f"127.0.0.1:{server.port}", 200), ("evil.example", 403)):
        data = f"GET http://{host}/v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode()
        assert parse(server.raw(data)).status == status


@pytest.mark.parametrize("path", ["//v1/chat/completions", "/v1//chat/completions/", "/chat/completions"])
def test_slashes_that_clients_add_do_not_matter(server: LiveServer, path: str) -> None:
    assert server.post(path).status == 200
    assert server.get("/v1/models/").json == server.get("/models").json


def compressed(data: bytes, form: int) -> bytes:
    compressor = zlib.compressobj(wbits=form)
    return compressor.compress(data) + compressor.flush()


def test_a_compressed_body_is_read_within_the_limits(server: LiveServer) -> None:
    def status(data: bytes, encoding: str = "gzip") -> int:
        return parse(server.raw(server.request("POST", CHAT, data, content_encoding=encoding))).status

    body = json.dumps(HI).encode()
    assert [status(compressed(body, 31)), status(compressed(body, 15), "deflate"), status(body, "identity")] == [
        200
    ] * 3
    assert [status(body), status(compressed(body, 31)[:-9]), status(body, "br")] == [400, 400, 415]
    assert status(compressed(b" " * (MOST_BODY_BYTES + 1), 31)) == 413, "a small body that becomes large"


@pytest.mark.parametrize(
    "origin", ["http://localhost:3000", "http://127.0.0.1:5173", "http://[::1]:80", "http://localhost"]
)
def test_pages_of_other_programs_of_this_machine_may_use_models_only(server: LiveServer, origin: str) -> None:
    def preflight(path: str) -> int:
        wanted = {"access_control_request_method": "POST", "access_control_request_headers": "content-type"}
        return parse(server.raw(server.request("OPTIONS", path, origin=origin, **wanted))).status

    assert [preflight(path) for path in (CHAT, "/api/chat", "/v1/models")] == [204] * 3
    assert server.post(CHAT, origin=origin).headers["access-control-allow-origin"] == origin
    for path in ("/ui/chats", "/ui/ask", "/api/pull", "/api/delete", "/api/copy", "/"):
        assert (preflight(path), server.get(path, origin=origin).status) == (403, 403)


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost.evil.example:1", "https://allowed.example.evil"]
)
def test_a_foreign_page_is_refused_before_anything_is_computed(server: LiveServer, origin: str) -> None:
    refused = server.post(CHAT, origin=origin)
    assert (refused.status, refused.code) == (403, "origin-refused")
    assert "access-control-allow-origin" not in refused.headers


def test_own_pages_and_listed_origins_may_ask(server: LiveServer) -> None:
    own = f"http://127.0.0.1:{server.port}"
    for origin in (own, "https://allowed.example", "app://obsidian.md"):
        answer = server.get("/health", origin=origin)
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, origin)


def test_a_permitted_preflight_echoes_the_headers_that_are_asked_for(server: LiveServer) -> None:
    wanted = {
        "access_control_request_method": "POST",
        "access_control_request_headers": "x-stainless-os, authorization",
    }
    raw = server.request("OPTIONS", CHAT, origin="app://obsidian.md", **wanted)
    answer = parse(server.raw(raw))
    assert answer.status == 204
    assert answer.headers["access-control-allow-headers"] == "x-stainless-os, authorization"
    refused = parse(server.raw(server.request("OPTIONS", CHAT, origin="https://evil.example", **wanted)))
    assert refused.status == 403


@pytest.mark.parametrize(
    ("kind", "browser"),
    [
        ("text/plain", {}),
        ("application/x-www-form-urlencoded", {"origin": "https://allowed.example"}),
        ("application/x-www-form-urlencoded", {"sec_fetch_mode": "no-cors"}),
        ("multipart/form-data; boundary=x", {}),
        ("", {"origin": "https://allowed.example"}),
        ("", {"sec_fetch_site": "cross-site"}),
        ("", {"sec_fetch_site": "none"}),
    ],
)
def test_what_a_page_may_send_unasked_is_not_taken_for_json(
    server: LiveServer, kind: str, browser: dict[str, str]
) -> None:
    refused = server.post(CHAT, content_type=kind, **browser)
    assert (refused.status, refused.code) == (415, "not-json")


def test_what_is_no_browser_need_not_say_that_it_sends_json(server: LiveServer) -> None:
    for kind in ("", "application/x-www-form-urlencoded"):  # the second is that of `curl -d`
        assert server.post(CHAT, {}, content_type=kind).code == "usage"  # it was read: messages is missing


def test_json_with_a_charset_is_json(server: LiveServer) -> None:
    assert server.post(CHAT, {}, content_type="application/json; charset=utf-8").status == 400  # messages is missing


def test_without_the_key_nothing_is_answered_but_health_and_the_files_of_the_page(locked: LiveServer) -> None:
    assert locked.get("/health").status == 200
    for path in ("/v1/models", "/metrics", "/props", "/nothing"):
        assert locked.get(path).status == 401
    refused = locked.post(CHAT)
    assert (refused.status, refused.code) == (401, "wrong-key")
    assert KEY not in refused.body.decode()


def test_a_key_is_given_as_bearer_or_x_api_key(locked: LiveServer) -> None:
    assert locked.get("/v1/models", authorization=f"Bearer {KEY}").status == 200
    assert locked.get("/v1/models", authorization=f"bearer {KEY}").status == 200
    assert locked.get("/v1/models", x_api_key=KEY).status == 200
    for wrong in (KEY[:-1], KEY + "x", KEY.upper(), "\xff"):
        assert locked.get("/v1/models", authorization=f"Bearer {wrong}").status == 401
    assert locked.get("/v1/models", authorization=f"Basic {KEY}").status == 401


def test_a_key_is_not_shown_with_its_policy() -> None:
    assert KEY not in repr(Policy(keys=(KEY.encode(),)))


def test_a_body_that_is_declared_too_large_is_not_awaited(server: LiveServer) -> None:
    raw = server.request("POST", CHAT, content_type="application/json", content_length=str(MOST_BODY_BYTES + 1))
    refused = parse(server.raw(raw))
    assert (refused.status, refused.code) == (413, "body-too-large")


def test_a_client_that_sends_all_of_a_body_that_is_too_large_hears_why(server: LiveServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=SECONDS)
    connection.request("POST", CHAT, b" " * (MOST_BODY_BYTES + 1), {"content-type": "application/json"})
    assert connection.getresponse().status == 413
    connection.close()


def test_a_chunked_body_is_counted(server: LiveServer) -> None:
    head = server.request("POST", CHAT, content_type="application/json", transfer_encoding="chunked")
    chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    too_much = chunk * (MOST_BODY_BYTES // 0x100000) + b"1\r\n \r\n"
    assert parse(server.raw(head + too_much)).status == 413


@pytest.mark.parametrize(
    "headers",
    [
        {"transfer_encoding": "chunked"},
        {"Content_Length": "3"},
        {"content_length": "-1"},
        {"content_length": "1, 2"},
        {"transfer_encoding": "gzip", "content_length": ""},
    ],
)
def test_a_body_whose_length_is_unclear_is_refused(server: LiveServer, headers: dict[str, str]) -> None:
    raw = server.request("POST", CHAT, json.dumps(HI).encode(), **headers)
    assert parse(server.raw(raw)).status in {400, 501}


def test_headers_without_end_are_refused(server: LiveServer) -> None:
    assert parse(server.raw(server.request("GET", "/health", x_long="x" * 100_000))).status in {400, 431}


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\nhost: local", UNFINISHED])
def test_a_request_that_does_not_end_is_dropped(impatient: LiveServer, data: bytes) -> None:
    answer = impatient.raw(data)  # comes back at all
    assert not answer or parse(answer).status in {400, 408}


@pytest.mark.parametrize(
    "body",
    [
        b"{", b"[]", b'"text"', b"\xff\xfe", b'{"messages": NaN}', b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"a":' * 150 + b"1" + b"}" * 150,
        b"1" * 10_000, b"null",
    ],
)  # fmt: skip
def test_what_is_not_a_json_object_is_refused(server: LiveServer, body: bytes) -> None:
    refused = parse(server.raw(server.request("POST", CHAT, body)))
    assert refused.status == 400
    assert set(refused.json["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("name", PATHS)
def test_no_path_of_a_client_is_opened(server: LiveServer, name: str) -> None:
    refused = server.post(CHAT, {**HI, "model": name})
    assert (refused.status, refused.code) == (404, "model_not_found")


def test_a_model_that_is_not_on_the_disk_is_not_fetched(server: LiveServer) -> None:
    refused = server.post(CHAT, {**HI, "model": "somebody/unheard-of-GGUF:Q4_K_M"})
    assert refused.status == 404
    assert "llmrun pull somebody/unheard-of-GGUF:Q4_K_M" in refused.json["error"]["message"]


def test_unknown_paths_and_methods_are_errors_in_shape(server: LiveServer) -> None:
    assert (server.get("/nothing").status, server.get("/nothing").code) == (404, "no-route")
    refused = server.get("/v1/completions")
    assert (refused.status, refused.code) == (405, "method-not-allowed")


def test_the_home_page_answers_head(server: LiveServer) -> None:
    answer = parse(server.raw(server.request("HEAD", "/")))
    assert (answer.status, answer.body) == (200, b"")


def test_pipelined_requests_are_answered_in_order(server: LiveServer) -> None:
    first = server.request("GET", "/health", connection="keep-alive")
    answers = server.raw(first + server.request("GET", "/nothing"))
    assert answers.index(b"200 OK") < answers.index(b"404 Not Found")


def test_beyond_loopback_any_address_is_a_name_of_this_server_and_no_foreign_name_is() -> None:
    policy = Policy(any_address=True)
    assert all(map(policy.allows_host, ["192.168.1.5:8080", "10.0.0.1", "[fe80::1]:80", "[::1]", "localhost:1"]))
    assert not any(map(policy.allows_host, ["evil.example", "1.2.3.4.evil:80", "", "[", "1.2.3", "*"]))
    assert not Policy().allows_host("192.168.1.5:8080")


def test_keys_are_read_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# ours\n\n{KEY}\n  second key \n")
    assert read_keys(file) == (KEY.encode(), b"second key")
    for content in ("", "# nothing\n", "short\n"):
        file.write_text(content)
        with pytest.raises(UsageError, match="one key per line"):
            read_keys(file)
    with pytest.raises(UsageError, match="can't be read"):
        read_keys(tmp_path / "missing")
