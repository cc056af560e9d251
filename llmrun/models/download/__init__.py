"""Verified downloads: a file arrives whole or not at all."""
