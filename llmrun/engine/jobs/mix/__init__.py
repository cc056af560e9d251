"""Measures what each tensor loses by each type, so that a mix to a size can be chosen."""
