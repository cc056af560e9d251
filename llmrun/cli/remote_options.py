"""A far server in place of an engine here, for `run` and `chat`: what goes along with --at, and what does not.

Owns what is refused and in which words; must not know how a server is asked.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from llmrun.errors import ModelNotFoundError, UsageError
from llmrun.planning.plan import LOAD_OPTIONS, LoadPreferences
from llmrun.protocol.settings import SETTINGS

if TYPE_CHECKING:
    from llmrun.cli.options import LoadingOptions
    from llmrun.protocol.messages import AnswerRequest
    from llmrun.remote.model import RemoteModel
    from llmrun.remote.server import Server
    from llmrun.ui.terminal.output import Output

ANY_MODEL = "default"
"""In place of a model's name: the only one that the server has."""
_LOADS = "the server has loaded its model in its own way"
_KEEPS = "a server gives neither its logits nor its KV cache away"
_KEPT = frozenset({"--beams", "--record", "--prompt-cache"})


def refuse_with_remote(loading: LoadingOptions, others: Mapping[str, bool] = {}) -> None:
    """See that a server, if one answers, is not asked for what only an engine on this machine can do.

    Args:
        others: flag that is not one of loading's -> whether it was given.

    Raises:
        UsageError: something is.
    """
    if loading.server is None:
        return
    wishes, unset = loading.wishes, LoadPreferences()
    loads = {
        "--ctx": wishes.n_ctx is not None,
        **{SETTINGS[name].option: getattr(wishes, name) != getattr(unset, name) for name in LOAD_OPTIONS},
        "--exact": wishes.exact,
        "--speculate": loading.speculate is not None,
        "--draft": loading.draft is not None,
        "--mmproj": loading.projector is not None,
        "--lora": bool(loading.adapters),
        "--rpc": bool(wishes.workers),
        "--verbose": loading.verbose,
    }
    kept = {flag: is_given for flag, is_given in others.items() if flag in _KEPT}
    flag = next((flag for flag, is_given in {**loads, **kept}.items() if is_given), None)
    if flag is not None:
        why = _LOADS if flag in loads else _KEEPS
        hint = f"leave out {flag}; for a model of this machine, leave out --at and unset LLMRUN_SERVER"
        raise UsageError(f"--at and {flag} exclude each other", why=why, hint=hint)


@contextmanager
def open_at(
    output: Output, server: Server, name: str, asked: AnswerRequest, flags: Mapping[str, Any], *, sees: bool = False
) -> Iterator[RemoteModel]:
    """A server's model, its connections closed afterwards.

    Args:
        name: as the server lists it; "" or ANY_MODEL is the only one that there is.
        asked: what answers are to be like, as far as that is known.
        flags: sampling parameters that were typed.
        sees: it has to look at pictures.

    Raises:
        UsageError: the server can't be told something that is asked for.
        LlmrunError: it can't be reached, or does not have the model.
    """
    from llmrun.cli.remote import served_model
    from llmrun.models.location import require_projector
    from llmrun.remote.model import RemoteModel

    try:
        served = served_model(output, server, None if name in ("", ANY_MODEL) else name)
    except ModelNotFoundError:
        if len(name.split()) > 1:
            hint = f"llmrun run --at {server.url} {ANY_MODEL} {shlex.quote(name)}"
            raise UsageError(f"{name!r} stands where the model's name does", hint=hint) from None
        raise
    with closing(RemoteModel(server, served, output.note)) as model:
        model.sampling(flags)
        model.require(asked)
        if sees:
            require_projector(model.name, model.sees, server.host)
        yield model
