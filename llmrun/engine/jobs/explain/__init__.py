"""Watches a model compute an answer again, so that what it did can be shown."""
