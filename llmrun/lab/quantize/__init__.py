"""`llmrun quantize`: smaller files of a model, and the measurement of the loss."""
