"""The context window of a coding agent: what a model gives it on this machine, whether a session goes on in it, and
what to type where it does not. Must not know servers.
"""

from __future__ import annotations

import shlex
import shutil
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from llmrun.cli.agents import AGENTS, Agent
from llmrun.cli.defaults import with_preset
from llmrun.config import load_settings
from llmrun.errors import LlmrunError, OutOfMemoryError, UsageError
from llmrun.gguf.pooling import makes_embeddings
from llmrun.gguf.reader import read_header
from llmrun.models.location import locate
from llmrun.models.store.store import all_models
from llmrun.planning.hardware import this_machine
from llmrun.planning.plan import Plan, make_plan

if TYPE_CHECKING:
    from llmrun.gguf.header import Header
    from llmrun.planning.hardware import Hardware
    from llmrun.planning.preferences import LoadPreferences

COMFORTABLE_WINDOW = 65_536
"""Tokens: agents work below it, but summarize their session often."""
OTHER_MODELS = "llmrun list --all lists other models, and llmrun show MODEL says how long a context each has"
"""What to type where no installed model has a window that is large enough."""
_PARALLEL = (8, 4, 2)  # answers at the same time: an agent, its sub-agents and titles
_STEP = 1024  # tokens
_SMALL_KV = "q8_0"


class ModelWindow(NamedTuple):
    """The window that a model gives an agent on this machine."""

    model: str
    n_ctx: int  # tokens; 0 is unknown
    parallel: int  # answers at the same time
    n_bytes: int = 0  # of the model's file

    @property
    def rank(self) -> tuple[int, int, str]:
        """The largest model with a comfortable window comes last, else the one with the largest window."""
        return min(self.n_ctx, COMFORTABLE_WINDOW), self.n_bytes, self.model


def plan_for_agent(header: Header, hardware: Hardware, preferences: LoadPreferences, name: str = "MODEL") -> Plan:
    """Return the plan of an agent's server: a comfortable window first, or all there is, which its answers share.

    For several users a server divides it instead, see make_plan(). Where memory is left the window
    grows to half of the KV cache; the other half is for sub-agents, so that the conversation is not evicted for them.

    Raises:
        OutOfMemoryError: the model or the preferred context does not fit.
    """
    alone = make_plan(header, hardware, replace(preferences, parallel=1), name=name)
    wanted = alone.load.n_ctx if preferences.n_ctx is not None else min(alone.load.n_ctx, COMFORTABLE_WINDOW)
    for parallel in _PARALLEL:  # some models need a KV cache of a whole window for each answer, so fewer of them
        with suppress(OutOfMemoryError):
            plan = make_plan(header, hardware, replace(preferences, n_ctx=wanted, parallel=parallel))
            half = min(alone.load.n_ctx, plan.load.n_cells // 2) // _STEP * _STEP
            if half > plan.load.n_ctx:
                with suppress(OutOfMemoryError):
                    return make_plan(header, hardware, replace(preferences, n_ctx=half, parallel=parallel))
            return plan
    return alone


def window_of(name: str, preferences: LoadPreferences) -> ModelWindow:
    """Return the window of a model by its name, alias or path; as preferred, or unknown, if it is not on this disk.

    Raises:
        LlmrunError: there is no such model, its file is damaged, or it does not fit.
    """
    path = locate(name, load_settings()).path
    if path is None:
        return ModelWindow(name, preferences.n_ctx or 0, _PARALLEL[0])
    plan = plan_for_agent(read_header(path), this_machine(), preferences, name)
    return ModelWindow(name, plan.load.n_ctx, plan.load.n_seq_max)


def installed_windows(preferences: LoadPreferences) -> list[ModelWindow]:
    """Return the windows of the installed models that generate text and fit, the best one for an agent last."""
    hardware, found = this_machine(), []
    for installed in all_models(load_settings()):
        with suppress(LlmrunError):  # damaged, or too large for this machine
            header = read_header(installed.path)
            if not makes_embeddings(header):
                plan = plan_for_agent(header, hardware, with_preset(installed.name, preferences))
                found.append(ModelWindow(installed.name, plan.load.n_ctx, plan.load.n_seq_max, installed.size))
    return sorted(found, key=lambda each: each.rank)


def describe_window(agent: Agent, n_ctx: int) -> str:
    """Return sentences about the window, whether a long session goes on there, and what was measured of the agent."""
    needs, can_live = agent.needs, agent.can_live_in(n_ctx)
    verdict = {True: ", enough", False: ", too small", None: ""}[can_live]
    text = f"Context window: {f'{n_ctx:,} tokens' if n_ctx else 'unknown'}{verdict}."
    figures = [f"{needs.smallest_window:,} for long sessions"] if needs.smallest_window else []
    figures += [f"about {needs.first_prompt:,} for its first prompt"] if needs.first_prompt else []
    if figures:
        version = f" (measured with {needs.version})" if needs.version else ""
        text += f" {agent.title} needs {', '.join(figures)}{version}."
    if n_ctx and can_live is not False and n_ctx < COMFORTABLE_WINDOW:
        text += f" Below {COMFORTABLE_WINDOW:,} it summarizes often."
    return text


def refusal(name: str, window: ModelWindow, preferences: LoadPreferences, *, way: str = "", at: str = "") -> UsageError:
    """Return the error for an agent that can't live in a window, with commands that lead to one that can.

    Args:
        name: of the agent.
        way: what makes the window of a running server larger; "" where a server is to be started.
        at: option that names that server, where it is a remote one.
    """
    agent, model = AGENTS[name], window.model
    command = f"llmrun launch {name} {shlex.quote(model)}"
    ways = []
    if way:
        ways.append(way)
    else:
        ways += [f"{command}{options}" for options in _larger(agent, model, preferences)]
        others = [each.model for each in installed_windows(preferences) if agent.can_live_in(each.n_ctx)]
        ways += [f"llmrun launch {name} {shlex.quote(others[-1])}"] if others else []
    living = sorted(
        (shutil.which(each.executable) is None, each.needs.first_prompt, other)
        for other, each in AGENTS.items()
        if each.can_live_in(window.n_ctx)
    )
    ways += [f"llmrun launch {living[0][-1]} {shlex.quote(model)}{at}"] if living else []
    if not ways:
        ways.append(OTHER_MODELS)
    needs = agent.needs
    return UsageError(
        f"{agent.title} can't work for long in the context window of {model} here, {window.n_ctx:,} tokens",
        why=f"long sessions need {needs.smallest_window:,}, and about {needs.first_prompt:,} is its first prompt "
        f"(measured with {needs.version})",
        hint=f"{' or '.join(ways)}; --any-window starts it all the same",
    )


def _larger(agent: Agent, model: str, preferences: LoadPreferences) -> list[str]:
    """Return the options with which a model of this disk has a window that the agent can live in."""
    open_ctx = replace(preferences, n_ctx=None)
    small = replace(open_ctx, kv_type_k=_SMALL_KV, kv_type_v=_SMALL_KV)
    tries = [("", open_ctx)] if preferences.n_ctx is not None else []
    tries += [(f" -ctk {_SMALL_KV} -ctv {_SMALL_KV}", small)] if preferences.flash_attention != "off" else []
    for options, each in tries:
        with suppress(LlmrunError):
            if agent.can_live_in(window_of(model, each).n_ctx):
                return [options]
    return []
