"""The front's knowledge of models: names, headers, files on disk. Opens no weights."""
