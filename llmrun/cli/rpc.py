"""The option --rpc: workers that hold a part of a model's layers."""

from __future__ import annotations

from typing import Annotated

import typer

RpcOption = Annotated[
    str | None,
    typer.Option(
        "--rpc",
        metavar="HOST:PORT,...",
        help="RPC workers that hold a part of the layers; start each with `llmrun worker`.",
        rich_help_panel="Engine",
    ),
]


def workers_of(rpc: str | None) -> tuple[str, ...]:
    """Return the endpoints of --rpc. Raises as read_endpoints()."""
    if rpc is None:
        return ()
    from llmrun.runner.workers import read_endpoints  # few starts have any

    return read_endpoints(rpc)
