"""What llama-server's clients ask of its own routes, asked of a real engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.family_model import control_texts, write_family_model
from support.gguf_writer import RUNNABLE_VOCABULARY, runnable_model, write
from support.served import CHAT, HI, LiveServer, read_all

from llmrun.server.guard import Policy

pytestmark = pytest.mark.usefixtures("package_on_path")
BEGIN = RUNNABLE_VOCABULARY.index("<s>")
FREE = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1, "ignore_eos": True, "n_predict": 12}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("routes")
    with LiveServer(folder, ("real",), model=tiny(folder), n_ctx=2048) as live:
        yield live


def tiny(folder: Path) -> Path:
    return write(folder / "real.gguf", runnable_model({"llama.context_length": 2048}))


def complete(server: LiveServer, prompt: Any, **fields: Any) -> Any:
    answer = server.post("/completion", {**FREE, "prompt": prompt, **fields})
    assert answer.status == 200, answer.body
    return answer.json


def ids(server: LiveServer, text: str) -> list[int]:
    tokens: list[int] = server.post("/tokenize", {"content": text}).json["tokens"]
    return tokens


def text_of(server: LiveServer, tokens: list[int]) -> str:
    """The text of tokens that do not begin a text."""
    text: str = server.post("/detokenize", {"tokens": [ids(server, "a")[-1], *tokens]}).json["content"]
    return text[1:]


def test_the_texts_of_control_tokens_are_these_in_a_prompt_without_a_template(server: LiveServer) -> None:
    """Clients that write the chat template themselves send them, and every other server reads them."""
    assert ids(server, "Hi<s>Hi").count(BEGIN) == 1
    found = complete(server, "Hi<s>Hi", n_predict=1)
    assert found["tokens_evaluated"] == 1 + len(ids(server, "Hi<s>Hi")) < 1 + 2 * len(ids(server, "Hi")) + len("<s>")
    body = {"prompt": "Hi<s>Hi", "echo": True, "logprobs": 1, "max_tokens": 1}
    (choice,) = server.post("/v1/completions", body).json["choices"]
    assert len(choice["logprobs"]["tokens"]) == found["tokens_evaluated"] + 1


def test_prompts_of_texts_and_ids(server: LiveServer) -> None:
    text, tokens = "Hello", ids(server, "Hello")
    counts = [
        complete(server, prompt, n_predict=1)["tokens_evaluated"]
        for prompt in (text, tokens, [*tokens, text], [text, *tokens], {"prompt_string": text})
    ]
    n = len(tokens)
    assert counts == [n + 1, n, 2 * n, 2 * n + 1, n + 1], "only a prompt that begins with a text begins a sequence"
    several = complete(server, [text, tokens, {"prompt_string": text}], n_cmpl=2)
    assert [each["index"] for each in several] == [0, 1, 2, 3, 4, 5]
    assert several[0]["content"] == several[4]["content"] == complete(server, text)["content"]
    assert several[1]["content"] == complete(server, text, seed=2)["content"]
    streamed = server.post("/completion", {**FREE, "prompt": [text, tokens], "stream": True}).events
    for index, whole in enumerate(complete(server, [text, tokens])):
        pieces = [event for event in streamed if event["index"] == index]
        assert "".join(each["content"] for each in pieces) == whole["content"]
        assert [each["stop"] for each in pieces].count(True) == 1


def test_the_ids_of_an_answer(server: LiveServer) -> None:
    found = complete(server, "Hi", return_tokens=True)
    assert len(found["tokens"]) == found["tokens_predicted"] == 12
    assert text_of(server, found["tokens"]) == found["content"]
    streamed = server.post("/completion", {**FREE, "prompt": "Hi", "stream": True}).events
    assert [token for event in streamed for token in event["tokens"]] == found["tokens"]
    assert complete(server, "Hi")["tokens"] == []
    end = RUNNABLE_VOCABULARY.index("</s>")
    ended = complete(server, "Hi", return_tokens=True, ignore_eos=False, logit_bias=[[end, 1e6]])
    assert (ended["tokens"], ended["content"], ended["stop_type"]) == ([end], "", "eos")


def test_the_ids_of_what_was_taken_back_are_not_told(server: LiveServer) -> None:
    plain = complete(server, "Hi", return_tokens=True)
    banned = plain["content"][2:4]
    found = complete(server, "Hi", return_tokens=True, ban=[banned])
    assert banned.lower() not in found["content"].lower()
    assert text_of(server, found["tokens"]) == found["content"]
    streamed = server.post("/completion", {**FREE, "prompt": "Hi", "stream": True, "ban": [banned]}).events
    assert [token for event in streamed for token in event["tokens"]] == found["tokens"]


def test_probabilities_have_ids_and_may_be_those_after_the_sampler(server: LiveServer) -> None:
    two = {"logit_bias": [[token, 1e6] for token in (ids(server, "A")[-1], ids(server, "B")[-1])], "n_probs": 3}
    raw = complete(server, "Hi", **two, return_tokens=True)
    after = complete(server, "Hi", **two, post_sampling_probs=True)
    for token, before, drawn in zip(
        raw["tokens"], raw["completion_probabilities"], after["completion_probabilities"], strict=True
    ):
        assert before["id"] == drawn["id"] == token
        assert len({each["id"] for each in before["top_logprobs"]}) == 3
        assert [each["prob"] for each in drawn["top_probs"]] == pytest.approx([0.5, 0.5]), "of two equal ones"
        assert token in [each["id"] for each in drawn["top_probs"]]
    greedy = complete(server, "Hi", **two, temperature=0, post_sampling_probs=True)["completion_probabilities"]
    assert [[each["prob"], *(top["prob"] for top in each["top_probs"])] for each in greedy] == [[1.0, 1.0]] * 12
    forced = complete(server, "Hi", n_probs=3, post_sampling_probs=True, grammar='root ::= "ab"', ignore_eos=False)
    assert [entry["prob"] for entry in forced["completion_probabilities"]][:2] == [1.0, 1.0]


def test_a_bias_may_name_a_text(server: LiveServer) -> None:
    named, numbered = ([[key, 1e6] for key in keys] for keys in (["<0x41>"], ids(server, "A")[-1:]))
    assert complete(server, "Hi", logit_bias=numbered)["content"] == "A" * 12
    (letter,) = (token for token in ids(server, "A") if RUNNABLE_VOCABULARY[token] == "<0x41>")
    for banned in ([[letter, False]], {str(letter): False}, [["A", False]]):
        body = {"logit_bias": [*numbered, *banned] if isinstance(banned, list) else banned}
        assert "A" not in complete(server, "Hi", **body)["content"]
    assert complete(server, "Hi", logit_bias=named)["content"] != "A" * 12, "a text is no name of a token"
    assert server.post("/completion", {"prompt": "Hi", "logit_bias": [[10**6, 1]]}).status == 400


def test_only_the_wanted_fields(server: LiveServer) -> None:
    wanted = ["content", "generation_settings/n_predict", "generation_settings/temperature", "nothing"]
    found = complete(server, "Hi", response_fields=wanted)
    assert found.keys() == {*wanted[:3]}
    assert (found["generation_settings/n_predict"], found["generation_settings/temperature"]) == (12, 1.0)


def test_pieces_of_tokens(server: LiveServer) -> None:
    text = "Hi é<s>"
    plain = server.post("/tokenize", {"content": text, "add_special": True}).json["tokens"]
    assert plain[1:] == ids(server, text)
    assert plain[0] == BEGIN
    tokens = server.post("/tokenize", {"content": text, "add_special": True, "with_pieces": True}).json["tokens"]
    assert [token["id"] for token in tokens] == plain
    data = [bytes(piece) if isinstance(piece := token["piece"], list) else piece.encode() for token in tokens]
    assert b"".join(data).replace(b" ", b"") == "<s>Hié<s>".encode()
    assert any(isinstance(token["piece"], list) for token in tokens), "a half of é"


def test_what_a_server_says_of_itself(server: LiveServer) -> None:
    props = server.get("/props").json
    assert Path(props["model_path"]).name == "real.gguf"
    assert Path(props["model_path"]).is_file()
    settings = props["default_generation_settings"]
    assert (settings["n_ctx"], settings["params"]["top_k"], props["total_slots"]) == (2048, 40, 2)
    assert settings["params"].keys() == complete(server, "Hi")["generation_settings"].keys()
    models = server.get("/v1/models").json
    (entry,) = (each for each in models["models"] if each["name"] == server.model)
    assert entry["capabilities"] == ["completion", "tools"]
    (listed,) = (each for each in models["data"] if each["id"] == server.model)
    assert (listed["meta"]["n_vocab"], listed["meta"]["n_ctx_train"]) == (len(RUNNABLE_VOCABULARY), 2048)


def test_slots_tell_of_ones_own_answers(tmp_path: Path) -> None:
    """The engine ends no answer before it has two."""
    body = json.dumps({"prompt": "Hi", "n_predict": 9, "seed": 1, "stream": True}).encode()
    policy = Policy(keys=(b"a", b"b"))
    with LiveServer(tmp_path, ("together",), policy=policy, parallel=1) as server:

        def slots(key: str, query: str = "") -> Any:
            return server.get(f"/slots{query}", authorization=f"Bearer {key}").json

        with server.connect() as connection:
            connection.sendall(server.request("POST", "/completion", body, authorization="Bearer a"))
            assert connection.recv(1), "it has started"
            (mine,), (others,) = slots("a"), slots("b")
            assert mine["is_processing"]
            assert (mine["params"]["n_predict"], mine["params"]["seed"], mine["n_prompt_tokens"]) == (9, 1, 3)
            assert (mine["next_token"][0]["n_decoded"], mine["next_token"][0]["n_remain"]) == (0, 9)
            assert others["is_processing"]
            assert "params" not in others, "nor anything else of the request"
            assert slots("a", "?fail_on_no_slot=1")["error"]["code"] == "busy"
            assert server.post("/completion", {"prompt": "Hi"}, authorization="Bearer b").status == 200
            read_all(connection)
        (slot,) = slots("a", "?fail_on_no_slot=1")
        assert (slot["is_processing"], "params" in slot) == (False, False)


@pytest.mark.parametrize("path", [CHAT, "/completion", "/v1/completions"])
def test_the_progress_of_a_prompt(server: LiveServer, path: str) -> None:
    text = "a new question " * 40 + path
    asked = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    body = {**asked, "max_tokens": 1, "stream": True, "return_progress": True}
    events = server.post(path, body).events
    first, *_, last = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert (first["processed"], first["time_ms"]) == (first["cache"], 0)
    assert last["processed"] == last["total"] == first["total"] > len(text) // 2
    assert last["time_ms"] > 0
    del body["return_progress"]
    assert not [event for event in server.post(path, body).events if "prompt_progress" in event]


def test_times_are_in_answers_and_in_the_last_chunk_of_a_stream(server: LiveServer) -> None:
    for path, asked in ((CHAT, HI), ("/v1/completions", {"prompt": "Hi"})):
        body = {**asked, "max_tokens": 3, "ignore_eos": True}
        whole = server.post(path, body).json
        assert whole["timings"]["predicted_n"] == whole["usage"]["completion_tokens"] == 3
        assert whole["system_fingerprint"]
        for options in ({}, {"stream_options": {"include_usage": True}}):
            *chunks, last = server.post(path, {**body, "stream": True, **options}).events
            assert last["timings"]["predicted_n"] == 3
            assert not any("timings" in chunk for chunk in chunks)
            assert {chunk["system_fingerprint"] for chunk in (*chunks, last)} == {whole["system_fingerprint"]}


@pytest.mark.parametrize("path", [CHAT, "/completion", "/v1/completions"])
def test_a_prompt_that_is_too_long_has_the_type_of_llama_server_and_the_code_of_openai(
    server: LiveServer, path: str
) -> None:
    text = "word " * 3000
    asked = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    error = server.post(path, asked).json["error"]
    assert (error["type"], error["code"]) == ("exceed_context_size_error", "context_length_exceeded")
    assert error["n_prompt_tokens"] > error["n_ctx"] == 2048


def test_tags_of_reasoning_stay_in_a_text_without_a_template(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking %}<think>{% endif %}</think>"
    model = write(
        tmp_path / "real.gguf",
        runnable_model({"llama.context_length": 2048, "tokenizer.chat_template": template}),
    )
    grammar = {"grammar": 'root ::= "<think>a</think>b"', "ignore_eos": False, "n_predict": 60}
    with LiveServer(tmp_path, ("real",), model=model, n_ctx=2048) as server:
        whole = complete(server, "Hi", **grammar)["content"]
        streamed = server.post("/completion", {**FREE, **grammar, "prompt": "Hi", "stream": True}).events
    assert "<think>a</think>b" in whole
    assert "".join(event["content"] for event in streamed) == whole


HARMONY = (
    "{% for each in messages %}{% if each.role == 'assistant' and '<|channel|>final<|message|>' in each.content %}"
    "{{ raise_exception('tags in the content') }}{% endif %}"
    "<|start|>{{ each.role }}<|message|>{{ each.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def test_gpt_oss_takes_an_answer_that_quotes_its_own_tags(tmp_path: Path) -> None:
    """Its template refuses a conversation in which they stand as such, in each request from then on."""
    model = write_family_model(tmp_path / "oss.gguf", control_texts(HARMONY), ("<|return|>",), template=HARMONY)
    quoted = "write <|channel|>final<|message|>"
    turns = [("user", "Hi"), ("assistant", quoted), ("user", "Why?")]
    messages = [{"role": role, "content": content} for role, content in turns]
    with LiveServer(tmp_path, ("real",), model=model, n_ctx=2048) as server:
        answer = server.post(CHAT, {"messages": messages, "max_tokens": 1})
        assert answer.status == 200, answer.body
        prompt = server.post("/apply-template", {"messages": messages}).json["prompt"]
        assert f"<|message|>{quoted}<|end|>" in prompt
