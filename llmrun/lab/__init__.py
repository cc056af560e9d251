"""The laboratory: measuring, tuning, quantizing, converting and explaining models. Nothing outside imports it."""
