"""Coding agents and the settings that make each one use an llmrun server. Pure data and text.

No agent's own configuration file is written: settings are environment variables and arguments, or files in a temporary
folder that an argument or a variable names. Nothing has to be restored afterwards, however a session ends.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from llmrun.protocol.codec import load_json

_CODEX_MODELS = ("debug", "models", "--bundled")
_CODEX_CATALOG = "codex-models.json"
_SMALL_SHARE = 16  # for agents that keep more tokens free for their summary: Claude Code and Qwen Code
_QWEN_RESERVE = 33_000  # tokens: 20,000 for the summary, and 13,000 more
_CLAUDE_RESERVE = 13_000 - 1500  # tokens that it keeps free, less those that ask for a summary
_WORKFLOW_WINDOW = 131_072  # tokens
_RESULT_SHARE = 8  # of the window, that one result of a tool may take
_MOST_RESULT = 25_000  # tokens, Claude Code's own limit
_MOST_OUTPUT, _CHARACTERS_A_TOKEN = 30_000, 3  # Claude Code's own limit of a command's output, in characters
_SHORTEST_ANSWER = 4096  # tokens that are enough to write a file
_PI_WINDOW = 49_152  # tokens
PLACEHOLDER_KEY = "llmrun"
"""For agents that insist on a key where the server has none."""


class Endpoint(NamedTuple):
    """A server as an agent sees it."""

    address: str  # without /v1, e.g. "http://127.0.0.1:8080"
    key: str  # "" is none
    model: str
    n_ctx: int  # context window in tokens; 0 is unknown
    sees: bool = False  # the model takes images
    thinks: bool = False  # it can reason before the answer

    @property
    def openai_url(self) -> str:
        return f"{self.address}/v1"


class AgentSettings(NamedTuple):
    """Settings of one session of an agent."""

    environment: Mapping[str, str]
    arguments: tuple[str, ...] = ()  # before the user's own
    files: Mapping[str, str] = {}  # name in the temporary folder -> content


class Needs(NamedTuple):
    """Tokens of a context window that sessions of an agent took; 0 is not measured."""

    version: str = ""  # of the agent that was measured
    first_prompt: int = 0  # of a session: the system prompt and the tools
    smallest_window: int = 0  # in which a session that had to be summarized twice went on


class Agent(NamedTuple):
    """A program that works with a model by calling tools."""

    title: str
    executable: str
    install: str  # command that installs it
    # For a server, the path of the temporary folder, and what the command below prints.
    settings: Callable[[Endpoint, str, str], AgentSettings]
    needs: Needs = Needs()
    describe: tuple[str, ...] = ()  # arguments with which the agent prints what it knows of models

    def can_live_in(self, n_ctx: int) -> bool | None:
        """Return whether a session goes on in a context window of this many tokens; None if that is unknown."""
        return n_ctx >= self.needs.smallest_window if n_ctx and self.needs.smallest_window else None


def _claude(server: Endpoint, folder: str, described: str) -> AgentSettings:
    tiers = ("OPUS", "SONNET", "HAIKU", "FABLE")
    result = min(server.n_ctx // _RESULT_SHARE, _MOST_RESULT)  # with its own limits, two of them fill a window of 64k
    window = {
        # It summarizes when the longest answer and its reserve are left, and then sends the last five files again, of
        # up to 5,000 tokens each. So it is told a window in which one more result, and the summary, still fit by then.
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(server.n_ctx + _CLAUDE_RESERVE - result),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(_longest_answer(server, share=_SMALL_SHARE)),
        "CLAUDE_CODE_FILE_READ_MAX_OUTPUT_TOKENS": str(result),
        "MAX_MCP_OUTPUT_TOKENS": str(result),
        "BASH_MAX_OUTPUT_LENGTH": str(min(result * _CHARACTERS_A_TOKEN, _MOST_OUTPUT)),
    }
    if server.n_ctx < _WORKFLOW_WINDOW:  # the tool takes 1,500 tokens of each prompt, and starts dozens of agents
        window["CLAUDE_CODE_DISABLE_WORKFLOWS"] = "1"
    return AgentSettings({
        "ANTHROPIC_BASE_URL": server.address,
        "ANTHROPIC_AUTH_TOKEN": server.key or PLACEHOLDER_KEY,
        "ANTHROPIC_API_KEY": "",  # of an account: it would be asked about at the start
        "ANTHROPIC_MODEL": server.model,
        "ANTHROPIC_SMALL_FAST_MODEL": server.model,
        "CLAUDE_CODE_SUBAGENT_MODEL": server.model,
        **{f"ANTHROPIC_DEFAULT_{tier}_MODEL": server.model for tier in tiers},
        **(window if server.n_ctx else {}),
        # Both change the beginning of each prompt, so no prefix could be reused.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_TOTAL_TOKENS_REMINDER": "off",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    })  # fmt: skip


def _codex(server: Endpoint, folder: str, described: str) -> AgentSettings:
    provider = "model_providers.llmrun"
    # By itself it compacts at nine tenths, and the next result of a tool, of 10,000 tokens at most, is too long.
    limits = {
        "model_context_window": server.n_ctx,
        "model_auto_compact_token_limit": server.n_ctx - _longest_answer(server),
    }
    values = {
        "model": server.model,
        "model_provider": "llmrun",
        f"{provider}.name": "llmrun",
        f"{provider}.base_url": server.openai_url,
        f"{provider}.wire_api": "responses",
        f"{provider}.env_key": "LLMRUN_AGENT_KEY",
        **(limits if server.n_ctx else {}),
    }
    catalog, files = _codex_catalog(server, described), dict[str, str]()
    if catalog is not None:
        files[_CODEX_CATALOG], values["model_catalog_json"] = json.dumps(catalog), f"{folder}/{_CODEX_CATALOG}"
    # Values are TOML; JSON strings and numbers are, too.
    arguments = [word for name, value in values.items() for word in ("-c", f"{name}={json.dumps(value)}")]
    return AgentSettings({"LLMRUN_AGENT_KEY": server.key or PLACEHOLDER_KEY}, tuple(arguments), files)


def _codex_catalog(server: Endpoint, described: str) -> dict[str, Any] | None:
    """Return a catalog with the server's model, so that Codex knows its window, modalities and tools.

    An entry has Codex's own prompt, and fields that differ between versions: it is made from an entry of Codex's own
    catalog, of a model that gets plain tools. None without one.
    """
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        entries = [each for each in load_json(described)["models"] if not each.get("tool_mode")]
        if not entries or not server.n_ctx:
            return None
        efforts = ("low", "medium", "high") if server.thinks else ()
        entry = {
            "slug": server.model,
            "display_name": server.model,
            "description": "A local model.",
            "context_window": server.n_ctx,
            "max_context_window": server.n_ctx,
            "input_modalities": ["text", "image"] if server.sees else ["text"],
            "supported_reasoning_levels": [{"effort": effort, "description": effort} for effort in efforts],
            "default_reasoning_level": efforts[1] if efforts else None,
            "apply_patch_tool_type": "freeform",
            "supports_search_tool": False,
            "support_verbosity": False,
            "default_verbosity": None,
            "service_tiers": [],
            "additional_speed_tiers": [],
            "upgrade": None,
        }
        return {"models": [{**entries[0], **{key: value for key, value in entry.items() if key in entries[0]}}]}
    return None


def _opencode(server: Endpoint, folder: str, described: str) -> AgentSettings:
    name = f"llmrun/{server.model}"
    limits = {"limit": {"context": server.n_ctx, "output": _longest_answer(server)}} if server.n_ctx else {}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "llmrun",
        "options": {"baseURL": server.openai_url, "apiKey": server.key or PLACEHOLDER_KEY},
        "models": {server.model: {"name": server.model, **limits}},
    }
    config = {"provider": {"llmrun": provider}, "model": name, "small_model": name}
    return AgentSettings({"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def _qwen(server: Endpoint, folder: str, described: str) -> AgentSettings:
    environment = {
        "OPENAI_BASE_URL": server.openai_url,
        "OPENAI_API_KEY": server.key or PLACEHOLDER_KEY,
        "OPENAI_MODEL": server.model,
    }
    arguments = ("--auth-type", "openai")
    if not server.n_ctx:
        return AgentSettings(environment, arguments)
    file = "qwen-defaults.json"  # the user's own settings come before it
    window = {"QWEN_CODE_SYSTEM_DEFAULTS_PATH": f"{folder}/{file}"}
    # It summarizes when 33,000 tokens are left, half of a window of 64k, and then quotes up to five files. So it is
    # told a window in which three quarters of the real one are in use by then.
    told = max(server.n_ctx, server.n_ctx * 3 // 4 + _QWEN_RESERVE)
    answer = {"QWEN_CODE_MAX_OUTPUT_TOKENS": str(_longest_answer(server, share=_SMALL_SHARE))}
    defaults = {"model": {"generationConfig": {"contextWindowSize": told}}}
    return AgentSettings({**environment, **window, **answer}, arguments, {file: json.dumps(defaults)})


def _aider(server: Endpoint, folder: str, described: str) -> AgentSettings:
    name = f"openai/{server.model}"
    environment = {"OPENAI_API_BASE": server.openai_url, "OPENAI_API_KEY": server.key or PLACEHOLDER_KEY}
    arguments: tuple[str, ...] = ("--model", name, "--weak-model", name, "--no-show-model-warnings")
    if not server.n_ctx:
        return AgentSettings(environment, arguments)
    facts = {
        "litellm_provider": "openai",
        "mode": "chat",
        "max_input_tokens": server.n_ctx,
        "max_output_tokens": _longest_answer(server),
        "input_cost_per_token": 0,
        "output_cost_per_token": 0,
    }
    metadata = "model-metadata.json"
    # By itself it keeps a sixteenth of the window of earlier edits, and then asks for a summary after each further one,
    # which it throws away (0.86.2), because the edit was added to its list in the meantime.
    history = ("--max-chat-history-tokens", str(server.n_ctx // 4))
    arguments = (*arguments, "--model-metadata-file", f"{folder}/{metadata}", *history)
    return AgentSettings(environment, arguments, {metadata: json.dumps({name: facts})})


def _crush(server: Endpoint, folder: str, described: str) -> AgentSettings:
    limits = {"context_window": server.n_ctx, "default_max_tokens": _longest_answer(server)} if server.n_ctx else {}
    provider = {
        "name": "llmrun",
        "type": "openai-compat",
        "base_url": server.openai_url,
        "api_key": "$LLMRUN_AGENT_KEY",
        "models": [{"id": server.model, "name": server.model, **limits}],
    }
    chosen = {"provider": "llmrun", "model": server.model}
    config = {"providers": {"llmrun": provider}, "models": {"large": chosen, "small": chosen}}
    # Here Crush keeps the models that the user chooses, which come before those of CRUSH_GLOBAL_CONFIG.
    environment = {"CRUSH_GLOBAL_DATA": folder, "LLMRUN_AGENT_KEY": server.key or PLACEHOLDER_KEY}
    return AgentSettings(environment, files={"crush.json": json.dumps(config)})


def _continue(server: Endpoint, folder: str, described: str) -> AgentSettings:
    # It summarizes when twice the longest answer is left.
    limits = {"contextLength": server.n_ctx, "maxTokens": _longest_answer(server, share=8)} if server.n_ctx else {}
    model = {
        "name": server.model,
        "provider": "openai",
        "model": server.model,
        "apiBase": server.openai_url,
        "apiKey": "${{ secrets.LLMRUN_AGENT_KEY }}",
        "roles": ["chat"],
        "capabilities": ["tool_use"],
        "defaultCompletionOptions": limits,
    }
    file = "continue.yaml"  # JSON is YAML
    config = {"name": "llmrun", "version": "1.0.0", "schema": "v1", "models": [model]}
    environment = {"LLMRUN_AGENT_KEY": server.key or PLACEHOLDER_KEY}
    return AgentSettings(environment, ("--config", f"{folder}/{file}"), {file: json.dumps(config)})


def _pi(server: Endpoint, folder: str, described: str) -> AgentSettings:
    # It summarizes when 16,384 tokens are left, and keeps the last 20,000. In a window below their sum it would do so
    # at each step. So it is told a larger one, and summarizes when the server refuses a prompt as too long.
    limits = {"contextWindow": max(server.n_ctx, _PI_WINDOW), "maxTokens": _longest_answer(server)}
    model = {
        "id": server.model,
        "name": server.model,
        "reasoning": server.thinks,
        "input": ["text", "image"] if server.sees else ["text"],
        "cost": dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0),
        **(limits if server.n_ctx else {}),
    }
    provider = {
        "name": "llmrun",
        "baseUrl": server.openai_url,
        "apiKey": "LLMRUN_AGENT_KEY",  # the variable's name
        "api": "openai-completions",
        "models": [model],
    }
    # An extension, because PI_CODING_AGENT_DIR would hide the user's own settings and sessions.
    extension, file = f"export default (pi) => pi.registerProvider('llmrun', {json.dumps(provider)});\n", "llmrun.js"
    arguments = ("--extension", f"{folder}/{file}", "--provider", "llmrun", "--model", server.model)
    return AgentSettings({"LLMRUN_AGENT_KEY": server.key or PLACEHOLDER_KEY}, arguments, {file: extension})


def _cline(server: Endpoint, folder: str, described: str) -> AgentSettings:
    provider, file = "openai-compatible", "cline.json"
    limits = {"contextWindow": server.n_ctx, "maxTokens": _longest_answer(server)} if server.n_ctx else {}
    settings = {"provider": provider, "model": server.model, "baseUrl": server.openai_url, **limits}
    entry = {"settings": settings, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    config = {"version": 1, "lastUsedProvider": provider, "providers": {provider: entry}}
    environment = {
        "CLINE_PROVIDER_SETTINGS_PATH": f"{folder}/{file}",
        "OPENAI_API_KEY": server.key or PLACEHOLDER_KEY,
    }
    arguments = ("--provider", provider, "--model", server.model)
    return AgentSettings(environment, arguments, {file: json.dumps(config)})


def _copilot(server: Endpoint, folder: str, described: str) -> AgentSettings:
    answer = _longest_answer(server, share=8)  # it summarizes at three quarters of what that leaves
    limits = {
        "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": str(server.n_ctx - answer),
        "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS": str(answer),
    }
    return AgentSettings({
        "COPILOT_PROVIDER_TYPE": "openai",
        "COPILOT_PROVIDER_BASE_URL": server.openai_url,
        "COPILOT_PROVIDER_API_KEY": server.key or PLACEHOLDER_KEY,
        "COPILOT_MODEL": server.model,
        "COPILOT_OFFLINE": "true",  # asks nothing of GitHub
        **(limits if server.n_ctx else {}),
    })  # fmt: skip


def _goose(server: Endpoint, folder: str, described: str) -> AgentSettings:
    limits = {"GOOSE_CONTEXT_LIMIT": str(server.n_ctx), "GOOSE_MAX_TOKENS": str(_longest_answer(server))}
    return AgentSettings({
        "GOOSE_PROVIDER": "openai",
        "GOOSE_MODEL": server.model,
        "OPENAI_HOST": server.address,
        "OPENAI_API_KEY": server.key or PLACEHOLDER_KEY,
        **(limits if server.n_ctx else {}),
    })  # fmt: skip


def _longest_answer(server: Endpoint, share: int = 4) -> int:
    """Return a share of the window: agents subtract the longest answer from it, the rest is for the conversation."""
    return min(max(server.n_ctx // share, _SHORTEST_ANSWER), server.n_ctx // 4, 32_000)


# Measured by tests/clients/windows.py, in windows of 32,768, 49,152, 65,536 and 131,072 tokens.
AGENTS = {
    "claude": Agent(
        "Claude Code", "claude", "npm install -g @anthropic-ai/claude-code", _claude, Needs("2.1.332", 11_100, 49_152)
    ),
    "codex": Agent(
        "Codex", "codex", "npm install -g @openai/codex", _codex, Needs("0.171.0", 10_700, 32_768), _CODEX_MODELS
    ),
    "opencode": Agent("opencode", "opencode", "npm install -g opencode-ai", _opencode, Needs("1.18.33", 7_800, 32_768)),
    "qwen": Agent("Qwen Code", "qwen", "npm install -g @qwen-code/qwen-code", _qwen, Needs("0.24.4", 18_800, 49_152)),
    "continue": Agent("Continue", "cn", "npm install -g @continuedev/cli", _continue, Needs("1.5.47", 2_200, 32_768)),
    "pi": Agent("pi", "pi", "npm install -g @mariozechner/pi-coding-agent", _pi, Needs("0.73.1", 1_600, 32_768)),
    "aider": Agent("aider", "aider", "uv tool install aider-chat", _aider, Needs("0.86.2", 700)),
    "crush": Agent("Crush", "crush", "npm install -g @charmland/crush", _crush),
    "cline": Agent("Cline", "cline", "npm install -g cline", _cline, Needs("3.0.65", 5_800, 65_536)),
    "copilot": Agent(
        "Copilot CLI", "copilot", "npm install -g @github/copilot", _copilot, Needs("1.0.102", 12_400, 32_768)
    ),
    "goose": Agent("goose", "goose", "brew install block-goose-cli", _goose),
}
