"""Prompts for the calibration text that a model writes for its own importance matrix.

Data only. The prompts cover the uses of a model; they are short, so that nearly all of the text is the model's own.
Neighbours differ, because a short text uses only the first ones.
"""

from __future__ import annotations

QUESTIONS = (
    "Explain how a suspension bridge carries its load.",
    "Write a Python function that merges two sorted lists, with a docstring and an example.",
    "Write a short dialogue between a customer and a baker.",
    "Solve step by step: a train leaves at 9:40 and travels 210 km at 84 km/h. When does it arrive?",
    "List ten things to pack for a hiking trip, one line each.",
    "Explique brièvement comment fonctionne la photosynthèse.",
    "Write the opening scene of a mystery novel set in a small harbour town.",
    "What is the difference between TCP and UDP? Give a table.",
    "Schreibe eine höfliche E-Mail, in der ein Termin verschoben wird.",
    "Give a JSON object that describes a book with title, authors, year, and tags.",
    "Who was Marie Curie, and why is she remembered?",
    "Translate into Spanish: The library is open until eight, except on Sundays.",
    "Write a poem of eight lines about the first snow.",
    "My laptop gets hot and slow. What should I check?",
    "Summarize the causes of the First World War in five bullet points.",
    "用中文简单介绍一下长城的历史。",
    "Write a SQL query that finds the three customers with the highest total orders, and explain it.",
    "Describe the taste of a mango to somebody who never ate one.",
    "Is it better to rent or to buy a home? Discuss both sides.",
    "Напиши короткий рассказ о старом маяке.",
    "Write a product description for a wooden desk lamp.",
    "What happens in the body during a fever?",
    "Prove that the sum of two even numbers is even.",
    "Give me a recipe for vegetable soup, with quantities.",
)
"""For models with a chat template."""

OPENINGS = (
    "The river rises in the mountains of",
    "#include <stdio.h>\n\nint main(void) {\n",
    "Chapter 1\n\nIt was late in the evening when",
    "In this paper we study",
    "import os\nimport sys\n\n\ndef main():\n",
    "The 1974 season was the club's",
    "Breaking news: the government announced today that",
    "Q: What is the capital of Australia?\nA:",
    "La ville de",
    '{"name": "example", "version": "1.0", "items": [',
    "She was born in 1902 in",
    "<!DOCTYPE html>\n<html>\n<head>\n<title>",
    "Der Begriff",
    "Dear Sir or Madam,\n\nI am writing to",
    "The song was written by",
    "# Installation\n\nTo install the package,",
    "According to the report, the number of",
    "function parse(input) {\n",
    "Theorem. Let",
    "El sistema solar",
    "The species is found in",
    '"I don\'t think so," he said.',
    "Ingredients:\n- 2 cups of",
    "The battle began on the morning of",
)
"""Plain text, for every model."""
