"""What an answer's text looks like: the model's thoughts, then the answer as Markdown or as it is.

Owns the order of the two and how thoughts are shown; must not know the terminal or the live line. What it gave out is
never taken back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from llmrun.protocol.messages import AnswerPart, Started, TextDelta
from llmrun.ui.terminal.ansi import paint
from llmrun.ui.terminal.format import seconds
from llmrun.ui.terminal.sanitize import Sanitizer

if TYPE_CHECKING:
    from llmrun.ui.answer.markdown import Markdown
    from llmrun.ui.answer.reasoning import ReasoningRows

# "on" shows thoughts as they come, "fold" their beginning, "hide" only how long they took.
Think = Literal["on", "fold", "hide"]

FOLD_LINES = 3
_TINT = "32"  # one of the terminal's own colours, so that it suits its background

_ASCII = str.maketrans({"·": "-", "…": "...", "│": "|"})


class Raw:
    """The text as it is; the terminal wraps it."""

    held = ""

    def feed(self, text: str, columns: int) -> str:
        """All of it."""
        return text

    def flush(self, columns: int) -> str:
        """Nothing is ever held back."""
        return ""


class Page:
    """One answer.

    Args:
        clock: monotonic seconds.
        think: how they are shown.
        markdown: the answer is Markdown.
        styled: the terminal may show bold, dim and colour.
        unicode: it may show other characters than ASCII.
        tints: drafted tokens are coloured, and the answer is shown as it is, where each token still can be seen.
        shades: so are all tokens, by how likely they were.

    Attributes:
        has_calls: the answer holds a complete tool call, and goes on after its result.
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
        self._is_reasoning = self.has_calls = False
        self._thoughts: ReasoningRows | None = None
        self._body: Markdown | Raw | None = None
        self._waiting: list[AnswerPart] = []
        self._began: float | None = None  # when thoughts came first
        self._tokens = 0  # of the thoughts
        self._gap = ""  # between thoughts and answer

    def begin(self, started: Started) -> None:
        """Prepare for the answer to a prompt that was accepted."""
        self._is_reasoning = started.thinking
        self.prepare()

    def add(self, delta: TextDelta) -> None:
        """Add a piece of the answer."""
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
        """Cut a text into pieces of one style each."""
        if not (self._shades and delta.logprobs):
            return [(text, _TINT if delta.drafted and self._tints else "")]
        from llmrun.ui.answer.surprise import shaded_pieces  # only with --logprobs

        tokens, before = list(delta.logprobs), len(delta.text.encode()) - len(text.encode())
        while len(tokens) > 1 and 0 < len(tokens[0].bytes) <= before:  # reasoning and tags
            before -= len(tokens.pop(0).bytes)
        return shaded_pieces(text, tokens)

    @property
    def waiting(self) -> bool:
        """Whether take() has something to do."""
        return bool(self._waiting)

    def take(self, columns: int, *, last: bool = False) -> str:
        """What can be shown of the text so far, beyond what was taken before; with last, the rest."""
        if last:
            self._waiting.append(AnswerPart("reasoning" if self._is_reasoning else "text", self._sanitizer.flush()))
            self._end_reasoning()
        parts, self._waiting = self._waiting, []
        out = []
        for part in parts:
            if part.kind == "reasoning":
                out.append(self._reasoning_rows().feed(part.text, columns))
            elif part.kind == "reasoning_end":
                out.append(self._reasoning_rows().end(columns, part.text))
                self._gap = "\n"
            else:
                out += [self._gap, self.prepare().feed(part.text, columns)]
                self._gap = ""
        if last:
            out.append(self._body.flush(columns) if self._body else "")
        return "".join(out)

    def fields(self) -> list[str]:
        """What the live line should tell besides speeds: thoughts that go on, a table that is not complete."""
        if self._is_reasoning and self._began is not None:
            return [
                self._words(f"thinking… {self._tokens:,} tokens, {seconds(self._clock() - self._began, brief=True)}")
            ]
        held = self._body.held if self._body else ""
        return [held] if held else []

    def _end_reasoning(self) -> None:
        if self._began is not None:
            took = seconds(self._clock() - self._began, brief=True)
            note = self._words(f"thought for {took}, {self._tokens:,} tokens")
            self._waiting.append(AnswerPart("reasoning_end", note))
            self._began, self._tokens = None, 0

    def _reasoning_rows(self) -> ReasoningRows:
        if self._thoughts is None:
            from llmrun.ui.answer.reasoning import ReasoningRows  # few models think

            lines = {"on": None, "fold": FOLD_LINES, "hide": 0}[self._think]
            self._thoughts = ReasoningRows(lines, styled=self._styled, unicode=self._unicode)
        return self._thoughts

    def prepare(self) -> Markdown | Raw:
        """Load what shows the answer, while the engine is busy with other things. Gives it."""
        if self._body is None:
            if self._markdown:
                from llmrun.ui.answer.markdown import Markdown  # most commands show no answer

                self._body = Markdown(styled=self._styled, unicode=self._unicode)
            else:
                self._body = Raw()
        return self._body

    def _words(self, text: str) -> str:
        return text if self._unicode else in_ascii(text)


def in_ascii(text: str) -> str:
    """Our own words for a terminal that shows nothing else."""
    return text.translate(_ASCII)
