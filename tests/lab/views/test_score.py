"""A scored text: in colours, as lines, as JSON."""

from __future__ import annotations

import io

import pytest

from llmrun.lab.views.evaluate import score_json, show_score
from llmrun.protocol.jobs.evaluate import Figure, ScoredText, ScoredToken
from llmrun.ui.answer.surprise import shade
from llmrun.ui.terminal.output import Output

TOKENS = (
    ScoredToken(7, b"The".hex(), None),
    ScoredToken(8, b" sky\x1b".hex(), -0.25),
    ScoredToken(9, b"\xc3".hex(), -9.5),
    ScoredToken(5, b"\xa9\n".hex(), -0.125),
)
FOUND = ScoredText(TOKENS, 512, 1, Figure(26.8, 0, 20, 30), 2.5)


def shown(found: ScoredText, **environment: str) -> tuple[str, str]:
    out, err = io.StringIO(), io.StringIO()
    show_score(Output(stdout=out, stderr=err, environment=environment), found)
    return out.getvalue(), err.getvalue()


def test_in_a_pipe_each_token_is_a_line() -> None:
    out, err = shown(FOUND)
    assert out.splitlines() == [
        "\t'The'",
        "-0.250000\t' sky\\x1b'",
        "-9.500000\t'\\ufffd'",
        "-0.125000\t'\\ufffd\\n'",
    ]
    assert err == "perplexity 26.80; bits per byte 2.500\n"


def test_in_colours_the_text_is_shaded_and_holds_no_escapes_of_its_own() -> None:
    out, _ = shown(FOUND, FORCE_COLOR="1", TERM="xterm-256color")
    text, *rest = out.split("\n\n")
    assert text == "The sky" + "é\n".rstrip("\n")
    assert "\x1b\n" not in out
    assert "perplexity" in rest[-1]
    assert "26.80" in rest[-1]
    rare = ScoredText((TOKENS[0], ScoredToken(3, b" cat".hex(), -9.5)), 512, 1, FOUND.perplexity, 2.5)
    assert shown(rare, FORCE_COLOR="1")[0].startswith(f"The\x1b[{shade(-9.5)}m cat\x1b[0m\n")


@pytest.mark.parametrize(("windows", "words"), [(1, ""), (3, "it was read in 3 windows")])
def test_windows_are_told(windows: int, words: str) -> None:
    assert (words in shown(ScoredText(TOKENS, 512, windows, FOUND.perplexity, 2.5))[1]) is True


def test_json_has_each_token_and_its_bytes() -> None:
    facts = score_json("m.gguf", FOUND)
    assert (facts["model"], facts["perplexity"], facts["bits_per_byte"], facts["windows"]) == ("m.gguf", 26.8, 2.5, 1)
    assert facts["tokens"][0] == {"id": 7, "token": "The", "bytes": [84, 104, 101], "logprob": None}
    assert facts["tokens"][2]["bytes"] == [0xC3]
