"""Images and audio from the command line, a chat and a client, through the projector that was named, to an answer."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from support.hf_writer import WIDTH
from support.installed import Installed
from support.served import CHAT, LiveServer
from support.tiny_projector import AUDIO_TOKENS, TILE_TOKENS, audio_projector, png, projector, text_model, tone, wav

TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}so"
QUESTION = "What is it?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, projectors whose names say nothing, a picture and a recording."""
    found = tmp_path_factory.mktemp("pictures")
    text_model(found / "tiny.gguf", "gemma3", TEMPLATE)
    projector(found / "eyes.gguf", WIDTH, "gemma3")
    (found / "red.png").write_bytes(png(100, 60, 1))
    audio_projector(found / "ears.gguf", WIDTH)
    (found / "low.wav").write_bytes(wav(tone(1.5)))
    return found


def test_run_shows_it_to_the_model(llmrun: Installed, folder: Path) -> None:
    model, eyes, picture = (str(folder / name) for name in ("tiny.gguf", "eyes.gguf", "red.png"))
    blind = llmrun.run("run", model, "--image", picture, QUESTION)
    assert (blind.returncode, b"there is no projector" in blind.stderr) == (2, True)
    words = ("run", model, "--mmproj", eyes, "--image", picture, QUESTION, "--max-tokens", "4", "--json")
    events = [json.loads(line) for line in llmrun.run(*words).stdout.splitlines()]
    pictured, finished = events[0], events[-1]
    assert (pictured["event"], pictured["name"], pictured["width"]) == ("MediaAccepted", picture, 100)
    assert finished["stats"]["media_tokens"] == TILE_TOKENS < pictured["tokens"]


@pytest.mark.parametrize("option", ["--audio", "-f"])
def test_run_lets_the_model_hear(llmrun: Installed, folder: Path, option: str) -> None:
    model, eyes, ears, audio = (str(folder / name) for name in ("tiny.gguf", "eyes.gguf", "ears.gguf", "low.wav"))
    deaf = llmrun.run("run", model, "--mmproj", eyes, option, audio, QUESTION)
    assert (deaf.returncode, b"its projector eyes.gguf has no encoder for audio" in deaf.stderr) == (2, True)
    words = ("run", model, "--mmproj", ears, option, audio, QUESTION, "--max-tokens", "4")
    events = [json.loads(line) for line in llmrun.run(*words, "--json").stdout.splitlines()]
    heard, finished = events[0], events[-1]
    assert (heard["event"], heard["name"], heard["seconds"]) == ("MediaAccepted", audio, 1.5)
    assert finished["stats"]["media_tokens"] == AUDIO_TOKENS == heard["tokens"]
    assert f"low.wav: 1.5 s of audio, {AUDIO_TOKENS} tokens".encode() in llmrun.run(*words, "--stats").stderr


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
def test_a_server_takes_audio_as_openai_has_it(folder: Path, tmp_path: Path) -> None:
    data = base64.b64encode((folder / "low.wav").read_bytes()).decode()
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    model, ears = folder / "tiny.gguf", str(folder / "ears.gguf")
    with LiveServer(tmp_path, ("real",), model=model, projector=ears, n_ctx=512) as server:
        assert server.get("/props").json["modalities"] == {"vision": False, "audio": True}
        used = []
        for content in (QUESTION, [{"type": "text", "text": QUESTION}, part]):
            asked = {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
            used.append(server.post(CHAT, asked).json["usage"]["prompt_tokens"])
        chat = server.post("/ui/ask", {"text": QUESTION, "media": [{"name": "low.wav", "data": data}]}).json
        asked = {"chat": chat["id"], "question": chat["entries"][0]["id"], "max_tokens": 4}
        used.append(server.post("/ui/answer", asked).events[0]["prompt_tokens"])
    assert min(used[1:]) - used[0] >= AUDIO_TOKENS


@pytest.mark.usefixtures("package_on_path")
def test_the_page_sends_it_with_a_question(folder: Path, tmp_path: Path) -> None:
    image = {"name": "red.png", "data": base64.b64encode((folder / "red.png").read_bytes()).decode()}
    model, eyes = folder / "tiny.gguf", str(folder / "eyes.gguf")
    with LiveServer(tmp_path, ("real",), model=model, projector=eyes, n_ctx=512) as server:
        assert server.post("/ui/load", {"model": ""}).json["modalities"] == ["image"]
        used = []
        for images in ([], [image]):
            chat = server.post("/ui/ask", {"text": QUESTION, "media": images}).json
            asked = {"chat": chat["id"], "question": chat["entries"][0]["id"], "max_tokens": 4}
            used.append(server.post("/ui/answer", asked).events[0]["prompt_tokens"])
    assert used[1] - used[0] >= TILE_TOKENS
