"""Every sentence that an error has, in one list: goldens/sentences.txt.

A test that only wants to know which error it was asks for its class or code, not for these words.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import llmrun

VALUE = "…"


def in_words(node: ast.expr | None) -> str:
    """An argument as a text; what is known only when the error is raised is an ellipsis."""
    match node:
        case None:
            return ""
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(map(in_words, parts))
        case ast.FormattedValue(value=value):
            return in_words(value)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return in_words(left) + in_words(right)
        case ast.IfExp(body=body, orelse=other) if (choice := (in_words(body), in_words(other))) != (VALUE, VALUE):
            return f"({' / '.join(choice)})"
        case _:
            return VALUE


def error_classes(trees: list[ast.Module]) -> set[str]:
    """Names of LlmrunError and of every class below it."""
    bases = {
        node.name: {ast.unparse(base) for base in node.bases}
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = {"LlmrunError"}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return found


def sentences() -> Iterator[str]:
    """`class: what | why | hint` of each place that makes an error."""
    paths = Path(llmrun.__file__).parent.rglob("*.py")
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in paths]
    classes = error_classes(trees)
    for call in (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if isinstance(call.func, ast.Name) and call.func.id in classes:
            given = {"what": next(iter(call.args), None), **{word.arg: word.value for word in call.keywords}}
            texts = [in_words(given.get(name)) for name in ("what", "why", "hint")]
            yield f"{call.func.id}: {' | '.join(texts).rstrip(' |')}"


def test_the_sentences_of_errors_are_those_listed(golden: Callable[[str, str], None]) -> None:
    found = sorted(set(sentences()))
    assert len(found) > 500, "the search finds something"
    assert not [line for line in found if line.partition(" | ")[0].endswith(".")], "what happened has no full stop"
    golden("sentences.txt", "\n".join(found) + "\n")
