"""Perplexity, KL divergence and answers in long contexts."""
