"""How large the code is: files, lines, records, constants, functions, inner imports, of commits side by side.

    python tests/benchmarks/sizes.py 73f3a358 HEAD

Read from git, so that a commit need not be checked out. The runner is llmrun/ without the laboratory, llmrun/lab/. A
constant is a number under a name in capitals at the top of a module. Places that state a parameter's facts are counted
for --top-k: files of llmrun/ and native/ that quote its name, or give the name a type or a value; tests, comments and
calls that only use it are none. hops.py counts its way to the sampler. Ways to draft are the names of the methods by
which classes of the engine return drafts. Files of measurements are those with a name in planning/ or config.py.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

FOLDERS = {"llmrun": ".py", "native": (".cpp", ".hpp"), "tests": ".py"}
LABORATORY, CORE = "llmrun/lab/", "llmrun/engine/core/"
_SOURCES_OF_DRAFTS = (f"{CORE}draft", f"{CORE}mtp")
_DRAFTING = {"draft", "compute", "propose"}
_MEASURING, _NOT_MEASURED = ("llmrun/config.py", "llmrun/planning/"), "LAST_MODEL_FILE"
_RECORD = {"dataclass", "NamedTuple"}
_STATING = (".py", ".pyi", ".js", ".cpp", ".hpp")
_COMMENT = re.compile(r'"""[\s\S]*?"""|//[^\n]*|(?m:^\s*#[^\n]*)')
_FACT = re.compile(
    r"""["'](?:--)?top[-_]k["'] | (?<![:.\w]) top_k \s*: | \b(?:int32_t|float) [,\s]+ top_k\b""",
    re.IGNORECASE | re.VERBOSE,
)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def git(*words: str) -> str:
    root = Path(__file__).parents[2]
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout


def sources(commit: str, folder: str) -> dict[str, str]:
    """Return the text of each source file of a folder."""
    suffix = FOLDERS[folder]
    names = [name for name in git("ls-tree", "-r", "--name-only", commit, folder).splitlines() if name.endswith(suffix)]
    return {name: git("show", f"{commit}:{name}") for name in names}


def states_top_k(text: str) -> bool:
    """Return whether a file states a fact of --top-k."""
    return _FACT.search(_COMMENT.sub("", text)) is not None


def places(commit: str) -> list[str]:
    """Return the files that state a fact of --top-k."""
    names = git("ls-tree", "-r", "--name-only", commit, "llmrun", "native").splitlines()
    names = [name for name in names if name.endswith(_STATING) and "/vendor/" not in name and "/test_" not in name]
    return [name for name in names if states_top_k(git("show", f"{commit}:{name}"))]


def is_record(node: ast.ClassDef) -> bool:
    """Return whether a class is a dataclass or a named tuple."""
    marks = [*node.decorator_list, *node.bases]
    names = {getattr(mark.func if isinstance(mark, ast.Call) else mark, "id", "") for mark in marks}
    return bool(names & _RECORD)


def is_number(value: ast.expr) -> bool:
    """Return whether an expression is a number, or computed from one."""
    if isinstance(value, ast.Constant):
        return isinstance(value.value, (int, float)) and not isinstance(value.value, bool)
    if isinstance(value, ast.BinOp):
        return is_number(value.left) or is_number(value.right)
    return isinstance(value, ast.UnaryOp) and is_number(value.operand)


def constants(tree: ast.Module) -> Iterator[str]:
    """Yield the names of a module's numeric constants."""
    for node in tree.body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            names = {name.id: value for name, value in pairs if isinstance(name, ast.Name)}
            yield from (name for name, value in names.items() if name.isupper() and is_number(value))


def inner_imports(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the imports inside functions."""
    for function in ast.walk(tree):
        if isinstance(function, _FUNCTIONS):
            yield from (node for node in ast.walk(function) if isinstance(node, (ast.Import, ast.ImportFrom)))


def ways_to_draft(tree: ast.Module) -> set[str]:
    """Return the names of methods that return drafts."""
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef))
    methods = (node for each in classes for node in each.body if isinstance(node, ast.FunctionDef))
    return {node.name for node in methods} & _DRAFTING


def files_of_measurements(tree: ast.Module) -> int:
    """Return the number of a module's constants with the name of such a file."""
    named = (node for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant))
    names = [target.id for node in named for target in node.targets if isinstance(target, ast.Name)]
    return sum(name.endswith("_FILE") and name != _NOT_MEASURED for name in names)


def figures(commit: str) -> dict[str, int]:
    """Return each figure of a commit by its name."""
    found: dict[str, int] = {}
    for folder in FOLDERS:
        texts = sources(commit, folder)
        found[f"{folder}/ files"] = len(texts)
        found[f"{folder}/ lines"] = sum(text.count("\n") for text in texts.values())
        if folder != "llmrun":
            continue
        runner = {name: text for name, text in texts.items() if not name.startswith(LABORATORY)}
        found["runner files"] = len(runner)
        found["runner lines"] = sum(text.count("\n") for text in runner.values())
        trees = {name: ast.parse(text) for name, text in texts.items()}
        nodes = [node for tree in trees.values() for node in ast.walk(tree)]
        modules = {name: text for name, text in texts.items() if not name.endswith("__init__.py")}
        records = {
            name: sum(isinstance(node, ast.ClassDef) and is_record(node) for node in ast.walk(tree))
            for name, tree in trees.items()
        }
        found["records"] = sum(records.values())
        found["records of the runner"] = sum(records[name] for name in runner)
        counts = {name: len(list(constants(tree))) for name, tree in trees.items()}
        found["constants"] = sum(counts.values())
        found["constants of the runner"] = sum(counts[name] for name in runner)
        found["constants in engine/core"] = sum(count for name, count in counts.items() if name.startswith(CORE))
        drafting = [tree for name, tree in trees.items() if name.startswith(_SOURCES_OF_DRAFTS)]
        found["ways to draft"] = len(set[str]().union(*map(ways_to_draft, drafting)))
        measuring = [tree for name, tree in trees.items() if name.startswith(_MEASURING)]
        found["files of measurements"] = sum(map(files_of_measurements, measuring))
        found["functions"] = sum(isinstance(node, _FUNCTIONS) for node in nodes)
        found["imports inside functions"] = len({id(node) for tree in trees.values() for node in inner_imports(tree)})
        found["modules under 40 lines"] = sum(text.count("\n") < 40 for text in modules.values())
    stated = places(commit)
    for folder in ("llmrun", "native"):
        found[f"{folder}/ files that state top_k"] = sum(name.startswith(folder) for name in stated)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commits", nargs="*", default=["HEAD"])
    commits = parser.parse_args().commits
    columns = [figures(commit) for commit in commits]
    print(f"{'':<32}", *(f"{commit[:12]:>12}" for commit in commits))
    for name in columns[0]:
        print(f"{name:<32}", *(f"{column[name]:>12,}" for column in columns))


if __name__ == "__main__":
    main()
