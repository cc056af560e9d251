"""An answer as it streams: Markdown, the live line, the keyboard."""
