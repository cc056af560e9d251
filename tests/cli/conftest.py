"""Commands with real engines, in this process."""

from support.commands import own_engines, random_qwen

__all__ = ["own_engines", "random_qwen"]
