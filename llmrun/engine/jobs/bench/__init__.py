"""Measures prefill, decode and chats of a model that is loaded for it."""
