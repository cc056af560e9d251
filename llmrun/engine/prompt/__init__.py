"""From messages to a prompt: chat templates and thinking."""
