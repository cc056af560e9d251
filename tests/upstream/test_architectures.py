"""Headers of every architecture that can be made tiny: what llama.cpp itself loads, no rule of ours refuses."""

from __future__ import annotations

import os
from typing import Any

import pytest
from support.tiny_models import ARCHITECTURES, tiny_headers

from llmrun.gguf.header import Header
from llmrun.gguf.rules import check

pytestmark = [pytest.mark.upstream, pytest.mark.slow, pytest.mark.skipif(os.name != "posix", reason="it forks")]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Header, dict[str, Any]]]:
    return tiny_headers(tmp_path_factory.mktemp("models"), ARCHITECTURES)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_llama_cpp_loads_is_not_refused(told: dict[str, tuple[Header, dict[str, Any]]], name: str) -> None:
    header, answer = told[name]
    assert "refused" not in answer
    assert answer.get("loaded", True)
    check(header)


def test_there_are_enough() -> None:
    assert len(ARCHITECTURES) >= 60
