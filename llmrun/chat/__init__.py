"""Conversations: turns, requests to the model, truncation, reasoning, attachments, recorded answers and saved chats."""
