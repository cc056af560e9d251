"""Which settings of the engine are the fastest for a model on this machine: found out by trying, and remembered.

`remembered()` and `choose()` are what a plan asks; `search.search()` finds out, measure.py tries. Nothing here prints.
"""

from __future__ import annotations

from llmrun.planning.settings import EngineSettings
from llmrun.planning.tuned import Profile, Tuned, choose, forget, remember, remembered

__all__ = ["EngineSettings", "Profile", "Tuned", "choose", "forget", "remember", "remembered"]
