"""The commands of the laboratory, one file a command group, imported when they are called."""
