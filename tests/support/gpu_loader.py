"""Loads the random model of tests/gpu."""

from __future__ import annotations

from collections.abc import Callable

from llmrun.model import Model

Loader = Callable[..., Model]
