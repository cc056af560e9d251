"""Suites that the clients' authors wrote, against `llmrun serve` with SmolLM2: what fails is named, with its reason.

Each file of a suite is a test here, with a limit of its own. One that is over it ends alone, and what passed is told.

    LLMRUN_SUITES=FOLDER LLMRUN_CLIENTS_PYTHON=.../bin/python pytest -m '' -n 0 tests/clients/test_suites.py

FOLDER holds the unpacked source distributions of openai and anthropic, which have their tests; the interpreter has
langchain-tests, langchain-openai, langchain-anthropic and langchain-ollama, and what the tests import: respx,
pytest-asyncio, pytest-xdist, pytest-timeout, time-machine, inline-snapshot, http-snapshot, dirty-equals.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from support.real_server import RealServer
from table import ROWS, Row

PYTHON = os.environ.get("LLMRUN_CLIENTS_PYTHON", sys.executable)
SUITES = Path(os.environ.get("LLMRUN_SUITES", "no such folder"))
LANGCHAIN = Path(__file__).with_name("langchain_suite.py")
PART_SECONDS, TEST_SECONDS = 540, 120  # of a file, which is less than pyproject.toml gives a test; of one of its tests
# SmolLM2 knows no tools: it calls too many of them, or invents arguments.
_WHAT_A_MODEL_CAN = (
    r"test_(tool_calling|agent_loop|structured_output|bind_runnables|unicode_tool|tool_choice|json_mode)"
)
_OUTCOME = re.compile(r"^\S*?(\w+\.py::\S+) (PASSED|FAILED|ERROR)", re.MULTILINE)


class Suite(NamedTuple):
    """Files of a suite, and which of their tests fail for which reason."""

    package: str
    files: tuple[str, ...]  # in tests/api_resources
    reasons: Mapping[str, str]  # pattern of FILE.py::Class::test -> reason


OPENAI = Suite(
    "openai",
    ("test_models.py", "test_embeddings.py", "test_completions.py", "chat"),
    {
        r"test_models.*_delete": "a server deletes no model by /v1/models",
        r"test_embeddings.*strict": "the client asks for base64, and its strict validation knows numbers only",
        r"test_completions.*all_params": "the examples have max_completion_tokens 0, or echo with a suffix",
        r"test_messages|test_completions.*_(retrieve|update|list|delete)": "stored chat completions are not kept",
    },
)
ANTHROPIC = Suite(
    "anthropic",
    ("test_models.py", "test_messages.py", "beta/test_models.py", "beta/test_messages.py"),
    {r"test_messages.*all_params": "the examples' schemas are no JSON schemas: properties.location is a text"},
)


@pytest.fixture(scope="module")
def real(command: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """`llmrun serve` with SmolLM2, which answers for all names."""
    shown = subprocess.run([command, "show", "smollm2", "--json"], stdout=subprocess.DEVNULL, check=False)
    if shown.returncode:
        pytest.skip("smollm2 is not here: llmrun pull smollm2")
    running = RealServer(
        command, tmp_path_factory.mktemp("suites"), "--any-model", "--alias", "test=smollm2", "-c", "1024"
    )
    yield running
    running.end()


def failures(folder: Path, words: tuple[str, ...], part: Row, log: Path, **environment: str) -> list[str]:
    """Run a part of a suite; return its tests that failed, and add what passed to the table, whole or not."""
    command = [PYTHON, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", "-v", "--tb=no", *words]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, f"--timeout={TEST_SECONDS}"],
            cwd=folder,
            env={**os.environ, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        with suppress(subprocess.TimeoutExpired):
            process.wait(PART_SECONDS)
        is_over = process.poll() is None
        process.kill()
        process.wait()
    outcomes = dict(_OUTCOME.findall(log.read_text(errors="replace")))
    n_passed = list(outcomes.values()).count("PASSED")
    result = f"{n_passed} of {len(outcomes)} passed" + f", stopped after {PART_SECONDS} s" * is_over
    ROWS.append(part._replace(result=result))
    assert n_passed, log.read_text(errors="replace")[-2000:]
    assert not is_over, result
    return [name for name, outcome in outcomes.items() if outcome != "PASSED"]


@pytest.mark.parametrize(
    ("suite", "file"),
    [pytest.param(suite, file, id=f"{suite.package} {file}") for suite in (OPENAI, ANTHROPIC) for file in suite.files],
)
def test_a_file_of_a_librarys_suite(real: RealServer, suite: Suite, file: str, tmp_path: Path) -> None:
    folders = sorted(SUITES.glob(f"{suite.package}-*/tests"))
    part = Row(suite.package, "-", f"its own suite: {file}", "skipped: not in LLMRUN_SUITES")
    if not folders:
        ROWS.append(part)
        pytest.skip(f"the source distribution of {suite.package} is not in LLMRUN_SUITES")
    folder = folders[-1].parent
    part = part._replace(version=folder.name.removeprefix(f"{suite.package}-"))
    address = real.address + ("/v1" if suite is OPENAI else "")
    words = (f"tests/api_resources/{file}", "-k", "not aiohttp")
    found = failures(folder, words, part, tmp_path / "log", TEST_API_BASE_URL=address)
    unknown = [name for name in found if not any(re.search(pattern, name) for pattern in suite.reasons)]
    assert not unknown, f"{len(unknown)} failed without a known reason"


@pytest.mark.parametrize("protocol", ["TestChat", "TestResponses", "TestMessages", "TestOllama"])
def test_langchains_standard_tests(real: RealServer, protocol: str, tmp_path: Path) -> None:
    code = "import langchain_tests, langchain_openai, importlib.metadata as m; print(m.version('langchain-tests'))"
    have = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=False)
    part = Row("langchain-tests", have.stdout.strip() or "-", f"its own suite: {protocol}", "skipped: not installed")
    if have.returncode:
        ROWS.append(part)
        pytest.skip("langchain-tests is not installed")
    loop = ("-o", "asyncio_mode=auto", "-o", "asyncio_default_test_loop_scope=session")  # LangChain keeps its clients
    words = (f"{LANGCHAIN}::{protocol}", "--noconftest", "-c", os.devnull, *loop)
    found = failures(LANGCHAIN.parent, words, part, tmp_path / "log", LLMRUN_SUITE_URL=real.address)
    unknown = [name for name in found if not re.search(_WHAT_A_MODEL_CAN, name)]
    assert not unknown, f"{len(unknown)} failed that do not depend on what a small model can do"
