"""Bounds of every parameter from both sides, and which layer's value wins."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest

from llmrun.errors import UsageError
from llmrun.protocol.params import (
    BOUNDS,
    DEFAULTS,
    PARAMETERS,
    STEPS,
    Limits,
    SamplingParams,
    check_parameter,
    resolve_sampling,
)

NO_NUMBERS = {"dry_breakers", "logit_bias", "order", "watermark", "watermark_key"}
NUMBERS = {field.name for field in fields(SamplingParams)} - NO_NUMBERS
EDGES = [(name, edge) for name, bounds in BOUNDS.items() for edge in bounds]


def beyond(name: str, edge: float) -> float:
    """The nearest value outside the bounds."""
    outward = -2 if edge == BOUNDS[name][0] else 1  # -1 has a meaning of its own
    return edge + outward if isinstance(edge, int) else math.nextafter(edge, outward * math.inf)


def test_every_number_has_bounds_and_its_default_is_within() -> None:
    assert set(BOUNDS) == NUMBERS
    assert SamplingParams() == DEFAULTS


@pytest.mark.parametrize(("name", "edge"), EDGES)
def test_bounds_are_inclusive(name: str, edge: float) -> None:
    assert getattr(SamplingParams(**{name: edge}), name) == edge
    with pytest.raises(UsageError, match=name):
        SamplingParams(**{name: beyond(name, edge)})


def test_minus_one_is_off_or_the_whole_context_as_elsewhere() -> None:
    params = SamplingParams(top_k=-1, repeat_last_n=-1, dry_last_n=-1)
    longest = BOUNDS["repeat_last_n"][1]
    assert (params.top_k, params.repeat_last_n, params.dry_last_n) == (0, longest, longest)
    with pytest.raises(UsageError, match="dry_allowed_length"):
        SamplingParams(dry_allowed_length=-1)


@pytest.mark.parametrize("name", sorted(NUMBERS))
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_number_may_be_nan_or_infinite(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", sorted(name for name, bounds in BOUNDS.items() if isinstance(bounds[1], int)))
def test_whole_numbers_are_whole(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        SamplingParams(**{name: 1.5})


def test_error_names_the_bounds() -> None:
    with pytest.raises(UsageError) as caught:
        SamplingParams(top_p=1.5)
    assert caught.value.what == "invalid top_p 1.5"
    assert caught.value.why == "must be between 0 and 1"


@pytest.mark.parametrize("pair", [(-1, 0.0), (0, math.nan), (0, math.inf)])
def test_bad_logit_bias(pair: tuple[int, float]) -> None:
    with pytest.raises(UsageError, match="logit_bias"):
        SamplingParams(logit_bias=((5, 1.0), pair))


def test_logit_bias_may_ban() -> None:
    assert SamplingParams(logit_bias=((0, -math.inf),)).logit_bias == ((0, -math.inf),)


@pytest.mark.parametrize("order", [("top_k", "topp"), ("top_k", "min_p", "top_k"), ("",)])
def test_bad_order(order: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="order: ") as caught:
        SamplingParams(order=order)
    assert "penalties, dry, top_n_sigma" in caught.value.why


@pytest.mark.parametrize("order", [(), ("top_k", "min_p")])
def test_temperature_0_is_greedy_whatever_the_order_leaves_out(order: tuple[str, ...]) -> None:
    assert SamplingParams(temperature=0.0, order=order).order == (*order, "temperature")
    assert resolve_sampling(("flag", {"order": order, "temperature": 0}))[0].order == (*order, "temperature")


@pytest.mark.parametrize("order", [(), ("temperature", "top_k"), STEPS[::-1]])
def test_good_order(order: tuple[str, ...]) -> None:
    assert SamplingParams(order=order).order == order


def test_a_refusal_uses_the_persons_own_name() -> None:
    assert check_parameter("top_k", 3.0, "--top-k") == 3
    with pytest.raises(UsageError, match="invalid --temp nan"):
        check_parameter("temperature", math.nan, "--temp")


@pytest.mark.parametrize("most", [0, -1, 2**31])
def test_bad_max_tokens(most: int) -> None:
    with pytest.raises(UsageError, match="max_tokens"):
        Limits(max_tokens=most)


@pytest.mark.parametrize("most", [None, 1, 2**31 - 1])
def test_good_max_tokens(most: int | None) -> None:
    assert Limits(max_tokens=most).max_tokens == most


@pytest.mark.parametrize("texts", [("",), ("a", ""), ("x" * 1025,), ("x",) * 1025])
def test_bad_stop_strings_and_bans(texts: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="invalid stop"):
        Limits(stop=texts)
    with pytest.raises(UsageError, match="invalid ban"):
        Limits(ban=texts)


def test_good_stop_strings_and_bans() -> None:
    assert len(Limits(stop=("x" * 1024,) * 64).stop) == 64
    assert len(Limits(ban=("x" * 1024,) * 1024).ban) == 1024


def test_first_layer_that_names_a_value_wins() -> None:
    params, origins = resolve_sampling(
        ("flag", {"top_k": 1, "seed": None}),
        ("model", {"top_k": 2, "top_p": 0.5}),
        ("catalogue", {"top_k": 3, "top_p": 0.6, "min_p": 0.7, "seed": 9}),
    )
    assert (params.top_k, params.top_p, params.min_p, params.seed) == (1, 0.5, 0.7, None)
    named = {"top_k": "flag", "seed": "flag", "top_p": "model", "min_p": "catalogue"}
    assert origins == {name: named.get(name, "default") for name in {*NUMBERS, *NO_NUMBERS}}


def test_no_layers_give_the_defaults() -> None:
    params, origins = resolve_sampling()
    assert params == DEFAULTS
    assert set(origins.values()) == {"default"}


@pytest.mark.parametrize("values", [{"topk": 1}, {"top_k": -2}])
def test_a_bad_layer_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="top"):
        resolve_sampling(("flag", {}), ("session", values))


def test_an_overruled_value_does_not_have_to_make_sense() -> None:
    assert resolve_sampling(("flag", {"top_p": 0.5}), ("model", {"top_p": 7.0}))[0].top_p == 0.5


# ---- the table


def test_no_two_parameters_share_a_name() -> None:
    flags = [flag for row in PARAMETERS.values() for flag in (row.flag, row.second_flag) if flag]
    names = [
        name for ours, row in PARAMETERS.items() for name in {ours, *filter(None, row.servers.values()), *row.aliases}
    ]
    cards = [row.card for row in PARAMETERS.values() if row.card]
    for together in (flags, names, cards):
        assert sorted(together) == sorted(set(together))


def test_help_of_the_record_is_the_table() -> None:
    assert [line.split(":")[0].strip() for line in (SamplingParams.__doc__ or "").splitlines()[-len(PARAMETERS) :]] == [
        *PARAMETERS
    ]
    assert "top_k: Keep the k likeliest tokens; 0 is off." in (SamplingParams.__doc__ or "")


def test_a_slider_stays_within_its_parameter() -> None:
    sliders = {name: row.slider for name, row in PARAMETERS.items() if row.slider}
    assert set(sliders) <= set(STEPS)
    for name, slider in sliders.items():
        low, high = BOUNDS[name]
        assert low <= 0 <= slider.off <= slider.high <= high
