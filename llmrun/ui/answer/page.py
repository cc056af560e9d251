"""The rendering of an answer's text: the reasoning, then the answer as Markdown or plain.

Output is never taken back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from llmrun.protocol.messages import AnswerPart, Started, TextDelta
from llmrun.ui.terminal.cells import paint
from llmrun.ui.terminal.format import seconds
from llmrun.ui.terminal.sanitize import Sanitizer

if TYPE_CHECKING:
    from llmrun.ui.answer.markdown import Markdown
    from llmrun.ui.answer.reasoning import ReasoningRows

# Display of reasoning: "on" all of it, "fold" the beginning, "hide" only the duration.
Think = Literal["on", "fold", "hide"]

FOLD_LINES = 3
_TINT = "32"  # one of the terminal's own colours, which suits its background

_ASCII = str.maketrans({"·": "-", "…": "...", "│": "|"})


class Raw:
    """Text without rendering; the terminal wraps it."""

    held = ""

    def feed(self, text: str, columns: int) -> str:
        return text

    def flush(self, columns: int) -> str:
        """Return "": nothing is held back."""
        return ""


class Page:
    """The text of one answer.

    Args:
        clock: monotonic seconds.
        think: display of the reasoning.
        markdown: render Markdown.
        styled: the terminal may show bold, dim and colour.
        unicode: it may show characters other than ASCII.
        tints: colour drafted tokens, and render no Markdown, so that each token stays visible.
        shades: colour all tokens by their probability, also without Markdown.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        think: Think = "fold",
        markdown: bool = False,
        styled: bool = True,
        unicode: bool = True,
        tints: bool = False,
        shades: bool = False,
    ) -> None:
        self._clock = clock
        self._tints, self._shades = tints and styled, shades and styled
        markdown = markdown and not (tints or shades)
        self._markdown, self._styled, self._unicode = markdown, styled, unicode
        self._sanitizer = Sanitizer()
        self._think: Think = think
        self._is_reasoning = False
        self.has_calls = False  # a complete tool call: the answer continues after its result
        self._reasoning: ReasoningRows | None = None
        self._body: Markdown | Raw | None = None
        self._waiting: list[AnswerPart] = []
        self._began: float | None = None  # time of the first reasoning
        self._tokens = 0  # of the reasoning
        self._gap = ""  # between reasoning and answer

    def begin(self, started: Started) -> None:
        """Prepare for the answer to an accepted prompt."""
        self._is_reasoning = started.thinking
        self.prepare()

    def add(self, delta: TextDelta) -> None:
        starts_reasoning = any(part.kind == "reasoning" for part in delta.answer_parts)
        if self._is_reasoning or starts_reasoning:
            self._tokens += delta.tokens
        for part in delta.answer_parts:
            self._is_reasoning = part.kind == "reasoning"
            self.has_calls = self.has_calls or part.kind == "call_end"
            if part.kind == "reasoning_end":
                self._end_reasoning()
            elif part.kind in ("text", "reasoning"):
                self._follow(part, delta)

    def _follow(self, part: AnswerPart, delta: TextDelta) -> None:
        text = self._sanitizer.feed(part.text)
        if part.kind == "reasoning" and self._began is None and text.strip():
            self._began = self._clock()
        styled = self._styled_pieces(text, delta) if part.kind == "text" else [(text, "")]
        self._waiting += [AnswerPart(part.kind, paint(piece, style) if style else piece) for piece, style in styled]

    def _styled_pieces(self, text: str, delta: TextDelta) -> list[tuple[str, str]]:
        """Return the text in pieces of one style each."""
        if not (self._shades and delta.logprobs):
            return [(text, _TINT if delta.drafted and self._tints else "")]
        from llmrun.ui.answer.surprise import shaded_pieces  # only with --logprobs

        tokens, before = list(delta.logprobs), len(delta.text.encode()) - len(text.encode())
        while len(tokens) > 1 and 0 < len(tokens[0].bytes) <= before:  # reasoning and tags
            before -= len(tokens.pop(0).bytes)
        return shaded_pieces(text, tokens)

    @property
    def waiting(self) -> bool:
        """Whether take() has text to return."""
        return bool(self._waiting)

    def take(self, columns: int, *, last: bool = False) -> str:
        """Return the new text that can be shown; with last, all of the rest."""
        if last:
            self._waiting.append(AnswerPart("reasoning" if self._is_reasoning else "text", self._sanitizer.flush()))
            self._end_reasoning()
        parts, self._waiting = self._waiting, []
        out = []
        for part in parts:
            if part.kind == "reasoning":
                out.append(self._rows().feed(part.text, columns))
            elif part.kind == "reasoning_end":
                out.append(self._rows().end(columns, part.text))
                self._gap = "\n"
            else:
                out += [self._gap, self.prepare().feed(part.text, columns)]
                self._gap = ""
        if last:
            out.append(self._body.flush(columns) if self._body else "")
        return "".join(out)

    def fields(self) -> list[str]:
        """Return fields for the live line: the length of the reasoning, or of an incomplete table."""
        if self._is_reasoning and self._began is not None:
            return [
                self._encodable(
                    f"thinking… {self._tokens:,} tokens, {seconds(self._clock() - self._began, brief=True)}"
                )
            ]
        held = self._body.held if self._body else ""
        return [held] if held else []

    def _end_reasoning(self) -> None:
        if self._began is not None:
            took = seconds(self._clock() - self._began, brief=True)
            note = self._encodable(f"thought for {took}, {self._tokens:,} tokens")
            self._waiting.append(AnswerPart("reasoning_end", note))
            self._began, self._tokens = None, 0

    def _rows(self) -> ReasoningRows:
        if self._reasoning is None:
            from llmrun.ui.answer.reasoning import ReasoningRows  # few models reason

            lines = {"on": None, "fold": FOLD_LINES, "hide": 0}[self._think]
            self._reasoning = ReasoningRows(lines, styled=self._styled, unicode=self._unicode)
        return self._reasoning

    def prepare(self) -> Markdown | Raw:
        """Import and return the renderer, best while the engine is busy."""
        if self._body is None:
            if self._markdown:
                from llmrun.ui.answer.markdown import Markdown  # most commands show no answer

                self._body = Markdown(styled=self._styled, unicode=self._unicode)
            else:
                self._body = Raw()
        return self._body

    def _encodable(self, text: str) -> str:
        return text if self._unicode else in_ascii(text)


def in_ascii(text: str) -> str:
    """Return our own words for a terminal that shows only ASCII."""
    return text.translate(_ASCII)
