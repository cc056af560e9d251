"""Explanations, sampler steps and the context window on the page, asked of a real engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.gguf_writer import runnable_model, write
from support.served import LiveServer

from llmrun.server.page import insights

pytestmark = pytest.mark.usefixtures("package_on_path")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    model = write(tmp_path / "real.gguf", runnable_model({"llama.context_length": 2048}))
    with LiveServer(tmp_path, ("real",), model=model, n_ctx=2048) as live:
        yield live


@pytest.fixture
def chat(server: LiveServer) -> dict[str, Any]:
    """A chat with one answer, drawn with a penalty and a seed of its own."""
    asked = server.post("/ui/ask", {"text": "Hello there", "system": "Be brief."}).json
    settings = {"max_tokens": 6, "temperature": 0.9, "top_k": 30, "top_p": 0.9, "min_p": 0.01}
    answer = {"chat": asked["id"], "question": asked["entries"][-1]["id"], **settings}
    assert server.post("/ui/answer", answer).events[-1]["completion_tokens"] > 0
    read: dict[str, Any] = server.get(f"/ui/chats/{asked['id']}").json
    return read


def test_an_answer_is_explained_on_a_page_of_its_own(
    server: LiveServer, chat: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(insights, "_MOST_PAGES", 1)
    asked = {"chat": chat["id"], "answer": chat["entries"][-1]["id"]}
    made = server.post("/ui/explain", asked)
    assert made.status == 200, made.body
    page = server.get(made.json["address"])
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["content-security-policy"].startswith("sandbox allow-scripts")
    assert "Inference, token by token" in page.body.decode()
    assert server.get("/ui/explained/unknown").status == 404
    assert server.get(made.json["address"], sec_fetch_site="cross-site").status == 403
    assert server.post("/ui/explain", {**asked, "answer": chat["entries"][0]["id"]}).status == 400
    assert server.get(server.post("/ui/explain", asked).json["address"]).status == 200
    assert server.get(made.json["address"]).status == 404, "only the newest are kept"
