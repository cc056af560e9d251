"""Collects an importance matrix: how strongly each column of a weight is used."""
