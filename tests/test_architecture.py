"""What import-linter can't say: homes of foreign packages, circles, sizes, names, and what a start must not load.

Who may import whom among our own rooms is said once, in pyproject.toml. Every test here names all that offend it.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

import llmrun

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGE = Path(llmrun.__file__).parent
PROJECT = Path(__file__).parents[1] / "pyproject.toml"
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))

MOST_LINES, MOST_LINES_OF_A_FUNCTION = 900, 64
MOST_ROOMS, MOST_LAYERS = 23, 14
FOREIGN_FILES = {"convert_hf_to_gguf.py", "convert_lora_to_gguf.py", "modeling_rope_utils.py"}  # docstrings may name

# Foreign package -> the only places that may import it: files, or folders with a slash at the end.
HOMES = {
    "llama_cpp": ("engine/llama/",),
    "jinja2": ("engine/prompt/sandbox.py", "engine/environment.py", "lab/html/"),
    "PIL": ("engine/prompt/media.py",),
    "rich": ("ui/", "lab/views/"),
    "markdown_it": ("ui/answer/",),
    "prompt_toolkit": ("ui/",),
    "typer": ("cli/", "lab/cli/"),
    "click": (),
    "huggingface_hub": ("models/hub.py",),
    "starlette": (
        "server/app.py",
        *(f"server/{name}_routes.py" for name in ("embedding", "engine", "manage", "model", "stored")),
        *(f"server/page/{name}.py" for name in ("answering", "catalogue", "insights", "requests", "routes")),
    ),
    "uvicorn": ("server/listener.py",),
    "h11": ("server/listener.py",),
    "mcp": ("chat/tools/servers.py",),
    "pydantic": ("chat/tools/functions.py",),
    "ray": ("batch/cluster.py",),
    "docstring_parser": ("chat/tools/functions.py",),
}
IMPORTERS = {"import_module", "import_submodule", "__import__"}  # functions, called with a module's name
# The only files that may parse JSON without load_json(): its own, and readers of text that is bounded already.
JSON_PARSERS = {"protocol/codec.py", "grammar/jsontext.py", "engine/constraint/matcher.py"}
# Who may say llama.cpp's and ggml's names: those who call them.
LLAMA = "engine/llama/"
LLAMA_ELSEWHERE: frozenset[str] = frozenset()

HEAVY = (
    "llama_cpp",
    "numpy",
    "huggingface_hub",
    "prompt_toolkit",
    "jinja2",
    "psutil",
    "httpx",
    "pydantic",
    "mcp",
    "llmrun.engine",
    "llmrun.lab",
)

pytestmark = pytest.mark.usefixtures("package_on_path")


@cache
def parsed(file: str) -> ast.Module:
    return ast.parse((PACKAGE / file).read_text(encoding="utf-8"))


@cache
def imports(file: str) -> frozenset[str]:
    """Full names of the modules, and of the names in modules, that a file imports anywhere, by statement or call."""
    found: set[str] = set()
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in IMPORTERS:
            found |= {part.value for part in node.args if isinstance(part, ast.Constant)}
    return frozenset(found)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def at_home(file: str, homes: Iterable[str]) -> bool:
    return any(file == home or (home.endswith("/") and file.startswith(home)) for home in homes)


def test_foreign_packages_stay_in_their_homes() -> None:
    strangers = {
        (file, name)
        for file in FILES
        for package, homes in HOMES.items()
        for name in imports(file)
        if within(name, package) and not at_home(file, homes)
    }
    assert not strangers


def test_each_home_is_lived_in() -> None:
    """A home that imports its package no more would let another file of that name do so unseen."""
    importing = {
        package: [file for file in FILES if any(within(name, package) for name in imports(file))] for package in HOMES
    }
    empty = {
        (package, home)
        for package, homes in HOMES.items()
        for home in homes
        if not any(at_home(file, (home,)) for file in importing[package])
    }
    assert not empty


def test_llama_cpp_is_named_by_those_who_have_to() -> None:
    """Its one importer goes by a name in a variable, which the test above can't see; the others only look for it."""
    naming = {
        file
        for file in FILES
        if any(node.value == "llama_cpp" for node in ast.walk(parsed(file)) if isinstance(node, ast.Constant))
    }
    assert naming == {"engine/llama/library.py", "protocol/llama_folder.py"}


def test_llama_cpp_and_ggml_are_called_in_one_room() -> None:
    calling = {file for file in FILES if any(name.startswith(("llama_", "ggml_")) for name in used(file))}
    assert {file for file in calling if not file.startswith(LLAMA)} == LLAMA_ELSEWHERE
    assert {file for file in calling if file.startswith(LLAMA)}, "the search finds nothing"


def test_untrusted_json_goes_through_the_safe_loader() -> None:
    """json.loads() raises RecursionError for deep text, which `except ValueError` does not catch."""
    parsing = {
        file
        for file in FILES
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.Call) and re.search(r"\bjson\.loads?\(|\.json\(\)$", ast.unparse(node))
    }
    assert parsing == JSON_PARSERS


def used(file: str) -> Iterator[str]:
    """Attributes of anything, and what getattr or [] may be given in their place."""
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            yield from (str(each.value) for each in node.args if isinstance(each, ast.Constant))
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            yield str(node.slice.value)


# ---- sizes


def test_every_module_says_what_it_is() -> None:
    assert not [file for file in FILES if not ast.get_docstring(parsed(file))]
    modern = "from __future__ import annotations"
    assert not [
        file for file in FILES if not file.endswith("__init__.py") and modern not in (PACKAGE / file).read_text()
    ]


def test_files_and_functions_stay_short() -> None:
    lengths = {file: len((PACKAGE / file).read_text(encoding="utf-8").splitlines()) for file in FILES}
    assert not {file: length for file, length in lengths.items() if length > MOST_LINES}
    functions = {
        f"{node.name} in {file}": (node.end_lineno or 0) - node.lineno + 1
        for file in FILES
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert not {name: length for name, length in functions.items() if length > MOST_LINES_OF_A_FUNCTION}


def test_printing_is_for_the_last_layer() -> None:
    others = [file for file in FILES if not file.startswith(("cli/", "ui/", "lab/cli/", "lab/views/"))]
    names = {file: {node.id for node in ast.walk(parsed(file)) if isinstance(node, ast.Name)} for file in others}
    assert not [file for file in others if "print" in names[file]]


# What may follow the name of the program in a sentence, where it names no command.
PROSE = {
    "again", "can", "choose", "has", "is", "knows", "only", "or", "process", "runs", "wrote",
}  # fmt: skip


def test_commands_that_are_recommended_exist() -> None:
    """In hints, notes and help, whoever says them: all texts but docstrings."""
    from llmrun.cli.commands import ALIASES, COMMANDS

    known = {*COMMANDS, *ALIASES} | PROSE
    named = {(file, word) for file in FILES for text in texts(file) for word in re.findall(r"llmrun ([a-z-]+)", text)}
    assert {word for _, word in named} >= {"run", "pull", "list", "sessions"}
    unknown = {(file, word) for file, word in named if word.lstrip("-") not in known and not word.startswith("-")}
    assert not unknown
    assert {word for _, word in named} >= PROSE


def texts(file: str) -> Iterator[str]:
    """Its string constants, without docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(parsed(file))
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


# ---- rooms, circles, names


def room(file: str) -> str:
    """The folder of a file in llmrun/, or in the wing llmrun/lab/."""
    first, *rest = Path(file).with_suffix("").parts
    return f"{first}.{rest[0]}" if first == "lab" else first


def test_there_are_few_rooms_and_layers() -> None:
    rooms = {room(file) for file in FILES}
    assert len([name for name in rooms if not within(name, "lab")]) <= MOST_ROOMS
    contracts = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    runner, laboratory = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    assert len(runner) <= MOST_LAYERS
    layered = {name.strip().removeprefix("llmrun.") for layer in (*runner, *laboratory) for name in layer.split("|")}
    # What is in no layer is held by nothing; the engine has a contract of its own.
    assert rooms - layered == {"__init__", "engine", "lab.__init__"}


def module(file: str) -> str:
    return ".".join(["llmrun", *Path(file).with_suffix("").parts]).removesuffix(".__init__")


def test_only_the_table_of_commands_names_the_laboratory() -> None:
    """Imports of it are a contract in pyproject.toml; modules by name in a string are none that import-linter sees."""
    naming = {
        file
        for file in FILES
        if not within(room(file), "lab") and any(re.search(r"\blab\.\w", text) for text in texts(file))
    }
    assert naming == {"cli/commands.py"}


def test_types_close_no_circle_in_these_rooms() -> None:
    files = {module(file): file for file in FILES if room(file) in {"gguf", "grammar", "planning"}}
    graph = {own: {known(name, files) for name in imports(file)} - {"", own} for own, file in files.items()}
    assert not circles(graph)


def test_imports_run_in_no_circle() -> None:
    """Neither between modules nor between rooms; imports inside functions and for the type checker count too."""
    files = {module(file): file for file in FILES}
    modules: dict[str, set[str]] = {}
    rooms: dict[str, set[str]] = defaultdict(set)
    for own, file in files.items():
        targets = {known(name, files) for name in imports(file)} - {""}
        modules[own] = targets - {own, "llmrun"}
        rooms[room(file)] |= {room(files[target]) for target in modules[own]} - {room(file)}
    assert not circles(modules)
    assert not circles(rooms)


def known(name: str, files: Mapping[str, str]) -> str:
    """The module of ours that an import loads: the name itself, or what it is a name in; "" for none."""
    return next((each for each in (name, name.rpartition(".")[0]) if each in files), "")


def circles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Sets of nodes that all reach each other: Tarjan's strongly connected components of more than one node."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[set[str]] = []

    def visit(node: str) -> None:
        numbers[node] = lowest[node] = len(numbers)
        path.append(node)
        for target in graph.get(node, ()):
            if target not in numbers:
                visit(target)
                lowest[node] = min(lowest[node], lowest[target])
            elif target in path:
                lowest[node] = min(lowest[node], numbers[target])
        if lowest[node] == numbers[node]:
            place = path.index(node)
            if len(path) - place > 1:
                found.append(set(path[place:]))
            del path[place:]

    for node in graph:
        if node not in numbers:
            visit(node)
    return found


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == [{"b", "c"}]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_a_public_name_stands_for_one_thing_in_its_room() -> None:
    homes: dict[tuple[str, str], set[str]] = defaultdict(set)
    for file in FILES:
        for node in parsed(file).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[room(file), node.name].add(file)
    shared = {name: sorted(files) for name, files in homes.items() if len(files) > 1}
    assert not shared


def test_docstrings_name_files_that_exist() -> None:
    """Modules by their path or their name alone; other programs' scripts are listed."""
    names = {Path(file).name for file in (*FILES, *(str(path) for path in Path(__file__).parent.rglob("*.py")))}
    named = {
        (file, word)
        for file in FILES
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for word in re.findall(r"[\w/]+\.py\b", ast.get_docstring(node) or "")
    }
    assert not {(file, word) for file, word in named if Path(word).name not in names | FOREIGN_FILES}
    assert {word for _, word in named} >= FOREIGN_FILES


def test_no_test_imports_another() -> None:
    """What several of them need lies in support/, or is a fixture."""
    importing = {
        (path.name, name)
        for path in Path(__file__).parent.rglob("*.py")
        for name in imports(str(path))
        if any(part.startswith("test_") or part == "conftest" for part in name.split("."))
    }
    assert not importing


# ---- what is loaded


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
    modules = loaded("-m", "llmrun", "run", "--help")
    assert any(within(name, "typer") for name in modules)
    assert not heavy(modules)
    assert not {name for name in modules if within(name, "rich")}


@pytest.mark.parametrize("arguments", [(), ("--help",), ("help",), ("--version",), ("--debug", "-h")])
def test_pages_about_all_commands_load_no_command(arguments: tuple[str, ...]) -> None:
    modules = loaded("-m", "llmrun", *arguments)
    assert "llmrun.cli.pages" in modules
    assert not heavy(modules)
    assert not {name for name in modules if within(name, "typer") or within(name, "rich")}
    own = {name for name in modules if within(name, "llmrun.cli")}
    assert own == {f"llmrun.cli{name}" for name in ("", ".main", ".pages", ".commands")}


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
