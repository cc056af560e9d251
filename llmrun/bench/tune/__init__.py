"""Tuning: the search for the fastest engine settings for a model on this machine."""
