"""The engine process: tokens, templates, weights, KV cache and sampling. Only this process imports it."""
