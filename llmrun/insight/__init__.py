"""Inference made visible: how text becomes tokens, and what a model does with them."""
