"""Markdown of the page: the HTML that its rules make of a text, without a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

from llmrun.server.page.files import FOLDER

NODE = shutil.which("node")
ASK = """
let rules;
globalThis.trustedTypes = { createPolicy: (name, given) => (rules = given) };
await import("./static/markdown.js");
console.log(JSON.stringify(JSON.parse(process.argv[2]).map((text) => rules.createHTML(text, {}))));
"""

pytestmark = pytest.mark.skipif(NODE is None, reason="needs node")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    shutil.copytree(FOLDER, folder / "static")
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "ask.js").write_text(ASK)
    return folder


def rendered(folder: Path, *texts: str) -> list[str]:
    words = [str(NODE), str(folder / "ask.js"), json.dumps(texts)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
    return list(json.loads(done.stdout))


FORMULAS = {
    "It costs $5 and $6.": 0,
    "It costs $5, not 10$.": 0,
    "Euler: $e^{i\\pi}=-1$.": 1,
    "With $x$-values, ($y$), _$z$_ and 变量$x$的值.": 4,
    "Half of $2x$ and $10^5$": 2,
    "$HOME/bin:$PATH": 0,
    "$A,$B and US$C$ too": 0,
    "${A}/${B} and $(a)/$(b)": 0,
    "$(x)$ is one": 1,
}


def test_dollars_of_shells_and_prices_are_no_formulas(folder: Path) -> None:
    found = [html.count('class="formula') for html in rendered(folder, *FORMULAS)]
    assert dict(zip(FORMULAS, found, strict=True)) == FORMULAS


A, B = "https://example.org/a", "https://example.org/b"
DEFINITIONS = {  # a text, what is shown of it, and the addresses of its links
    f'Sources:\n\n[1]: {A}\n[2]: <{B}> "B"\n\nEnd.': (f'Sources:\n[1]: {A}\n[2]: {B} "B"\nEnd.', [A, B]),
    "[Alice]: hello\n\n[Bob]: hi": ("[Alice]: hello\n[Bob]: hi", []),
    f"See [this][1].\n\n[1]: {A}": (f"See this.\n[1]: {A}", [A, A]),
    f"> so\n>\n> - [^1]:\n>   {A}": (f"so\n[^1]:\n{A}", [A]),
    "[1]: javascript:alert(1)": ("[1]: javascript:alert(1)", []),
}


def test_every_word_of_a_definition_is_shown(folder: Path) -> None:
    for (shown, links), html in zip(DEFINITIONS.values(), rendered(folder, *DEFINITIONS), strict=True):
        text = unescape(re.sub("<[^>]*>", "", html))
        assert re.sub(r"\n+", "\n", text.strip()) == shown
        assert re.findall('href="([^"]*)"', html) == links


def test_definitions_that_follow_each_other_are_one_paragraph(folder: Path) -> None:
    (html,) = rendered(folder, f"Sources:\n\n[1]: {A}\n[2]: {B}\n\n[3]: {A}\nEnd.")
    assert html.count("<p>") == 4
