"""The line at which a chat is typed."""
