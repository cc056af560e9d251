"""Saved chats: every finished turn in one SQLite file, from which a conversation goes on where it was left."""
