"""The files on this disk: found, listed, brought in, removed and cleaned up."""
