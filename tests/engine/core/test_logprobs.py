"""Log probabilities: which piece of text carries them, and that they change no answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from support.constraints import AfterA
from support.conversation import Conversation
from support.fake_context import END, HEART, favouring, hashed, scripted

from llmrun.engine.core.sampler import SequenceSampler
from llmrun.errors import UsageError
from llmrun.protocol.messages import TextDelta, TokenLogprob
from llmrun.protocol.params import SamplingParams

HOT = SamplingParams(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.3, seed=1)


def told(talk: Conversation, request: int = 1) -> list[tuple[str, str]]:
    """Return the text and tokens of each piece of text with log probabilities."""
    deltas = [event for event in talk.of(request) if isinstance(event, TextDelta)]
    return [(delta.text, "|".join(token.text for token in delta.logprobs)) for delta in deltas if delta.logprobs]


def tokens(talk: Conversation, request: int = 1) -> list[TokenLogprob]:
    return [token for event in talk.of(request) if isinstance(event, TextDelta) for token in event.logprobs]


def test_they_are_the_models_before_any_sampling() -> None:
    talk = Conversation(hashed, n_ctx=100)
    text, _ = talk.answer("Hi", HOT, most=20, logprobs=3)
    found = tokens(talk)
    assert "".join(token.text for token in found) == text
    for index, token in enumerate(found):
        row = np.array(hashed(b"Hi" + text[:index].encode()))
        values = row - np.log(np.exp(row).sum())
        likeliest = np.argsort(-row, kind="stable")[:3]
        assert token.bytes == tuple(text[index].encode())
        assert token.logprob == pytest.approx(values[ord(text[index])], abs=1e-5)
        assert [chr(each) for each in likeliest] == [text for text, _, _ in token.top]
        assert [value for _, _, value in token.top] == pytest.approx(values[likeliest].tolist(), abs=1e-5)


def test_telling_them_changes_no_answer() -> None:
    plain = Conversation(hashed, n_ctx=100).answer("Hi", HOT, most=40, ban=("ab", "c"))
    talk = Conversation(hashed, n_ctx=100)
    assert talk.answer("Hi", HOT, most=40, ban=("ab", "c"), logprobs=2) == plain
    assert "".join(token.text for token in tokens(talk)) == plain[0], "tokens that were taken back are not told"


def test_many_at_once_are_told_what_each_is_told_alone() -> None:
    prompts = ["one", "two", "three"]
    talk = Conversation(hashed, n_ctx=100, n_seq_max=3)
    for request, prompt in enumerate(prompts):
        talk.ask(prompt, HOT, most=10, request=request, logprobs=request)
    talk.run()
    for request, prompt in enumerate(prompts):
        alone = Conversation(hashed, n_ctx=100)
        alone.answer(prompt, HOT, most=10, logprobs=request)
        assert tokens(talk, request) == tokens(alone)
        assert {len(token.top) for token in tokens(talk, request)} == {request}


def test_without_candidates_and_not_at_all() -> None:
    talk = Conversation(scripted({"Hi": "yo"}))
    talk.answer("Hi", logprobs=0)
    assert [(token.text, token.top) for token in tokens(talk)] == [("y", ()), ("o", ())], "the end is no text"
    talk.answer("Hi")
    assert not tokens(talk)


def test_they_come_with_the_text_that_was_held_back() -> None:
    talk = Conversation(scripted({"Hi": "ab<en<end"}))
    talk.answer("Hi", stop=("<end>",), logprobs=0)
    assert told(talk) == [("a", "a"), ("b", "b"), ("<en", "<|e|n"), ("<end", "<|e|n|d")]


def test_a_stop_string_is_named_and_its_tokens_are_not_told() -> None:
    talk = Conversation(scripted({"Hi": "ab<end>c"}))
    talk.answer("Hi", stop=("<end>", "nothing"), logprobs=0)
    assert told(talk) == [("a", "a"), ("b", "b")]
    assert (talk.finished().reason, talk.finished().detail) == ("stop", "<end>")


def test_the_tokens_of_a_character_come_with_it() -> None:
    talk = Conversation(scripted({"Hi": [HEART, 0xA4, ord("!")]}))
    talk.answer("Hi", logprobs=0)
    heart = [("❤", "\ufffd|\ufffd"), ("!", "!")]
    assert told(talk) == heart
    assert [token.bytes for token in tokens(talk)] == [(0xE2, 0x9D), (0xA4,), (ord("!"),)]


def test_forced_tokens_were_certain() -> None:
    talk = Conversation(scripted({"Hi": "xabc"}))
    talk.answer("Hi", constraint=AfterA(), logprobs=1)
    assert [(token.text, token.logprob == 0, len(token.top)) for token in tokens(talk)] == [
        ("x", False, 1),
        ("a", False, 1),
        ("b", True, 0),
        ("c", True, 0),
    ]


def test_a_token_taken_back_inside_a_character() -> None:
    def logits(tokens: Sequence[int]) -> Sequence[float]:
        row = favouring({ord("i"): HEART, HEART: 0xA4}.get(tokens[-1], END))
        row[ord("y")] = 10.0
        return row

    talk = Conversation(logits)
    assert talk.answer("Hi", ban=("❤",), logprobs=0) == ("\ufffdy", "stop")
    assert [token.bytes for token in tokens(talk)] == [(0xE2, 0x9D), (ord("y"),)]


def test_an_impossible_number_is_refused() -> None:
    talk = Conversation(hashed)
    for count in (-1, 10**6):
        with pytest.raises(UsageError, match="logprobs"):
            SequenceSampler(SamplingParams(), talk.context.vocabulary, logprobs=count)
