"""Which settings of the engine are the fastest for a model on this machine: found by trying. Nothing here prints."""
