"""GPUs as ggml's registry tells them: whose memory is the machine's own does not count beside it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from llmrun.engine.llama import devices
from llmrun.engine.llama.devices import Device
from llmrun.protocol.devices import Gpu

GRAPHICS_CARD, INTEGRATED = 1, 2  # enum ggml_backend_dev_type


@pytest.fixture(autouse=True)
def nobody_has_asked() -> Iterator[None]:
    devices.gpus.cache_clear()
    yield
    devices.gpus.cache_clear()


@pytest.mark.parametrize(
    ("platform", "kind", "shared"),
    [("linux", GRAPHICS_CARD, False), ("linux", INTEGRATED, True), ("darwin", GRAPHICS_CARD, True)],
)
def test_whose_memory_it_is(monkeypatch: pytest.MonkeyPatch, platform: str, kind: int, shared: bool) -> None:
    def ask(device: int, free: Any, total: Any) -> None:
        free._obj.value, total._obj.value = 7, 9

    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(devices, "function", lambda *_: ask)
    monkeypatch.setattr(devices, "devices", lambda: (Device("CPU", "cpu", 0, 1), Device("GPU0", "card", kind, 2)))
    assert devices.gpus() == (Gpu("GPU0", "card", 9, 7, shared),)
