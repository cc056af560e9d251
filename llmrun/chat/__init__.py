"""A conversation: its turns, what is asked of the model, truncation, reasoning, attachments, replay and saved chats."""
