"""An explained answer as it is drawn."""

from __future__ import annotations

import io
from dataclasses import replace

from support.explained import CACHE, FOUND, LAYER, RUN, column

from llmrun.lab.insight.explain import ExplainedAnswer
from llmrun.lab.views.explain import show_explained, sparkline
from llmrun.protocol.jobs.explain import HeadAttention, WatchedLayer
from llmrun.protocol.jobs.text import VocabularyPiece
from llmrun.protocol.messages import DraftedToken
from llmrun.ui.terminal.output import Output


def shown(found: ExplainedAnswer) -> list[str]:
    output = Output(stdout=io.StringIO(), stderr=io.StringIO(), environment={})
    show_explained(output, found)
    text = output.stdout.getvalue()
    assert "\x1b" not in text, "nothing of the model's reaches the terminal, and a pipe gets no colours"
    assert not output.stderr.getvalue()
    return text.splitlines()


def row(lines: list[str], start: str) -> list[str]:
    return next(line for line in lines if line.strip().startswith(start)).split()


def test_the_story_has_all_of_its_parts() -> None:
    lines = shown(FOUND)
    parts = ["Tokens", "Embeddings", "Layers", "Logit lens", "Attention", "KV cache", "Time", "Sampling"]
    assert [line for line in lines if line in parts] == parts
    assert "|<s>| hi" in lines
    assert row(lines, "residual")[-3:] == ["▃█", "2.0", "8.0"]
    assert row(lines, "feed-forward")[-2:] == ["1.5", "1.5"]
    assert row(lines, "prefill") == ["prefill", "3", "500.0", "ms", "6.0", "tokens/s", "50%", "of", "compute"]
    assert row(lines, "decode")[-4:] == ["tokens/s", "50%", "of", "memory"]
    assert ["decode", "██", "1.0", "ms"] in [line.split() for line in lines]


def test_words_have_their_neighbours() -> None:
    longer = replace(RUN, pieces=(*RUN.pieces[:1], VocabularyPiece(1, b" hello".hex()), *RUN.pieces[2:]))
    lines = shown(replace(FOUND, run=longer))
    assert "a vector of 576 numbers" in " ".join(lines)
    assert row(lines, "' hello'  'you'") == ["'", "hello'", "'you'", "0.75"]
    assert not any("NEAREST" in line for line in shown(FOUND)), "no token of the prompt is a word"
    assert any("no input embeddings" in line for line in shown(replace(FOUND, run=replace(RUN, embeddings=None))))


def test_the_lens_says_how_likely_the_token_was_that_came() -> None:
    lines = shown(FOUND)
    assert row(lines, "1  ' hi'") == ["1", "'", "hi'", "75.0%", "'you'", "25.0%", "number", "8,", "<0.1%"]
    assert row(lines, "2  ' hi'")[-3:] == ["number", "1,", "50.0%"]


def test_a_lens_that_was_refused_says_why() -> None:
    lines = shown(replace(FOUND, run=replace(RUN, lens=(), lens_refused="differs")))
    assert any("not shown" in line and "model's logits" in line for line in lines)


def test_attention_is_shaded_row_by_row() -> None:
    lines = shown(FOUND)
    rows = lines[next(number for number, line in enumerate(lines) if "rows are tokens" in line) + 1 :][:3]
    assert [line.rstrip()[15:] for line in rows] == ["██", "▓▓▓▓", "  ██"]
    assert row(lines, "layer 2, head 2")[-3:] == ["10.0%", "90.0%", "0.10"]


def test_what_flash_attention_rounds_otherwise_is_named_where_it_was() -> None:
    assert "flash attention" in " ".join(shown(FOUND))
    assert "flash attention" not in " ".join(shown(replace(FOUND, run=replace(RUN, flash_attention=False))))


def test_what_a_row_lacks_is_explained() -> None:
    assert any("every row sums to 1" in line for line in shown(FOUND))
    sunk = (replace(RUN.pictures[0], rows=((0.2,), (0.3, 0.3), (0.0, 1.0, 0.0))),)
    assert any("attention sink" in line for line in shown(replace(FOUND, run=replace(RUN, pictures=sunk))))


def test_each_token_has_the_layer_that_decided_it() -> None:
    lines = shown(FOUND)
    assert [line.split() for line in lines if line.startswith("'you'")][-1] == ["'you'", "60.0%", "80.0%", "2", "2"]
    always = replace(RUN, lens=(column(1, 0, 0), column(2, 0, 0)))
    assert [line.split()[-1] for line in shown(replace(FOUND, run=always)) if line.startswith("'you'")][-1] == "1"
    never = replace(RUN, lens=(column(1, 0, 4),))
    assert [line.split()[-1] for line in shown(replace(FOUND, run=never)) if line.startswith("'you'")][-1] == "2"


def test_the_last_column_is_about_drafts_if_there_were_any() -> None:
    assert not any("DRAFTED" in line for line in shown(FOUND))
    draft = DraftedToken("heads", 1, "you", accepted=True, probability=0.5)
    lines = shown(replace(FOUND, choices=(FOUND.choices[0]._replace(draft=draft), *FOUND.choices[1:])))
    assert any(line.endswith("DRAFTED") for line in lines)
    assert any(line.endswith("heads 1 50.0%") for line in lines)


def test_what_shared_heads_and_windows_save() -> None:
    text = " ".join(shown(FOUND))
    assert "3 times as much" in text
    assert "A sliding window of 512 tokens in 1 layer saves 27% of a full window" in text


def test_what_a_model_lacks_is_left_out_or_said() -> None:
    bare = replace(RUN, layers=(WatchedLayer((1.0, 1.0, 1.0)),) * 2, pictures=(), lens=(), lens_refused="names")
    none = replace(CACHE, bytes_per_token=0.0, layers=0)
    text = " ".join(shown(ExplainedAnswer("tiny", replace(bare, decode_seconds=0.0), (), none, None, None)))
    assert "no attention weights" in text
    assert "stores no keys and values" in text
    assert "Sampling" not in text
    assert "attention added" not in text


def test_of_a_long_answer_the_first_watched_token_is_looked_at() -> None:
    late = replace(RUN, tokens=(0, 1, 2, 1, 2, 1), n_prompt=2, first=3, lens=(column(3, 7, 0), column(4, 3, 0)))
    late = replace(late, pictures=(HeadAttention("sharp", 0, 0, ((0.25,) * 4, (0.2,) * 5, (0.0,) * 5 + (1.0,))),))
    lines = shown(replace(FOUND, run=late))
    assert row(lines, "residual")[-2:] == ["1.0", "1.0"]
    assert "first watched token" in " ".join(lines)


def test_experts_are_named_layer_by_layer() -> None:
    layers = (replace(LAYER, experts=((0, 1), (5, 3), (2, 2))), LAYER)
    lines = shown(replace(FOUND, run=replace(RUN, layers=layers)))
    assert ["1", "5", "3"] in [line.split() for line in lines]


def test_sparklines() -> None:
    assert sparkline([0.0, 1.0, 4.0, 8.0]) == "▁▂▅█"
    assert sparkline([0.0, 0.0]) == "▁▁"
    assert sparkline([]) == ""
