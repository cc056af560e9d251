"""Grammars as masks over the vocabulary: what an answer may go on with."""
