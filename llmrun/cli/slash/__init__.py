"""Slash commands of a chat, one module a subject; commands.py lists all."""
