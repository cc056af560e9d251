"""The page of an explained answer: every part is on it, it stands alone, and the model's texts are inert."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from support.explained import CACHE, CHOICE, FOUND, LAYER, RUN, column

from llmrun.lab.insight.explain import PAGE_CANDIDATES, ExplainedAnswer
from llmrun.lab.insight.merges import BytePairs
from llmrun.lab.views.explain import explain_page
from llmrun.protocol.jobs.explain import (
    EmbeddedToken,
    EmbeddingPlane,
    HeadAttention,
    LensCell,
    LensColumn,
    Neighbour,
    WatchedLayer,
)
from llmrun.protocol.jobs.text import VocabularyPiece
from llmrun.protocol.messages import DraftedToken
from llmrun.protocol.params import SamplingParams
from llmrun.protocol.questions import ChainStep, Choice

_ATTACKS = (
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "<b onclick=alert(1)>", "<svg/onload=alert(1)>",
    "<!--", "<style>*{display:none}", "<base href=//evil>", "<a href=javascript:alert(1)>", "&lt;script&gt;", "]]><?x",
)  # fmt: skip
_WAYS_OUT = ("{}", "</script>{}", "\"'>{}", "</title></style></textarea>{}", "\u2028\x1b[2J\x00\u202e{}\ud800")
HOSTILE = tuple(way.format(attack) for attack in _ATTACKS for way in _WAYS_OUT)
assert len(HOSTILE) == 50


def shown(found: ExplainedAnswer, rule: BytePairs | None = None, **sampling: Any) -> str:
    return explain_page(found, SamplingParams(**sampling), rule)


def data_of(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def headings(page: str) -> list[str]:
    return re.findall("<h2>(.*?)</h2>", page)


def test_every_part_is_on_the_page() -> None:
    page = shown(FOUND)
    parts = [
        "Tokens",
        "The chosen token",
        "Embeddings",
        "Layers",
        "Logit lens",
        "Attention",
        "KV cache",
        "Time",
        "Sampling",
    ]
    assert headings(page) == parts
    views = re.findall('data-view="(.*?)"', page)
    assert views == ["token", "embeddings", "layers", "lens", "attention", "time", "sampling"]
    for words in ("shows only 38%", "50% of compute", "3 times as much", "layer 2, head 2: rests on the first token"):
        assert words in page
    data = data_of(page)
    assert data["start"] == 1, "the prompt's last token"
    assert [data["names"][str(token)] for token in data["tokens"]] == [r"'<s>\x1b[2J'", "' hi'", "'you'"]
    assert data["places"][1] == [1, 1.0, 0.5, [[2, -1.0, 0.5, 0.75]]]
    assert data["norms"][0] == ["residual stream", [[1.0, 2.0, 3.0], [1.0, 8.0, 3.0]]]
    assert data["lens"][0][1] == [[1, 2], [0.75, 0.25], 0.5, 0]
    assert data["heads"][0][1][2][0] == [1, 1.0], "you looks at hi"
    assert data["time"] == [["prefill", [0.004, 0.004]], ["decode", [0.001, 0.001]]]


def test_it_loads_nothing_and_runs_only_its_own_scripts() -> None:
    page = shown(FOUND)
    for outside in ("http://", "https://", " src=", "@import", "url(", "<link"):
        assert outside not in page.replace("http://www.w3.org/2000/svg", "")
    policy = re.search('content="(default-src.*?)"', page)
    assert policy
    codes = re.findall("<script>(.*?)</script>", page, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() for code in codes]
    assert len(digests) == 3
    assert all(f"sha256-{digest}" in html.unescape(policy[1]) for digest in digests)


class Elements(HTMLParser):
    """What a browser makes of a page: its elements, and which attributes they have."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, list[str]]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, [name for name, _ in attrs]))

    def handle_endtag(self, tag: str) -> None:
        self.found.append((f"/{tag}", []))

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")


def of_a_model_that_says(text: str) -> str:
    """The page of a model whose name and tokens are all this text, and came by merges of it."""
    written = text.encode("utf-8", "surrogatepass")
    pieces = tuple(VocabularyPiece(token, written.hex(), is_control=token == 0) for token in range(3))
    choice = CHOICE._replace(text=text, candidates=(text, text))
    merges = [written[:end] + b" " + written[end : end + 1] for end in range(1, len(written))]
    rule = BytePairs([written] * 3, merges, is_byte_level=False)
    return shown(replace(FOUND, model=text, run=replace(RUN, pieces=pieces), choices=(choice,)), rule)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_vocabulary_changes_no_element_of_the_page(text: str) -> None:
    page = of_a_model_that_says(text)
    assert Elements(page).found == Elements(of_a_model_that_says("word")).found
    assert not set("\x00\x1b\u2028\u202e\ud800") & set(page)
    assert "alert" in str(data_of(page)["names"]) or "alert" not in text


def test_a_choice_has_its_steps_and_all_that_sliders_need() -> None:
    many = tuple(f"word {number}" for number in range(PAGE_CANDIDATES))
    shares = tuple(0.9 / PAGE_CANDIDATES for _ in many)
    choice = Choice("word 150", False, many, 150, (ChainStep("model", 300, shares), ChainStep("top_k", 200, shares)))
    draft = DraftedToken("model", 1, "</script>", accepted=False, probability=0.5)
    choices = (Choice("x", forced=True), choice._replace(draft=draft))
    page = shown(replace(FOUND, choices=choices), top_k=500, order=("top_k", "min_p"))
    forced, free = data_of(page)["choices"]
    assert forced == {"forced": True, "drafted": ""}
    refused = "Drafted '</script>', which was refused: by the draft model, with 50.0%, as token 1 of the draft."
    assert free["drafted"] == refused
    assert len(free["model"]) == PAGE_CANDIDATES
    assert free["others"] == [100, pytest.approx(0.1 / 100)], "what the model gave to candidates that have no name here"
    assert free["shown"] == [*range(12), 150], "the chosen one is always there"
    assert free["texts"][-1] == "'word 150'"
    assert [(name, left, len(shares)) for name, left, shares in free["steps"]] == [
        ("model", 300, 13),
        ("top_k", 200, 13),
    ]
    assert data_of(page)["order"] == ["top_k", "min_p", "top_p", "temperature"]
    values = dict(re.findall('name="(.*?)" min="0" max=".*?" step=".*?" value="(.*?)"', page))
    assert values == {"temperature": "1", "top_k": "500", "top_p": "1", "min_p": "0.05"}, "what is left out is off"


def test_how_tokens_are_made() -> None:
    rule = BytePairs([None, b"hi", b"you"], [b"h i"], is_byte_level=False)
    page = shown(FOUND, rule)
    assert "Byte pair encoding" in page
    assert data_of(page)["trees"][:2] == [None, ["'hi'", [["'h'", []], ["'i'", []]]]]


def test_what_a_model_lacks_is_left_out_or_said() -> None:
    bare = replace(
        RUN,
        embeddings=None,
        layers=(WatchedLayer(),) * 2,
        pictures=(),
        lens=(),
        lens_refused="names",
        decode_seconds=0.0,
    )
    page = shown(ExplainedAnswer("tiny", bare, (), replace(CACHE, layers=0), None, None))
    assert headings(page) == ["Tokens", "The chosen token", "Embeddings", "Logit lens", "Attention", "KV cache", "Time"]
    assert "no attention weights" in page
    assert "stores no keys and values" in page
    assert "is not shown: the model" in page


def test_experts_of_each_token() -> None:
    layers = (replace(LAYER, experts=((0, 1), (5, 3), (2, 2))), LAYER)
    page = shown(replace(FOUND, run=replace(RUN, layers=layers)))
    assert "Experts" in headings(page)
    assert data_of(page)["experts"] == [[0, [[0, 1], [5, 3], [2, 2]]]]
    assert "5</title>" in page, "the heaviest of the second token has its colour"
    assert "3</title>" not in page


def test_of_a_long_text_places_count_from_the_first_watched_token() -> None:
    late = replace(RUN, tokens=(0, 1, 2, 1, 2, 1), n_prompt=2, first=3, lens=(column(3, 7, 0), column(4, 3, 0)))
    late = replace(
        late, pictures=(HeadAttention("sharp", 0, 0, ((0.0, 0.0, 0.6, 0.4), (0.2,) * 5, (0.0,) * 5 + (1.0,))),)
    )
    page = shown(replace(FOUND, run=late))
    data = data_of(page)
    assert (data["first"], data["start"], data["tokens"]) == (3, 0, [1, 2, 1])
    assert data["heads"][0][1][0][:2] == [[2, 0.6], [1, 0.4]], "tokens before them are named"
    assert 'd="M0 0h1v1h-1z" fill-opacity="0.6"' in page, "but only these are drawn"
    assert "have no column" in page


def test_sixty_four_tokens_of_thirty_layers_stay_small() -> None:
    size, n_layers = 64, 30
    figures = tuple(1234.5678 + at for at in range(size))
    layer = replace(LAYER, residual=figures, attention=figures, feed_forward=figures)
    cell = LensCell(29, (49151, 49150, 49149, 49148, 49147), (0.123456789,) * 5, 0.123456789, 12345)
    run = replace(
        RUN,
        tokens=tuple(range(49151, 49151 - size, -1)),
        pieces=tuple(VocabularyPiece(49151 - at, b" <tokens>".hex()) for at in range(size)),
        n_prompt=1,
        embeddings=EmbeddingPlane(
            576,
            0.5,
            tuple(
                EmbeddedToken(49151 - at, 1.234567, -1.234567, (Neighbour(49151, 0.123456789, 12.34567, 1.234567),) * 5)
                for at in range(size)
            ),
        ),
        layers=(layer,) * n_layers,
        pictures=tuple(
            HeadAttention("spread", 0, 0, tuple((1 / (at + 1),) * (at + 1) for at in range(size))) for _ in range(4)
        ),
        lens=tuple(LensColumn(at, 0.1, (cell,) * n_layers) for at in range(size)),
    )
    shares = (0.123456789,) * PAGE_CANDIDATES
    steps = tuple(ChainStep(name, 200, shares) for name in ("model", "top_k", "top_p", "min_p", "temperature"))
    choice = Choice(" <tokens>", False, (" <tokens>",) * PAGE_CANDIDATES, 0, steps)
    assert len(shown(replace(FOUND, run=run, choices=(choice,) * (size - 1))).encode()) < 1_500_000
