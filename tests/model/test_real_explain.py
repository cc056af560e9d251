"""What a model does, of the real SmolLM2: quantized and repacked weights, and thousands of tokens in the lens."""

from __future__ import annotations

import json

import pytest
from support.installed import Installed

# The lens computes without flash attention, which rounds differently.
QUESTION = ("smollm2", "Why is the sky blue?", "--seed", "1", "--flash-attention", "off")


@pytest.mark.slow
def test_the_explained_answer_is_the_one_that_run_gives(llmrun: Installed) -> None:
    answer = llmrun.run("run", *QUESTION, "--max-tokens", "6", "--plain").stdout.decode()
    found = json.loads(llmrun.run("explain", *QUESTION, "--answer", "6", "--json").stdout)
    seen = found["run"]
    pieces = {each["token"]: b"" if each["is_control"] else bytes.fromhex(each["data"]) for each in seen["pieces"]}
    chosen = seen["tokens"][seen["n_prompt"] :]
    assert b"".join(map(pieces.__getitem__, chosen)).decode() == answer.removesuffix("\n")
    assert seen["lens_refused"] == "", "the lens gives the model's own logits behind the last layer"
    assert [len(layer["heads"]) for layer in seen["layers"]] == [9] * 30
    assert all(sum(row) == pytest.approx(1, abs=1e-3) for picture in seen["pictures"] for row in picture["rows"])
    near = {
        pieces[each["token"]]: [near["token"] for near in each["neighbours"]] for each in seen["embeddings"]["tokens"]
    }
    assert {b" skies", b" Sky"} <= set(map(pieces.__getitem__, near[b" sky"]))
    assert all(pieces[token] for found in near.values() for token in found), "no control token is anyone's neighbour"
    # Attention whose weights are shown rounds differently from flash attention, and quantized activations amplify it.
    columns = {column["position"]: column["next"] for column in seen["lens"]}
    for place, choice in enumerate(found["choices"]):
        share = choice["steps"][0]["probabilities"][choice["chosen"]]
        assert columns[seen["n_prompt"] - 1 + place] == pytest.approx(share, abs=0.1)


def test_tokens_of_the_header_alone(llmrun: Installed) -> None:
    text = "naïve Привет 你好"
    ids = llmrun.run("tokenize", "smollm2", text).stdout.decode().split()
    found = json.loads(llmrun.run("tokenize", "smollm2", text, "--json", "--merges").stdout)
    assert ids == [str(token["id"]) for token in found["tokens"]]
    assert b"".join(bytes.fromhex(token["bytes"]) for token in found["tokens"]).decode() == text
    assert all(tree["tree"] for tree in found["merges"]["trees"])
