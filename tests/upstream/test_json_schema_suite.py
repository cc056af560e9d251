"""JSON Schema's own test suite (draft 2020-12): what is enforced is enforced exactly, and the rest is refused by name.

JSON_SCHEMA_SUITE is its folder, `json` in the source package of jsonschema:
`pip download --no-binary jsonschema --no-deps jsonschema`.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.schema_answers import follows, of_rules, of_schema

from llmrun.engine.constraint.matcher import check_rules
from llmrun.errors import BadGrammarError
from llmrun.grammar.loosen import enforceable

SUITE = os.environ.get("JSON_SCHEMA_SUITE", "")

pytestmark = [
    pytest.mark.upstream,
    pytest.mark.skipif(not SUITE, reason="needs JSON_SCHEMA_SUITE, the folder of JSON Schema's test suite"),
]

MOST_REFUSED = 0.25  # of the schemas; most of these refer to other documents or to $dynamicAnchor, or allow nothing
LEAST_VALID = 0.93  # of the valid values; the others have another order of properties, or more of them than are listed


def cases() -> list[tuple[str, dict[str, Any]]]:
    files = sorted((Path(SUITE) / "tests/draft2020-12").glob("*.json"))
    return [(file.stem, case) for file in files for case in json.loads(file.read_text())]


def test_what_is_taken_is_enforced_exactly(capsys: pytest.CaptureFixture[str]) -> None:
    counts, refused = Counter[str](), []
    for name, case in cases():
        counts["schemas"] += 1
        try:
            constraint = of_schema(case["schema"])
        except BadGrammarError as error:
            refused.append(f"{name}: {case['description']}: {error}")
            continue
        counts["taken"] += 1
        for test in case["tests"]:
            kind = "valid" if test["valid"] else "invalid"
            counts[kind] += 1
            if follows(constraint, test["data"]):
                counts[f"{kind}, accepted"] += 1
                assert test["valid"], (name, case["description"], test["description"], test["data"])
    with capsys.disabled():
        print("", *refused, dict(counts), sep="\n")
    assert len(refused) <= MOST_REFUSED * counts["schemas"]
    assert counts["valid, accepted"] >= LEAST_VALID * counts["valid"]


def test_what_is_left_out_of_a_tool_excludes_nothing_that_was_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    """Each schema as that of a tool's parameter: none is refused, and loosening never makes it stricter."""
    counts = Counter[str]()
    for _, case in cases():
        if isinstance(case["schema"], bool):
            continue
        rules, left_out = enforceable(json.dumps(case["schema"]), check_rules)
        counts["schemas"] += 1
        counts["whole"] += not left_out
        counts["lost"] += () in left_out
        if not left_out:
            continue
        constraint = of_rules(rules)
        valid = [test["data"] for test in case["tests"] if test["valid"]]
        counts["valid of the loosened"] += len(valid)
        counts["valid of the loosened, accepted"] += sum(follows(constraint, value) for value in valid)
    with capsys.disabled():
        print("", dict(counts), sep="\n")
    assert counts["lost"] <= 0.05 * counts["schemas"]
    assert counts["valid of the loosened, accepted"] >= LEAST_VALID * counts["valid of the loosened"]
