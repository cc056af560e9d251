"""What can be typed in a chat besides messages, one module a subject; commands.py lists all."""
