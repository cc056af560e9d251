"""Runs in the engine process: tokens, templates, weights, KV cache, sampling. Imported by nobody else."""
