"""`llmrun quantize`: from a model to a smaller file of it, with what is lost said in figures."""
