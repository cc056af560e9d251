"""Who may import what, how long files and functions get, and what a start must not load."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import llmrun

PACKAGE = Path(llmrun.__file__).parent
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))

# Foreign package -> the only places that may import it: files, or folders with a slash at the end.
HOMES = {
    "llama_cpp": ("engine/llama/",),
    "jinja2": ("engine/prompt/template.py", "engine/environment.py"),
    "rich": ("ui/",),
    "prompt_toolkit": ("ui/",),
    "typer": ("cli/",),
    "click": (),
    "huggingface_hub": ("models/hub.py",),
}
# What the engine may know of llmrun: itself, and these.
ENGINE_KNOWS = (
    "errors",
    "protocol",
    "grammar",
    "gguf",
    "_native",
    "engine",
)

HEAVY = (
    "llama_cpp",
    "numpy",
    "huggingface_hub",
    "prompt_toolkit",
    "jinja2",
    "psutil",
    "httpx",
    "llmrun.engine",
)

pytestmark = pytest.mark.usefixtures("package_on_path")


def parsed(file: str) -> ast.Module:
    return ast.parse((PACKAGE / file).read_text(encoding="utf-8"))


def imports(file: str) -> set[str]:
    """Full names of the modules, and of the names in modules, that a file imports anywhere, by statement or call."""
    found: set[str] = set()
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in {
            "import_module",
            "__import__",
        }:
            found |= {part.value for part in node.args if isinstance(part, ast.Constant)}
    return found


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def functions(file: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.mark.parametrize("file", FILES)
def test_foreign_packages_stay_in_their_homes(file: str) -> None:
    for package, homes in HOMES.items():
        at_home = any(file == home or (home.endswith("/") and file.startswith(home)) for home in homes)
        strangers = [name for name in imports(file) if within(name, package)]
        assert at_home or not strangers, f"{file} imports {strangers}"


def test_llama_cpp_is_named_by_those_who_have_to() -> None:
    """Its one importer goes by a name in a variable, which the test above can't see; the others only look for it."""
    naming = {
        file
        for file in FILES
        if any(node.value == "llama_cpp" for node in ast.walk(parsed(file)) if isinstance(node, ast.Constant))
    }
    assert naming == {"engine/llama/library.py", "doctor/doctor.py", "planning/tuned.py"}


def test_llama_cpp_and_ggml_are_called_in_one_room() -> None:
    calling = set()
    for file in FILES:
        called = (ast.unparse(node.func) for node in ast.walk(parsed(file)) if isinstance(node, ast.Call))
        names = {name.split(".")[-1] for name in called}
        if any(name.startswith(("llama_", "ggml_")) for name in names):
            calling.add(file)
    assert calling
    assert all(file.startswith("engine/llama/") for file in calling), calling


@pytest.mark.parametrize("file", FILES)
def test_the_engine_stands_apart(file: str) -> None:
    ours = {name.removeprefix("llmrun.") for name in imports(file) if within(name, "llmrun")}
    if file.startswith("engine/"):
        strangers = {name for name in ours if not any(within(name, known) for known in ENGINE_KNOWS)}
        assert not strangers, f"{file} imports {strangers}"
    else:
        assert not {name for name in ours if within(name, "engine")}, f"{file} imports the engine"


@pytest.mark.parametrize("file", FILES)
def test_every_module_says_what_it_is(file: str) -> None:
    assert ast.get_docstring(parsed(file)), f"{file} has no docstring"
    assert file.endswith("__init__.py") or "from __future__ import annotations" in (PACKAGE / file).read_text()


@pytest.mark.parametrize("file", FILES)
def test_files_and_functions_stay_short(file: str) -> None:
    assert len((PACKAGE / file).read_text(encoding="utf-8").splitlines()) <= 500, file
    for function in functions(file):
        length = (function.end_lineno or 0) - function.lineno + 1
        assert length <= 60, f"{function.name} in {file} has {length} lines"


@pytest.mark.parametrize("file", FILES)
def test_printing_is_for_the_last_layer(file: str) -> None:
    if file.startswith(("cli/", "ui/")):
        return
    for node in ast.walk(parsed(file)):
        assert not (isinstance(node, ast.Name) and node.id == "print"), f"{file} prints"


def loaded(*arguments: str) -> set[str]:
    """Every module that a Python with these arguments imports."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return {line.split("|")[-1].strip() for line in lines}


def heavy(modules: set[str]) -> set[str]:
    return {name for name in modules if any(within(name, package) for package in HEAVY)}


def test_help_loads_nothing_heavy() -> None:
    modules = loaded("-m", "llmrun", "--help")
    assert any(within(name, "typer") for name in modules)
    assert not heavy(modules)


def test_importing_the_package_loads_nothing() -> None:
    modules = loaded("-c", "import llmrun")
    assert {name for name in modules if within(name, "llmrun")} == {"llmrun"}
    assert not heavy(modules)
    assert not {name for name in modules if within(name, "json") or within(name, "dataclasses")}


def test_the_python_api_loads_nothing_heavy() -> None:
    assert not heavy(loaded("-c", "import llmrun; llmrun.load, llmrun.Message, llmrun.SamplingParams, llmrun.errors"))


def test_starting_the_engine_needs_none_of_our_modules() -> None:
    """The sooner it starts, the better; see launch.py."""
    modules = loaded("-c", "import llmrun.runner.launch")
    assert {name for name in modules if within(name, "llmrun")} == {"llmrun", "llmrun.runner", "llmrun.runner.launch"}


def test_public_names_exist() -> None:
    assert set(llmrun.__all__) - {"__version__"} <= {name for name in llmrun.__all__ if getattr(llmrun, name)}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = llmrun.nothing
