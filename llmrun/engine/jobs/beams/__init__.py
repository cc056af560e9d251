"""Searches for the likeliest answers, several branches at a time."""
