"""Suites that the clients' authors wrote, against `llmrun serve` with SmolLM2: what fails is named, with its reason.

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
from pathlib import Path
from typing import NamedTuple

import pytest
from support.real_server import RealServer
from table import ROWS, Row

PYTHON = os.environ.get("LLMRUN_CLIENTS_PYTHON", sys.executable)
SUITES = Path(os.environ.get("LLMRUN_SUITES", "no such folder"))
LANGCHAIN = Path(__file__).with_name("langchain_suite.py")
SECONDS = 7200
# SmolLM2 knows no tools: it calls too many of them, or invents arguments.
_WHAT_A_MODEL_CAN = (
    r"test_(tool_calling|agent_loop|structured_output|bind_runnables|unicode_tool|tool_choice|json_mode)"
)
_FAILED = re.compile(r"^(?:FAILED|ERROR) \S*?(\w+\.py::\S+)", re.MULTILINE)


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


def failures(folder: Path, words: tuple[str, ...], name: str, version: str, **environment: str) -> list[str]:
    """Run a suite's files; return the tests that failed, and add the counts to the table."""
    command = [PYTHON, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", "-q", "-rfE", "--tb=no", *words]
    changed = {**os.environ, **environment}
    done = subprocess.run(
        command, cwd=folder, env=changed, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode in (0, 1), done.stdout[-2000:] + done.stderr[-2000:]
    found = _FAILED.findall(done.stdout)
    n_passed = int((re.findall(r"(\d+) passed", done.stdout) or ["0"])[-1])
    ROWS.append(Row(name, version, f"its own suite: {n_passed + len(found)} tests", f"{n_passed} passed"))
    assert n_passed
    return found


@pytest.mark.parametrize("suite", [OPENAI, ANTHROPIC], ids=lambda suite: suite.package)
def test_a_suite_of_a_library(real: RealServer, suite: Suite) -> None:
    folders = sorted(SUITES.glob(f"{suite.package}-*/tests"))
    if not folders:
        ROWS.append(Row(suite.package, "-", "its own suite", "skipped: not in LLMRUN_SUITES"))
        pytest.skip(f"the source distribution of {suite.package} is not in LLMRUN_SUITES")
    folder = folders[-1].parent
    version = folder.name.removeprefix(f"{suite.package}-")
    address = real.address + ("/v1" if suite is OPENAI else "")
    words = (*(f"tests/api_resources/{name}" for name in suite.files), "-k", "not aiohttp")
    found = failures(folder, words, suite.package, version, TEST_API_BASE_URL=address)
    unknown = [name for name in found if not any(re.search(pattern, name) for pattern in suite.reasons)]
    assert not unknown, f"{len(unknown)} failed without a known reason"


def test_langchains_standard_tests(real: RealServer) -> None:
    code = "import langchain_tests, langchain_openai, importlib.metadata as m; print(m.version('langchain-tests'))"
    have = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=False)
    if have.returncode:
        ROWS.append(Row("langchain-tests", "-", "its own suite", "skipped: not installed"))
        pytest.skip("langchain-tests is not installed")
    loop = ("-o", "asyncio_mode=auto", "-o", "asyncio_default_test_loop_scope=session")  # LangChain keeps its clients
    words = (str(LANGCHAIN), "--noconftest", "-c", os.devnull, *loop)
    found = failures(LANGCHAIN.parent, words, "langchain-tests", have.stdout.strip(), LLMRUN_SUITE_URL=real.address)
    unknown = [name for name in found if not re.search(_WHAT_A_MODEL_CAN, name)]
    assert not unknown, f"{len(unknown)} failed that do not depend on what a small model can do"
