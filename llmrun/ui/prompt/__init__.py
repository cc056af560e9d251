"""The chat's prompt: keys, history, completion, the editor."""
