"""Everything that crosses the pipe between front and engine."""
