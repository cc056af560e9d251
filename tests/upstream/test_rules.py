"""The rules of llmrun/gguf/rules.py against llama.cpp itself: what they refuse kills it, but for what it bears."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.architectures import Case, answers
from support.broken_headers import BROKEN
from support.gguf_writer import metadata

pytestmark = [pytest.mark.upstream, pytest.mark.slow, pytest.mark.skipif(os.name != "posix", reason="it forks")]

# llama.cpp says no to these by itself, or bears them where they are all that is wrong with a tiny model.
BORNE = {
    "no architecture", "projector", "adapter", "layers missing", "layers as text", "no context", "endless context",
    "endless vocabulary", "no vocabulary", "endless template", "endless heads", "endless keys", "endless width",
    "endless window",
}  # fmt: skip


def case_of(name: str) -> Case:
    """A model that runs, but for what the rule forbids."""
    changes, _ = BROKEN[name]
    architecture = changes.get("general.architecture") or "llama"
    settings = {key.removeprefix(f"{architecture}."): value for key, value in changes.items()}
    usual = {key.partition(".")[2]: value for key, value in metadata().items() if key.startswith("llama.")}
    return Case(architecture, {**usual, **settings, "general.architecture": architecture})


def test_the_rules_refuse_what_kills_llama_cpp(tmp_path: Path) -> None:
    found = answers(tmp_path, {name: case_of(name) for name in BROKEN})
    assert {name for name, answer in found.items() if "died" in answer} == BROKEN.keys() - BORNE
