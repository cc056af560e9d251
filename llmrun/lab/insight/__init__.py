"""Explanations of inference: tokens, merges, watermarks, and the engine's view of one answer."""
