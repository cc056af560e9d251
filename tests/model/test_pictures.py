"""Pictures from the command line, a chat and a client, through the projector that was named, to an answer."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from support.hf_writer import WIDTH
from support.installed import Installed
from support.served import CHAT, LiveServer
from support.tiny_projector import TILE_TOKENS, png, projector, text_model

TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}so"
QUESTION = "What is it?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a projector whose name says nothing, and a picture."""
    found = tmp_path_factory.mktemp("pictures")
    text_model(found / "tiny.gguf", "gemma3", TEMPLATE)
    projector(found / "eyes.gguf", WIDTH, "gemma3")
    (found / "red.png").write_bytes(png(100, 60, 1))
    return found


def test_run_shows_it_to_the_model(llmrun: Installed, folder: Path) -> None:
    model, eyes, picture = (str(folder / name) for name in ("tiny.gguf", "eyes.gguf", "red.png"))
    blind = llmrun.run("run", model, "--image", picture, QUESTION)
    assert (blind.returncode, b"there is no projector" in blind.stderr) == (2, True)
    words = ("run", model, "--mmproj", eyes, "--image", picture, QUESTION, "--max-tokens", "4", "--json")
    events = [json.loads(line) for line in llmrun.run(*words).stdout.splitlines()]
    pictured, finished = events[0], events[-1]
    assert (pictured["event"], pictured["name"], pictured["width"]) == ("ImageAccepted", picture, 100)
    assert finished["stats"]["picture_tokens"] == TILE_TOKENS < pictured["tokens"]


def test_a_chat_takes_it_with_the_next_message(llmrun: Installed, folder: Path) -> None:
    model, eyes, picture = (str(folder / name) for name in ("tiny.gguf", "eyes.gguf", "red.png"))
    terminal = llmrun.terminal("chat", model, "--mmproj", eyes, "--max-tokens", "4", "--private")
    terminal.wait(terminal.at_prompt)
    terminal.type(f"/image {picture}")
    terminal.wait(lambda: terminal.at_prompt() and "red.png" in "".join(terminal.lines[1:]))
    for n_answers, question in enumerate((QUESTION, "And now?"), 1):
        terminal.type(question)  # the answer is random text, which may begin with a mark that joins the echo
        terminal.wait(lambda: terminal.at_prompt() and "".join(terminal.lines).count("TTFT") == n_answers)  # noqa: B023
    assert "".join(terminal.lines).count("red.png: 100 x 60 pixels") == 1
    terminal.press("d")
    assert terminal.end() == 0


@pytest.mark.usefixtures("package_on_path")
def test_a_server_takes_it_as_a_data_url(folder: Path, tmp_path: Path) -> None:
    url = "data:image/png;base64," + base64.b64encode((folder / "red.png").read_bytes()).decode()
    seen = [{"type": "text", "text": QUESTION}, {"type": "image_url", "image_url": {"url": url}}]
    model, eyes = folder / "tiny.gguf", str(folder / "eyes.gguf")
    with LiveServer(tmp_path, ("real",), model=model, projector=eyes, n_ctx=512) as server:
        used = []
        for content in (QUESTION, seen):
            asked = {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
            used.append(server.post(CHAT, asked).json["usage"]["prompt_tokens"])
    assert used[1] - used[0] >= TILE_TOKENS


@pytest.mark.usefixtures("package_on_path")
def test_the_page_sends_it_with_a_question(folder: Path, tmp_path: Path) -> None:
    image = {"name": "red.png", "data": base64.b64encode((folder / "red.png").read_bytes()).decode()}
    model, eyes = folder / "tiny.gguf", str(folder / "eyes.gguf")
    with LiveServer(tmp_path, ("real",), model=model, projector=eyes, n_ctx=512) as server:
        assert server.post("/ui/load", {"model": ""}).json["sees"] is True
        used = []
        for images in ([], [image]):
            chat = server.post("/ui/ask", {"text": QUESTION, "images": images}).json
            asked = {"chat": chat["id"], "question": chat["entries"][0]["id"], "max_tokens": 4}
            used.append(server.post("/ui/answer", asked).events[0]["prompt_tokens"])
    assert used[1] - used[0] >= TILE_TOKENS
