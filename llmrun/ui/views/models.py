"""The tables of `llmrun list`, `search`, `verify` and `gc`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrun.models.store.installed import InstalledModel
from llmrun.planning.catalogue import USUAL_CONTEXT, rank
from llmrun.protocol.sizes import readable_size, rough_size
from llmrun.ui.terminal.format import ago, context_name, rough
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.tables import Column, show_table

if TYPE_CHECKING:
    from llmrun.models.fingerprint import VerificationResult
    from llmrun.models.hub import Match
    from llmrun.models.store.removal import Leftover

ESTIMATED = "~: estimated by processor time, because other programs use this machine; measured once it is quiet"
_NARROW = 80  # cells; a narrower terminal gets only what matters most of the catalogue


def show_installed(output: Output, models: Sequence[InstalledModel], ages: Mapping[Path, float]) -> None:
    """Print the models on this disk.

    Args:
        ages: seconds since llmrun last used a model, by its path; a model that was never used has none.
    """
    columns = (
        Column("NAME", style="bold"),
        Column("SIZE", right=True),
        Column("QUANT"),
        Column("USED"),
        Column("WHERE", style="dim"),
    )
    rows = [
        (
            model.name,
            readable_size(model.size),
            model.quant,
            ago(ages[model.path]) if model.path in ages else "-",
            f"{model.place} ({added})" if (added := _added(model)) else model.place,
        )
        for model in models
    ]
    show_table(output, columns, rows)


def _added(model: InstalledModel) -> str:
    """Return what Ollama has for a model besides the weights, and its template, which most models have."""
    return ", ".join(dict.fromkeys(layer.kind for layer in model.layers if layer.kind != "template"))


def show_matches(output: Output, matches: Sequence[Match]) -> None:
    """Print the repositories of the hub that match a search."""
    columns = (
        Column("REPOSITORY", style="bold"),
        Column("DOWNLOADS", right=True),
        Column("LIKES", right=True),
        Column("UPDATED"),
        Column("ACCESS", style="dim"),
    )
    rows = [
        (
            match.repository,
            f"{match.downloads:,}",
            f"{match.likes:,}",
            match.updated,
            "terms to accept" if match.gated else "",
        )
        for match in matches
    ]
    show_table(output, columns, rows)


def show_verified(output: Output, results: Sequence[VerificationResult]) -> None:
    """Print models with the state of their checksums."""
    rows = [(result.model.name, readable_size(result.model.size), result.state, result.text) for result in results]
    show_table(output, _file_columns("NAME", "STATE"), rows)


def show_leftovers(output: Output, leftovers: Sequence[Leftover], root: Path) -> None:
    """Print files of no use.

    Args:
        root: folder of the store, in which most of them are.
    """
    rows = [
        (
            str(leftover.path.relative_to(root) if root in leftover.path.parents else leftover.path),
            readable_size(leftover.n_bytes),
            "keep" if leftover.keep else "remove",
            f"{leftover.why}; {leftover.keep}" if leftover.keep else leftover.why,
        )
        for leftover in leftovers
    ]
    show_table(output, _file_columns("PATH", ""), rows)


def _file_columns(name: str, verdict: str) -> tuple[Column, ...]:
    return Column(name, style="bold"), Column("SIZE", right=True), Column(verdict), Column("WHY", style="dim")


def show_catalogue(output: Output, models: Sequence[Mapping[str, Any]]) -> None:
    """Print the curated names: what fits first, the largest first of these; quants, licences and agents where there is
    room.

    Args:
        models: facts of each, as in `llmrun list --all --json`.
    """
    columns = [
        Column("NAME", style="bold"),
        Column("PARAMETERS", right=True),
        Column("SIZE", right=True),
        Column(f"MEMORY {context_name(USUAL_CONTEXT)}", right=True),
        Column("TOKENS/S", right=True),
        Column("HERE", style="green"),
        Column("QUANT", is_dispensable=True),
        Column("AGENTS", style="yellow", is_dispensable=True),
        Column("LICENCE", is_dispensable=True),
    ]
    shown = len(columns) - 3 * (0 < output.columns() < _NARROW)
    show_table(output, columns[:shown], [_catalogue_row(facts)[:shown] for facts in sorted(models, key=rank)])


def _catalogue_row(facts: Mapping[str, Any]) -> list[str]:
    n_bytes, memory, speed, is_exact = (facts[name] for name in ("n_bytes", "memory_bytes", "decode_rate", "is_exact"))
    return [
        facts["alias"],
        re.sub(r"(.*), (\S+) \w+", r"\2 of \1", facts["parameters"]),  # 30B, 3B active
        readable_size(n_bytes) if n_bytes else "",
        size_of(memory, is_exact=is_exact is not False) if memory else "",
        "" if not speed else rough(speed) if is_exact is False or facts["is_rate_estimated"] else f"{speed:,.1f}",
        _here(facts),
        facts["quant"],
        "" if facts["agents"] else "too weak",
        facts["licence"],
    ]


def _here(facts: Mapping[str, Any]) -> str:
    if facts["fits"] is False:
        return "too large"
    state = "yes" if facts["installed"] else "fits" if facts["fits"] else ""
    return "not now" if state and facts["fits_now"] is False else state


def size_of(n_bytes: int, *, is_exact: bool) -> str:
    """Return a size, with two digits if it is estimated."""
    return readable_size(n_bytes) if is_exact else f"~{rough_size(n_bytes)}"
