"""Tests that compute on a GPU. Without one they are skipped.

They run on software too: Mesa's Vulkan driver for processors, with llama.cpp built with -DGGML_VULKAN=on and
GGML_VK_VISIBLE_DEVICES=0,0, since llama.cpp takes such a device only where it is named; see lavapipe.sh.
Tests of one GPU use the first one.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.gpu_loader import Loader
from support.random_model import write_random_model

from llmrun.config import load_settings
from llmrun.errors import EngineCrashedError, ResourceError
from llmrun.model import Model
from llmrun.model.loading import prepare
from llmrun.models.location import locate
from llmrun.planning.hardware import this_machine
from llmrun.planning.preferences import LoadPreferences
from llmrun.protocol.devices import Gpu
from llmrun.runner.client import EngineClient

_SOFTWARE = "llvmpipe"  # Mesa's driver for processors, by the description of its device
_DRIVER_FAILURES = (EngineCrashedError, ResourceError, TimeoutError)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip a test in which the software driver crashed or had no memory: that says nothing about llmrun."""
    report = yield
    if call.excinfo and isinstance(call.excinfo.value, _DRIVER_FAILURES) and _SOFTWARE in _own_gpus()[0].description:
        path, line, _ = item.location
        report.outcome = "skipped"
        report.longrepr = (path, line or 0, f"the software driver failed: {call.excinfo.exconly().splitlines()[0]}")
    return report


@cache
def _own_gpus() -> tuple[Gpu, ...]:
    return tuple(gpu for gpu in this_machine().gpus if not gpu.shared)


@pytest.fixture(autouse=True)
def gpus(package_on_path: None) -> tuple[Gpu, ...]:
    if not _own_gpus():
        pytest.skip("`llmrun doctor` finds no GPU with memory of its own")
    return _own_gpus()


@pytest.fixture(scope="session")
def first_gpu() -> Gpu:
    if not _own_gpus():
        pytest.skip("no GPU")
    return _own_gpus()[0]


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("gpu") / "random.gguf", layers=4, width=256)


@pytest.fixture
def load(gpus: tuple[Gpu, ...], model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loader]:
    """Load the model; see support.gpu_loader.Loader."""
    monkeypatch.setenv("LLMRUN_HOME", str(tmp_path / "home"))
    loaded: list[Model] = []

    def start(
        path: Path = model_path, *, n_ctx_start: int = 0, others: dict[str, Any] | None = None, **preferred: Any
    ) -> Model:
        preferences = LoadPreferences(**{"device": gpus[0].name, "n_ctx": 512, **preferred})
        model = prepare(locate(str(path), load_settings()).spec, path, preferences, **(others or {}))
        if n_ctx_start:
            model.plan = replace(model.plan, load=replace(model.load, n_ctx_start=n_ctx_start))
        loaded.append(model)
        model.start(EngineClient())
        return model

    yield start
    for model in loaded:
        model.close()
