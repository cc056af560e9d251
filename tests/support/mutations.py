"""Texts with small random damage."""

from __future__ import annotations

import random

MUTATIONS = 2_000


def mutations(texts: list[str], seed: int) -> list[str]:
    """Good texts with something cut out, put in, doubled or exchanged."""
    choose = random.Random(seed)
    pieces = [
        *'()[]{}"*+?|.:,#\\/-<>!%',
        "::=",
        "root",
        "$ref",
        '"#"',
        "null",
        "-1",
        "1e9",
        "{0,99999}",
        "\n",
        "\0",
        "ü",
        "\ud800",
    ]
    found = []
    for number in range(MUTATIONS):
        text = texts[number % len(texts)]
        for _ in range(choose.randint(1, 4)):
            start = choose.randrange(len(text) + 1)
            end = min(len(text), start + choose.choice([0, 0, 1, 1, 2, 10]))
            middle = choose.choice([choose.choice(pieces), text[start:end] * choose.randint(0, 3), text[: start // 4]])
            text = text[:start] + middle + text[end:]
        found.append(text)
    return found
