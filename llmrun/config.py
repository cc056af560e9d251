"""Where things are kept and what the environment asks for, as one frozen Settings.

Owns environment variables and directories; must not know models or the network.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DEFAULT_ENDPOINT = "https://huggingface.co"


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment says.

    Attributes:
        hub_cache: the standard Hugging Face cache, shared with other tools.
        endpoint: of the hub, without a slash at the end.
        offline: never use the network.
        debug: show tracebacks.
    """

    hub_cache: Path
    endpoint: str
    offline: bool
    debug: bool

    @property
    def state_dir(self) -> Path:
        """Where what the user did is kept: input history, saved chats. LLMRUN_HOME moves it."""
        home = os.environ.get("LLMRUN_HOME")
        if home:
            return Path(home).expanduser()
        from platformdirs import user_data_path

        return user_data_path("llmrun", appauthor=False)


def load_settings(environment: Mapping[str, str] | None = None) -> Settings:
    """Read the environment.

    HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME, HF_ENDPOINT and HF_HUB_OFFLINE mean what they mean to huggingface_hub;
    LLMRUN_DEBUG=1 is --debug.
    """
    env = os.environ if environment is None else environment
    if env.get("HF_HUB_CACHE"):
        cache = Path(env["HF_HUB_CACHE"])
    elif env.get("HF_HOME"):
        cache = Path(env["HF_HOME"], "hub")
    else:
        cache = Path(env.get("XDG_CACHE_HOME") or "~/.cache", "huggingface", "hub")
    return Settings(
        hub_cache=cache.expanduser().absolute(),
        endpoint=(env.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/"),
        offline=_truth(env, "HF_HUB_OFFLINE") or _truth(env, "TRANSFORMERS_OFFLINE"),
        debug=_truth(env, "LLMRUN_DEBUG"),
    )


def _truth(env: Mapping[str, str], name: str) -> bool:
    return env.get(name, "").strip().upper() in {"1", "ON", "YES", "TRUE"}
