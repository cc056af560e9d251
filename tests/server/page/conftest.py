"""Servers for the page, and a browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.chromium import PROGRAM, Chromium
from support.gguf_writer import runnable_model, write
from support.served import LiveServer


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    if PROGRAM is None:
        pytest.skip("there is no Chromium")
    found = Chromium(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture
def real(tmp_path: Path) -> Iterator[LiveServer]:
    """A server over a real engine, with a model that says anything."""
    model = write(tmp_path / "real.gguf", runnable_model({"llama.context_length": 2048}))
    with LiveServer(tmp_path, ("real",), model=model, n_ctx=2048) as server:
        yield server


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., LiveServer]]:
    with ExitStack() as stack:
        yield lambda *modes, **options: stack.enter_context(
            LiveServer(tmp_path, modes or ("echo",), **{"n_ctx": 2_000_000, **options})
        )


@pytest.fixture
def server(serve: Callable[..., LiveServer]) -> LiveServer:
    return serve()
