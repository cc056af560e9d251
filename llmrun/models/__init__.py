"""Model names, headers and files on disk. Opens no weights."""
