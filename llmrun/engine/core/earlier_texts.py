"""The texts of earlier requests, of which later answers repeat parts: templates of rows, an agent's files, a retry."""

from __future__ import annotations

from collections.abc import Sequence

from llmrun._native import SuffixAutomaton

MOST_TOKENS = 32_768  # of a user: at most 130 bytes each
MOST_USERS = 4


class EarlierTexts:
    """Prompts and answers of one model, by user; the oldest are dropped, so all take at most 26 MB of memory."""

    def __init__(self) -> None:
        self._texts: dict[str, SuffixAutomaton] = {}  # by salt, least recently used first

    def of(self, salt: str) -> SuffixAutomaton:
        """Return a user's texts, for SuffixAutomaton.follow().

        Args:
            salt: see sequence.Extras.
        """
        self._texts[salt] = texts = self._texts.pop(salt, None) or SuffixAutomaton()
        if len(self._texts) > MOST_USERS:
            del self._texts[next(iter(self._texts))]
        return texts

    def add(self, salt: str, tokens: Sequence[int], n_known: int) -> None:
        """Add a prompt and its answer.

        Args:
            n_known: first tokens that are also those of an earlier request.
        """
        texts = self.of(salt)
        texts.extend(tokens[n_known if len(texts) else 0 :][-MOST_TOKENS // 2 :])
        texts.end_text()
        if len(texts) > MOST_TOKENS:
            texts.keep_last(MOST_TOKENS // 2)
