"""Commands with real engines, in this process."""

from support.commands import no_presets, own_engines, random_qwen

__all__ = ["no_presets", "own_engines", "random_qwen"]
