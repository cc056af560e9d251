"""The display of an answer while it is generated: Markdown, reasoning, live figures, several answers side by side."""
