"""GGUF files: their header, what it must not say, and what follows from it. Front and engine may import it."""
