"""Grammars as token masks over the vocabulary."""
