"""Speed of a model on this machine, with its uncertainty and its distance from the machine's limit.

What `llmrun bench` computes; nothing here prints.
"""
