"""Explanations, sampler steps and the context window on the page, asked of a real engine."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import quickjs
from support.installed import eventually
from support.page_client import store
from support.served import SECONDS, LiveServer
from support.tiny_projector import text_model

from llmrun.chat.store.store import Sessions, folder_in
from llmrun.chat.store.turns import Answer
from llmrun.chat.truncation import SUMMARY_QUESTION
from llmrun.config import load_settings
from llmrun.models.fingerprint import ModelFingerprint
from llmrun.protocol.questions import EXPLAIN_CHOICES, ExplainChoices
from llmrun.server.page import insights
from llmrun.server.page.files import FOLDER

pytestmark = pytest.mark.usefixtures("package_on_path")

TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}so"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    model = text_model(tmp_path / "real.gguf", "gemma3", TEMPLATE)
    with LiveServer(tmp_path, ("real",), model=model, n_ctx=2048) as live:
        yield live


@pytest.fixture
def chat(server: LiveServer) -> dict[str, Any]:
    """A chat with one answer, drawn with a penalty and a seed of its own."""
    asked = server.post("/ui/ask", {"text": "Hello there", "system": "Be brief."}).json
    settings = {"max_tokens": 6, "temperature": 0.9, "top_k": 30, "top_p": 0.85, "min_p": 0.01}
    answer = {"chat": asked["id"], "question": asked["entries"][-1]["id"], **settings}
    assert server.post("/ui/answer", answer).events[-1]["completion_tokens"] > 0
    read: dict[str, Any] = server.get(f"/ui/chats/{asked['id']}").json
    return read


def test_the_tokens_of_a_saved_answer_are_computed_again(server: LiveServer) -> None:
    asked = server.post("/ui/ask", {"text": "Hello there", "system": "Be brief."}).json
    question = {"chat": asked["id"], "question": asked["entries"][-1]["id"], "candidates": 10}
    events = server.post("/ui/answer", {**question, "max_tokens": 6, "temperature": 0}).events
    kept = [token for event in events for token in event.get("tokens", ())]
    answer = server.get(f"/ui/chats/{asked['id']}").json["entries"][-1]
    found = server.post("/ui/tokens", {"chat": asked["id"], "answer": answer["id"]})
    assert found.status == 200, found.body
    again = found.json["tokens"]
    text = b"".join(bytes(token["bytes"]) for token in again)
    assert text.decode("utf-8", "replace") == answer["text"]
    assert all(len(token["top_logprobs"]) == 10 and token["logprob"] <= 0 for token in again)
    if [token["bytes"] for token in again] == [token["bytes"] for token in kept[: len(again)]]:
        for one, other in zip(again, kept, strict=False):
            assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-2)
    assert server.post("/ui/tokens", {"chat": asked["id"], "answer": 99}).status == 400


def test_an_answer_is_explained_on_a_page_of_its_own(
    server: LiveServer, chat: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(insights, "_MOST_PAGES", 1)
    asked = {"chat": chat["id"], "answer": chat["entries"][-1]["id"]}
    made = server.post("/ui/explain", asked)
    assert made.status == 200, made.body
    *steps, last = map(json.loads, made.body.splitlines())
    assert [line["doing"] for line in steps][-2:] == ["computing every layer", "writing the page"]
    assert [line["share"] for line in steps] == sorted(line["share"] for line in steps)
    page = server.get(last["address"])
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"].split("; ")
    assert {"sandbox allow-scripts", "default-src 'none'", "form-action 'none'", "frame-ancestors 'none'"} <= {*policy}
    assert len(last["address"].removeprefix(insights.EXPLAINED)) * 6 >= 128, "bits that nobody can guess"
    assert "Inference, token by token" in page.body.decode()
    assert server.get("/ui/explained/unknown").status == 404
    assert server.get(last["address"], sec_fetch_site="cross-site").status == 403
    assert server.post("/ui/explain", {**asked, "answer": chat["entries"][0]["id"]}).status == 400
    monkeypatch.setattr(insights, "_PAGE_SECONDS", 0)
    newest = json.loads(server.post("/ui/explain", asked).body.splitlines()[-1])["address"]
    assert server.get(last["address"]).status == 404, "only the newest are kept"
    assert eventually(lambda: server.get(newest).status == 404, SECONDS), "and not for long"


def test_the_steps_of_a_token_are_those_of_why(server: LiveServer, chat: dict[str, Any]) -> None:
    asked = {"chat": chat["id"], "answer": chat["entries"][-1]["id"]}
    for begins in ("", "Hel"):
        found = server.post("/ui/why", {**asked, "begins": begins}).json
        model, *_, last = found["steps"]
        assert model["name"] == "model"
        assert model["shares"] == sorted(model["shares"], reverse=True)
        assert (found["values"]["top_k"], len(found["candidates"])) == (30, len(last["shares"]))
        assert 1 <= last["left"] <= 30 < model["left"]
        assert sum(last["shares"]) == pytest.approx(1, abs=1e-4)
        # What the page's sliders show at the settings of the answer is what the engine's sampler left.
        order = [step for step in found["order"] if step in found["values"]]
        others = (model["left"] - len(model["shares"]), 0.0)
        if others[0]:
            others = (others[0], max(1 - sum(model["shares"]), 0.0) / others[0])
        shares, left = recomputed(model["shares"], others, order, found["values"])
        assert shares == pytest.approx(last["shares"], abs=1e-4)
        assert left == last["left"]


def recomputed(
    shares: list[float], others: tuple[int, float], order: list[str], values: dict[str, float]
) -> tuple[list[float], int]:
    context = quickjs.Context()
    context.eval((FOLDER / "sampler.js").read_text(encoding="utf-8"))
    arguments = ",".join(map(json.dumps, (shares, others, order, values)))
    found = json.loads(context.eval(f"JSON.stringify(recompute({arguments}))"))
    return found["shares"], found["left"]


def test_the_context_window_is_counted(server: LiveServer, chat: dict[str, Any]) -> None:
    found = server.post("/ui/context", {"chat": chat["id"]}).json
    assert [row["role"] for row in found["messages"]] == ["system", "user", "assistant"]
    assert all(row["tokens"] > 0 for row in found["messages"][:2])
    stats = server.get(f"/ui/chats/{chat['id']}").json["entries"][-1]["stats"]
    assert 0 < found["total"] == stats["context_used"] < found["n_ctx"] == 2048, "as the bar below the answer says"
    assert found["messages"][-1]["tokens"] == stats["completion_tokens"]
    server.post("/ui/system", {"chat": chat["id"], "system": "Talk like a pirate. " * 50})
    longer = server.post("/ui/context", {"chat": chat["id"]}).json
    assert longer["total"] > sum(row["tokens"] for row in longer["messages"]) > found["total"]


def test_an_answer_of_another_model_is_not_explained_by_this_one(server: LiveServer, chat: dict[str, Any]) -> None:
    with Sessions(folder_in(load_settings().state_dir)) as store:
        saved = store.open("1")
        saved.add_answer(Answer("Hello", model=ModelFingerprint("other", path="/other.gguf")))
        answer = saved.entries[-1].id
        saved.release()
    refused = server.post("/ui/why", {"chat": chat["id"], "answer": answer})
    assert (refused.status, "is of other" in refused.json["error"]["message"]) == (400, True)
    lines = server.post("/ui/explain", {"chat": chat["id"], "answer": answer}).body.splitlines()
    assert "is of other" in json.loads(lines[-1])["error"]


def test_an_explanation_that_is_left_ends_in_the_engine(
    server: LiveServer, chat: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = threading.Event(), threading.Event()

    def explain(model: Any, asked: Any, **options: Any) -> Any:
        jobs, number = asked
        begun.set()
        try:
            while True:  # longer than anybody waits
                jobs.do(EXPLAIN_CHOICES, ExplainChoices(number, 1, 4))
        finally:
            ended.set()

    monkeypatch.setattr("llmrun.lab.cli.explain.explain_answer", explain)
    body = json.dumps({"chat": chat["id"], "answer": chat["entries"][-1]["id"]})
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", "/ui/explain", body, {"content-type": "application/json"})
    reply = connection.getresponse()
    assert b"doing" in reply.readline()
    assert begun.wait(SECONDS)
    reply.close()
    connection.close()
    assert ended.wait(SECONDS)
    assert server.post("/ui/context", {"chat": chat["id"]}).status == 200


def test_a_conversation_that_is_too_long_goes_on_with_a_summary(server: LiveServer) -> None:
    chat: dict[str, Any] = {"id": None}
    for n in range(9):
        asked = {
            "chat": chat["id"],
            "text": f"{n} " + "many words " * 60,
            "after": (chat.get("entries") or [{"id": None}])[-1]["id"],
        }
        chat = server.post("/ui/ask", asked).json
        assert "id" in chat, chat
        question = {"chat": chat["id"], "question": chat["entries"][-1]["id"], "max_tokens": 4, "temperature": 0}
        answered = server.post("/ui/answer", question)
        if answered.status == 400:
            break
        chat = server.get(f"/ui/chats/{chat['id']}").json
    assert "context" in answered.json["error"]["message"]
    answered = server.post("/ui/answer", {**question, "overflow": "summarize"})
    assert answered.status == 200, answered.body
    assert b"the model saw a summary of " in answered.body
    with store() as terminal:
        window = terminal.open(chat["name"]).messages()
    assert SUMMARY_QUESTION in [message.content for message in window], "the next turn needs no other summary"
    refused = server.post("/ui/answer", {**question, "overflow": "forget"})
    assert refused.status == 400
