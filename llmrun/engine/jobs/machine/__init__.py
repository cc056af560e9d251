"""Measures what this machine and this build of llama.cpp can do, without a model."""
