"""Bytes from the hub or a mirror into a file that is whole, or is not there."""
