"""The numbers by which the engine decides."""

from __future__ import annotations

import re
from pathlib import Path

from llmrun.engine.core import policy
from llmrun.engine.core.policy import Policy


def test_each_number_has_its_reason_and_decides_something() -> None:
    path = Path(policy.__file__)
    reasons = dict(re.findall(r"^    (\w+): (?:int|float) = [^#\n]+  # (.+)$", path.read_text(), re.MULTILINE))
    assert [*reasons] == [*Policy._fields], "each has a comment with its unit and reason"
    code = "".join(each.read_text() for each in path.parent.glob("*.py"))
    unused = [name for name in Policy._fields if not re.search(rf"(self|policy|POLICY)\.{name}\b", code)]
    assert not unused
