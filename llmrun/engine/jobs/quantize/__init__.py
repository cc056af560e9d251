"""Writes a quantized file with llama.cpp's own functions."""
