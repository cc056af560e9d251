"""Directories and the environment's settings, as one frozen Settings."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmrun.errors import UsageError
from llmrun.system import user_path

DEFAULT_ENDPOINT = "https://huggingface.co"
DEFAULT_STATES_BYTES = 4_000_000_000
MEASURED_FILE = "measured.json"
"""In Settings.state_dir: all that was measured on this machine, and the results of `llmrun tune`."""
LOADS_OTHERWISE = "loads_otherwise"
"""Marks what was measured there if a model's weights may be loaded in another way because of it."""
FORMER_TUNE, FORMER_VARIANTS = "tune.json", "faster_variants.json"
"""Beside it, of earlier versions: what is in it now. They are read until it is written."""
FORMER_FILES = (FORMER_TUNE, FORMER_VARIANTS, "no_gpu")
"""Of earlier versions: removed when it is written."""
LAST_MODEL_FILE = "last_model"
"""Beside it: the name of the model that answered last."""

_TRUE, _FALSE = {"1", "ON", "YES", "TRUE"}, {"", "0", "OFF", "NO", "FALSE"}
_MOST_DIGITS = 18  # of a number of bytes, which crosses to the engine in 64 bits


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings from the environment."""

    hub_cache: Path  # the standard Hugging Face cache, shared with other tools
    endpoint: str  # of the hub, without a slash at the end
    offline: bool  # never use the network
    debug: bool  # show tracebacks
    states_bytes: int = DEFAULT_STATES_BYTES  # maximum size of the saved KV states; 0 saves none

    @property
    def states_dir(self) -> Path:
        """Folder of saved KV states, a cache. LLMRUN_HOME moves it."""
        home = os.environ.get("LLMRUN_HOME")
        if home:
            return user_path(home) / "kv"
        from platformdirs import user_cache_path

        return user_cache_path("llmrun", appauthor=False) / "kv"

    @property
    def state_dir(self) -> Path:
        """Folder of the user's data: input history, saved chats. LLMRUN_HOME moves it."""
        home = os.environ.get("LLMRUN_HOME")
        if home:
            return user_path(home)
        from platformdirs import user_data_path

        return user_data_path("llmrun", appauthor=False)


def may_load_otherwise(folder: Path) -> bool:
    """Return whether something measured may change how some model's weights are loaded. Quick: every start asks.

    Args:
        folder: Settings.state_dir.
    """
    with suppress(OSError):
        if LOADS_OTHERWISE.encode() in (folder / MEASURED_FILE).read_bytes():
            return True
    return any((folder / name).exists() for name in (FORMER_TUNE, FORMER_VARIANTS))


def load_settings(environment: Mapping[str, str] | None = None) -> Settings:
    """Read the environment.

    HF_HUB_CACHE, HUGGINGFACE_HUB_CACHE, HF_HOME, XDG_CACHE_HOME, HF_ENDPOINT, HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE
    mean the same as for huggingface_hub, whose import takes a twentieth of a second; LLMRUN_DEBUG=1 is --debug;
    LLMRUN_KV_BYTES is states_bytes.

    Raises:
        UsageError: the value of one of our variables is invalid.
    """
    env = os.environ if environment is None else environment
    home = env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE") or Path(home, "hub")
    return Settings(
        hub_cache=Path(os.path.expandvars(user_path(str(cache)))).absolute(),
        endpoint=_endpoint(env),
        offline=_truth(env, "HF_HUB_OFFLINE" if env.get("HF_HUB_OFFLINE") else "TRANSFORMERS_OFFLINE"),
        debug=_switch(env, "LLMRUN_DEBUG"),
        states_bytes=_n_bytes(env, "LLMRUN_KV_BYTES", DEFAULT_STATES_BYTES),
    )


def config_file() -> Path:
    """Return the user's settings file: LLMRUN_CONFIG, else config.toml.

    It is in LLMRUN_HOME, which moves all that llmrun keeps but the models; without that variable, in the folder llmrun
    in XDG_CONFIG_HOME or ~/.config.
    """
    folder = Path(os.environ.get("LLMRUN_HOME") or Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config", "llmrun"))
    return Path(os.environ.get("LLMRUN_CONFIG") or folder / "config.toml").expanduser().absolute()


def model_aliases() -> dict[str, str]:
    """Return the model of each alias in the settings file; none if it is damaged, which commands report.

    models/registry.py needs them below the commands, which own all other settings.
    """
    try:
        presets = {name: preset for name, preset in settings_data()["models"].items() if isinstance(preset, dict)}
        return {preset["alias"]: name for name, preset in presets.items() if "alias" in preset}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def has_notes() -> bool:
    """Return whether the setting `notes` is on: LLMRUN_NOTES, or that of the settings file; not if it is damaged."""
    try:
        found = os.environ.get("LLMRUN_NOTES", "").strip() or settings_data()["notes"]
        return found is True or found in ("true", "on")
    except (OSError, ValueError, KeyError):
        return False


def model_folders() -> list[Path]:
    """Return the folders of models.folders: of LLMRUN_FOLDERS, or of the settings file; none if they are invalid."""
    try:
        text = os.environ.get("LLMRUN_FOLDERS", "").strip()
        found = texts_of(text) if text else settings_data()["models"]["folders"]
        return [user_path(name) for name in ([found] if isinstance(found, str) else found)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError):
        return []


def settings_data() -> dict[str, Any]:
    """Return the settings file as it is. Raises OSError or ValueError."""
    return read_toml(config_file().read_text(encoding="utf-8"))


def texts_of(text: str) -> Any:
    """Return what is in TOML's array, or a list of the only text. Raises ValueError."""
    return read_toml(f"texts = {text}")["texts"] if text.startswith("[") else [text]


def read_toml(text: str) -> dict[str, Any]:
    """Parse TOML. Raises ValueError."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

    found: dict[str, Any] = tomllib.loads(text)
    return found


def ca_file() -> str | None:
    """Return the file or folder of certificates to trust instead of the system's; None is the system's.

    The variables are those of OpenSSL, requests and curl.
    """
    names = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


def _truth(env: Mapping[str, str], name: str) -> bool:
    return env.get(name, "").strip().upper() in _TRUE


def _switch(env: Mapping[str, str], name: str) -> bool:
    if env.get(name, "").strip().upper() in _TRUE | _FALSE:
        return _truth(env, name)
    raise UsageError(f"invalid {name}={env[name]}", why="it is a switch", hint=f"{name}=1 or {name}=0")


def _endpoint(env: Mapping[str, str]) -> str:
    text = (env.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).strip().rstrip("/")
    if not text.startswith(("http://", "https://")):
        hint = f"e.g. HF_ENDPOINT=https://{text.rpartition('://')[2]}"
        raise UsageError(f"invalid HF_ENDPOINT={text}", why="it is a URL, with http:// or https://", hint=hint)
    return text


def _n_bytes(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "").strip()
    if not text:
        return default
    if text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS:
        return int(text)
    raise UsageError(f"invalid {name}={env[name]}", why="it is a number of bytes", hint=f"e.g. {name}={default}")
