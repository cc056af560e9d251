"""One model, one name, one size, one count and one prediction, wherever the commands, the page and the API show it."""

from __future__ import annotations

import json
import re
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.installed import SECONDS, Installed
from support.real_server import RealServer

from llmrun.ui.terminal.format import rough

MODEL = "smollm2"
NOWHERE = {"HF_ENDPOINT": "http://127.0.0.1:9"}
_SIZE = re.compile(r"~?[\d,.]+ [kMG]B\b")
_COUNT = re.compile(r"\b\d+(?:\.\d+)? ?[MB]\b(?! ?[/a-z])")
_UNIT = re.compile(r"\bt/s\b|\btok/s\b|\btokens per second\b")


def cells(text: str, row: str) -> dict[str, str]:
    """The cells of a table's row by their headings; cells and headings are two blanks apart."""
    lines = text.splitlines()
    heading = next(line for line in lines if re.search(r"\b(SIZE|FILE)\b", line))
    line = next(line for line in lines[lines.index(heading) + 1 :] if row in line.split())
    found = {}
    for match in re.finditer(r"\S+(?: \S+)*", heading):
        # A cell shares columns with its heading: numbers are aligned right, words left.
        touching = [
            cell
            for cell in re.finditer(r"\S+(?: \S+)*", line)
            if cell.start() < match.end() and match.start() < cell.end()
        ]
        found[match[0]] = touching[0][0] if touching else ""
    return found


class Seen:
    """What was shown of the model: kind of a fact -> where -> the words."""

    def __init__(self) -> None:
        self.facts: dict[str, dict[str, str]] = defaultdict(dict)
        self.texts: dict[str, str] = {}

    def add(self, where: str, **facts: object) -> None:
        for kind, value in facts.items():
            self.facts[kind][where] = str(value)


@pytest.fixture
def seen(command: str, pulled: None, tmp_path: Path) -> Iterator[Seen]:
    found = Seen()
    installed = Installed(command, tmp_path)

    def run(*words: str) -> str:
        done = installed.run(*words, env=NOWHERE)
        assert done.returncode == 0, done.stderr.decode()
        found.texts[" ".join(words)] = done.stdout.decode() + done.stderr.decode()
        return done.stdout.decode()

    predicted = cells(run("plan", MODEL), "Q4_1")
    for words, row in ((("list",), MODEL), (("list", "--all"), MODEL), (("plan",), MODEL)):
        text = run(*words)
        if row not in text.split():
            continue  # a fast machine is proposed larger models
        table = cells(text, row)
        where = " ".join(words)
        found.add(where, name=table.get("NAME") or table["MODEL"], size=table.get("SIZE") or table["FILE"])
        headings = {"count": "PARAMETERS", "quant": "QUANT", "memory": "MEMORY 4k"}
        found.add(where, **{kind: table[each] for kind, each in headings.items() if each in table})
        if "TOKENS/S" in table:
            found.add(where, speed=f"{table['TOKENS/S']} tokens/s")
    found.add("plan MODEL", size=predicted["FILE"], quant=predicted["QUANT"], memory=predicted["4k CTX"])
    found.add("plan MODEL", speed=predicted["DECODE"].partition(" →")[0] + " tokens/s")
    shown = dict(re.findall(r"^(\S+)  +(.*)$", run("show", MODEL), re.MULTILINE))
    found.add("show", name=shown["name"], size=shown["size"], quant=shown["quant"].partition(",")[0])
    found.add("show", count=shown["parameters"].partition(" ")[0])
    details = run("bench", MODEL, "-p", "8", "-n", "4", "-r", "1") + found.texts[f"bench {MODEL} -p 8 -n 4 -r 1"]
    kind, size = re.findall(r"llama (\S+) Q4_1, ([\d.]+ MB)", details)[0]
    found.add("bench", size=size, count=kind)
    run("run", MODEL, "Hi", "--stats", "--max-tokens", "4")
    run("doctor")

    server = RealServer(command, tmp_path, "--grace", "0s")
    try:
        for where, facts in served(server):
            found.add(where, **facts)
        yield found
    finally:
        server.end()


def served(server: RealServer) -> Iterator[tuple[str, dict[str, Any]]]:
    """What the API and the page say of the model."""

    def ask(path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(server.address + path, data, {"content-type": "application/json"})
        with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
            return json.loads(answer.read())

    (listed,) = [each for each in ask("/api/tags")["models"] if each["name"] == f"{MODEL}:latest"]
    details = listed["details"]
    facts = {"count": details["parameter_size"], "quant": details["quantization_level"]}
    yield "/api/tags", {**facts, "bytes": listed["size"], "name": listed["name"].removesuffix(":latest")}
    details = ask("/api/show", {"model": MODEL})["details"]
    yield "/api/show", {"count": details["parameter_size"], "quant": details["quantization_level"]}
    (model,) = [each["id"] for each in ask("/v1/models")["data"] if each["id"] == MODEL]
    yield "/v1/models", {"name": model}
    yield "page", {"speed": f"{ask('/ui/speed', {'model': MODEL, 'tokens': 0})['decode']:,.1f} tokens/s"}


def test_no_screen_contradicts_another(seen: Seen, model_path: Path) -> None:
    n_bytes = model_path.stat().st_size
    assert seen.facts.pop("bytes") == {"/api/tags": str(n_bytes)}
    assert {"list", "list --all", "show", "bench", "plan MODEL"} <= set(seen.facts["size"])
    assert {"list --all", "plan MODEL", "page"} <= set(seen.facts["speed"])
    for where, speed in seen.facts["speed"].items():  # estimated or measured, by how busy the machine was
        seen.add(where, speed=rough(float(speed.lstrip("~").partition(" ")[0].replace(",", ""))))
    for kind, places in seen.facts.items():
        assert len({value.lstrip("~") for value in places.values()}) == 1, (kind, places)
    (size,), (count,) = (set(seen.facts[kind].values()) for kind in ("size", "count"))
    for where, text in seen.texts.items():
        lines = [line for line in text.splitlines() if MODEL in line.split() or where not in ("list --all", "plan")]
        words = "\n".join(line for line in lines if not line.startswith("tensors"))
        near = [each for each in _SIZE.findall(words) if _is_near(each, n_bytes)]
        assert set(near) <= {size}, (where, near)
        counts = [each for each in _COUNT.findall(words) if each.endswith("M")]
        assert set(counts) <= {count}, (where, counts)
        assert not _UNIT.search(words), where


def _is_near(words: str, n_bytes: int) -> bool:
    """Whether a size may be meant to be that of the file."""
    number, unit = words.lstrip("~").replace(",", "").split()
    size = float(number) * {"kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]
    return abs(size / n_bytes - 1) < 0.03
