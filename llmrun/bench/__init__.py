"""How fast a model runs here, how sure that is, and how far it is from what the machine could do.

What `llmrun bench` computes; nothing here prints.
"""
