"""Shorthands for saved chats."""

from __future__ import annotations

from llmrun.chat.store.chat import SavedChat
from llmrun.chat.store.turns import Answer, Question


def add_turn(chat: SavedChat, question: Question, answer: Answer) -> None:
    """Save a question and its answer."""
    chat.add_question(question)
    chat.add_answer(answer)
