"""Translations between what clients send and llmrun's own records. Pure: no I/O, no clock, no engine."""
