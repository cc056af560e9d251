"""Markdown on an emulated terminal: what each block looks like, and that nothing written is ever written again."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from support.clock import Clock
from support.effort import loops
from support.screens import Terminal, rows_of

from llmrun.protocol.messages import Started, TextDelta
from llmrun.ui.answer.inline import readable
from llmrun.ui.answer.markdown import MAX_LINE, MAX_TABLE_ROWS, Highlighter, Markdown
from llmrun.ui.answer.page import Page
from llmrun.ui.answer.view import AnswerView
from llmrun.ui.terminal.cells import bare
from llmrun.ui.terminal.sanitize import clean

ANSWER = """\
# Bread

Bread needs **four** things and *time*:

- flour, `500 g` of it, the stronger the better
- water
  1. lukewarm
  2. not hot

| what | grams | why |
|---|--:|---|
| salt | 10 | taste |
| yeast | 7 | it rises |

```python
def bake(minutes):
    return "bread"  # warm
```

> Patience is bitter.

See [the book](https://example.org/b_1).
---
日本語のパンもおいしいです。
"""

AT_80 = """\
Bread

Bread needs four things and time:

• flour, 500 g of it, the stronger the better
• water
  1. lukewarm
  2. not hot

what   grams  why
──────────────────────
salt      10  taste
yeast      7  it rises

── python ──────────────────────────────
def bake(minutes):
    return "bread"  # warm
────────────────────────────────────────

│ Patience is bitter.

See the book (https://example.org/b_1).
────────────────────────────────────────
日本語のパンもおいしいです。"""

AT_20 = """\
Bread

Bread needs four
things and time:

• flour, 500 g of
  it, the stronger
  the better
• water
  1. lukewarm
  2. not hot

what: salt
grams: 10
why: taste
───
what: yeast
grams: 7
why: it rises
───

── python ─────────
def bake(minutes):
    return "bread"  # warm
───────────────────

│ Patience is
│ bitter.

See the book
(https://example.org/b_1).
───────────────────
日本語のパンもおい
しいです。"""


def rendered(text: str, columns: int = 80, *, styled: bool = True, unicode: bool = True) -> str:
    markdown = Markdown(styled=styled, unicode=unicode)
    return markdown.feed(text, columns) + markdown.flush(columns)


def plain(text: str, columns: int = 80) -> list[str]:
    return bare(rendered(text, columns)).splitlines()


# ---- how it looks ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("columns", "expected"), [(80, AT_80), (40, AT_80), (20, AT_20)])
def test_a_whole_answer(columns: int, expected: str) -> None:
    shown = bare(rendered(ANSWER, columns))
    if columns == 40:  # the same but for its lines across and a row that is too long
        expected = expected.replace("─" * 40, "─" * 39).replace("── python " + "─" * 30, "── python " + "─" * 29)
        expected = expected.replace("the stronger the better", "the stronger the\n  better")
    assert shown == expected + "\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("**b** *i* _i_ ***x*** `c` ~~s~~", "\x1b[1mb\x1b[0m \x1b[3mi\x1b[0m \x1b[3mi\x1b[0m \x1b[1;3mx\x1b[0m"
         " \x1b[36mc\x1b[0m \x1b[9ms\x1b[0m"),
        ("**b *i* b**", "\x1b[1mb \x1b[0m\x1b[1;3mi\x1b[0m\x1b[1m b\x1b[0m"),
        ("**b *i***", "\x1b[1mb \x1b[0m\x1b[1;3mi\x1b[0m"),
        ("这是**重点**。", "这是\x1b[1m重点\x1b[0m。"),
        ("# One", "\x1b[1;4mOne\x1b[0m"),
        ("## Two", "\x1b[1mTwo\x1b[0m"),
        ("### Three", "\x1b[1;3mThree\x1b[0m"),
        ("[a](http://b)", "\x1b[4ma\x1b[0m \x1b[2m(http://b)\x1b[0m"),
        ("[http://b](http://b) <http://c>", "\x1b[4mhttp://b\x1b[0m \x1b[4mhttp://c\x1b[0m"),
        ("> q", "\x1b[2m│ \x1b[0mq"),
        ("`` a`b ``", "\x1b[36ma`b\x1b[0m"),
        ("```py\nif x: # y\n```", "\x1b[2m── py " + "─" * 34 + "\x1b[0m\n\x1b[35mif\x1b[0m x: \x1b[2m# y\x1b[0m\n"
         "\x1b[2m" + "─" * 40 + "\x1b[0m"),
    ],
)  # fmt: skip
def test_styles(source: str, expected: str) -> None:
    assert rendered(source) == expected + "\n"


@pytest.mark.parametrize(
    "text",
    [
        "2*3 and 2 * 3 * 4", "snake_case_name and x__init__.py", "a ** b", "*args", "**kwargs", "`open", "~ ~~ ~",
        "$HOME/bin:$PATH", "$A,$B and US$C$ too", "${A}/${B}", "$(a)/$(b)",
        "[x] [y] not (z)", "<b>bold</b> &nosuch;", "1,5 < 2", "a | b", "#tag", "1984.", "C:\\dir\\new",
        r"\frac{x}{y}_{z}", "costs $5 and $10", "!wow", "-1", "+49 30", "a\\",
        "😀 👩\u200d👧 e\u0301", "**" + "too far " * 60 + "**", "“quoted” — dash",
    ],
)  # fmt: skip
def test_text_that_only_looks_like_markup_stays(text: str) -> None:
    assert bare(rendered(text, 1000)) == text + "\n"
    assert "\x1b[1" not in rendered(text, 1000)


@pytest.mark.parametrize(
    ("source", "rows"),
    [
        ("\n\n\na\n\n\n\nb\n\n\n", ["a", "", "b"]),
        ("roses are red\nviolets are blue", ["roses are red", "violets are blue"]),
        ("text\n# Heading\ntext", ["text", "", "Heading", "text"]),
        (r"\*not\* \# \`x\`", ["*not* # `x`"]),
        ("- a\n  - b\n    - c\n      - d\n- e", ["• a", "  ◦ b", "    ▪ c", "      ▪ d", "• e"]),
        ("10. ten\n    - below", ["10. ten", "    ◦ below"]),
        ("1. a\n\n   more\n2. b", ["1. a", "", "   more", "2. b"]),
        ("- [ ] do\n- [x] done", ["• [ ] do", "• [x] done"]),
        ("-\n- x", ["•", "• x"]),
        ("> a\n> > b\n> - c\n>\n> d", ["│ a", "│ │ b", "│ • c", "│", "│ d"]),
        ("> a\nlazy\n\nb", ["│ a", "│ lazy", "", "b"]),
        ("***\n---\n- - -", ["─" * 40] * 3),
        ("Title\n===\ntext", ["Title", "─" * 40, "text"]),
        ("    indented\n    code", ["    indented", "    code"]),
        ("def f(x):\n    if x:\n        return 1\n\n    return 2\nf(3)",
         ["def f(x):", "    if x:", "        return 1", "", "    return 2", "f(3)"]),
        ("1. so\n\n       x = 1\n2. on", ["1. so", "", "       x = 1", "2. on"]),
        ("long " * 13 + "\nflows", ["long " * 13 + "flows"]),
        ("hard  \nbreaks\\\nstay<br>so", ["hard", "breaks", "stay", "so"]),
        ("**bold\nlines** and `code\nlines`", ["bold", "lines and code lines"]),
        ("&lt;b&gt; &amp; &eacute; &#x1b;[2J&#8238;", ["<b> & é �[2J"]),
        ("![a&#13;&#8238;b](c) [d](http://e%1b[2J)", ["ab (c) d (http://e)"]),
        ("<div>\n  *x*\n</div>\n\n*y*", ["<div>", "  *x*", "</div>", "", "y"]),
        ("[a]: http://b\n[c]:\n  /d\n\n[a] [c][a] [e]", ["[a]: http://b", "[c]:", "  /d", "", "[a] [c][a] [e]"]),
        ("[Alice]: hello\n\n[Bob]: *hi*", ["[Alice]: hello", "", "[Bob]: hi"]),
        ("Sources\n[1]: " + "x" * 60 + "\n[^2]: <http://y>\nEnd.",
         ["Sources", "[1]: " + "x" * 60, "[^2]: http://y", "End."]),
        ("- " + "so " * 30 + "\n  [WARN]: over\n  [WARN]", ["• " + ("so " * 26).strip(), "  so so so so",
         "  [WARN]: over", "  [WARN]"]),
        ("[unfinished", ["[unfinished"]),
        ("[unfinished]", ["[unfinished]"]),
        ("[unfinished]:", ["[unfinished]:"]),
        ("\\[\n- x * y\n+ z * w\n\\]\n- item", ["- x * y", "+ z * w", "• item"]),
        ("$$\n# x\n\n# y", ["# x", "", "y"]),
        ("$x$-values, ($y$) or $z$, not US$5$", ["x-values, (y) or z, not US$5$"]),
        ("变量$x^2$的值 _$y^2$_", ["变量x²的值 y²"]),
        (r"\(a_1 \times b^2\), $\frac{a}{b}$ and $$\pi$$; $5 or $10", ["a₁ × b², a/b and π; $5 or $10"]),
        ("```\na\n\n\nb\n```\nc", ["─" * 40, "a", "", "", "b", "─" * 40, "c"]),
        ("```\nnever closed **x**", ["─" * 40, "never closed **x**", "─" * 40]),
        ("~~~\n```\n~~~", ["─" * 40, "```", "─" * 40]),
        ("- ```sh\n  ls\n    -l\n  ```\n- b", ["• ── sh " + "─" * 34, "  ls", "    -l", "  " + "─" * 40, "• b"]),
        ("- a\n  ```\n  x\nout", ["• a", "  " + "─" * 40, "  x", "  " + "─" * 40, "out"]),
        ("> ```\n> x\nout", ["│ " + "─" * 40, "│ x", "│ " + "─" * 40, "out"]),
        ("``` a `b` ```", ["a `b`"]),
        ("####### seven", ["####### seven"]),
        ("#", [""]),
    ],
)  # fmt: skip
def test_blocks(source: str, rows: list[str]) -> None:
    assert plain(source) == rows


def test_hanging_indents_and_words() -> None:
    assert plain("- " + "word " * 6 + "\n  1. " + "word " * 6, 20) == [
        "• word word word", "  word word word", "  1. word word word", "     word word word",
    ]  # fmt: skip
    address = "https://example.org/a/long/address"
    assert plain(f"- see {address} now", 20) == ["• see", f"  {address}", "  now"]
    assert plain("- 日本語。日本語。日本語。", 12) == ["• 日本語。", "  日本語。", "  日本語。"]
    assert plain("> > > > > > > > deep inside", 20) == ["│ │ │ │ deep inside"]


# ---- tables ----------------------------------------------------------------------------------------

TABLE = "| a | long heading |\n|:--|-----|\n| `x\\|y` | 1 \\| 2 |\n| **b** | " + "words " * 8 + "|\n| short |\n"


def test_tables_wrap_in_their_cells_and_become_records_when_there_is_no_room() -> None:
    assert plain(TABLE, 31) == [
        "a      long heading", "─" * 30, "x|y    1 | 2", "b      words words words words",
        "       words words words words", "short",
    ]  # fmt: skip
    assert plain(TABLE, 14) == [
        "a: x|y", "long heading:", "1 | 2", "───", "a: b", "long heading:", *["words words"] * 4, "───",
        "a: short", "───",
    ]  # fmt: skip


def test_no_word_of_a_table_is_broken() -> None:
    words = ["Name of the thing", "Internationalization", "Donaudampfschifffahrtsgesellschaft", "a rather long word"]
    table = "| {} | {} |\n|---|---|\n| {} | {} |\n".format(*words)
    for columns in (40, 44, 60, 80, 120):
        rows = rows_of(rendered(table, columns), columns, 40)
        assert not [word for text in words for word in text.split() if not any(word in row for row in rows)], columns


def test_rows_of_a_paragraph_end_with_newlines_and_have_no_blanks_at_their_ends() -> None:
    for columns in range(12, 40):
        rows = plain("llmrun bench smollm2 --clients 1,2 --json " * 5, columns)
        assert " ".join(rows).split(" ") == ["llmrun", "bench", "smollm2", "--clients", "1,2", "--json"] * 5
        assert all(len(row) < columns for row in rows)


@pytest.mark.parametrize("emoji", ["👩‍👩‍👧", "👩🏽‍💻", "❤️‍🔥", "👍🏽"])
def test_an_emoji_of_several_characters_is_in_one_row(emoji: str) -> None:
    for columns in range(8, 20):
        markdown = Markdown()
        text = f"We all are {emoji} here"
        assert emoji in "".join(markdown.feed(char, columns) for char in text) + markdown.flush(columns), columns


def test_what_begins_like_a_table_is_text() -> None:
    assert plain("| only one line |\n\ntext") == ["| only one line |", "", "text"]
    assert plain("| a |\n| b |\ntext") == ["| a |", "| b |", "text"]
    assert plain("|x| is the absolute value") == ["|x| is the absolute value"]


def test_a_table_is_held_but_not_for_ever() -> None:
    markdown = Markdown()
    out = markdown.feed("| a | b |\n|---|---|\n", 80)
    assert out == markdown.held == ""
    markdown.feed("| 1 | 2 |\n" * 3, 80)
    assert markdown.held == "table of 3 rows"
    shown = bare(markdown.feed("| 1 | 2 |\n" * MAX_TABLE_ROWS, 80))
    assert shown.count("1  2") == MAX_TABLE_ROWS
    assert bare(markdown.flush(80)).count("1  2") == 3


# ---- without colour, without Unicode ---------------------------------------------------------------


def test_without_styles_the_marks_stay_and_nothing_is_escaped() -> None:
    shown = rendered(ANSWER + "\\[\n- x\n\\]\nand $x^2$\n", 60, styled=False, unicode=False)
    assert shown.isascii() is False  # the model's own characters
    assert re.sub("[日本語のパンもおいしいです。]", "", shown).isascii()
    assert "\x1b" not in shown
    assert shown.splitlines()[:6] == [
        "# Bread", "", "Bread needs **four** things and *time*:", "", "- flour, `500 g` of it, the stronger the better",
        "- water",
    ]  # fmt: skip
    assert "-- python ---" in shown
    assert "| Patience" in shown
    assert shown.endswith("\\[\n- x\n\\]\nand $x^2$\n")


# ---- the specification -----------------------------------------------------------------------------

EXAMPLES: list[str] = json.loads(Path(__file__).with_name("commonmark.json").read_text("utf-8"))
# Definitions of links are text here: an answer's are speakers, log lines and sources.
STOCK = MarkdownIt("commonmark").enable(["table", "strikethrough"]).disable("reference")


def content(tokens: list[Token]) -> str:
    """The text of markdown-it's tokens, with addresses of links, numbers of items and names of languages."""
    out, opened = [], []
    for token in tokens:
        if token.type == "link_open":
            opened.append((token, len(out)))
        elif token.type == "link_close":
            link, begin = opened.pop()
            out.append(address("".join(out[begin:]), link, "href") if link.markup != "autolink" else "")
        elif token.type == "image":
            name = "".join(child.content for child in token.children or ())
            out += [name, address(name, token, "src")]
        elif token.type == "list_item_open" and token.info:
            out.append(token.info + token.markup)
        elif token.type == "fence":
            out += [*token.info.split()[:1], token.content]
        else:
            out.append(content(token.children) if token.children is not None else token.content)
    return "".join(out)


def address(name: str, token: Token, attribute: str) -> str:
    shown = clean(STOCK.normalizeLinkText(str(token.attrs[attribute])))
    return f"({shown})" if name and shown and shown != name else shown * (not name)


def letters(text: str) -> str:
    """Without blanks, bullets, bars and lines."""
    return re.sub(r"\s|[•◦▪│─]", "", text)


def test_every_example_of_the_specification_has_the_text_that_markdown_it_gives() -> None:
    assert len(EXAMPLES) == 652
    for number, example in enumerate(EXAMPLES, 1):
        source = clean(example, newlines=True)
        expected = letters(content(STOCK.parse(source)))
        assert letters(bare(rendered(source, 200))) == expected, (number, example)


def test_a_line_with_a_label_is_shown_as_it_comes() -> None:
    markdown = Markdown()
    shown = bare("".join(markdown.feed(char, 80) for char in "[Alice]: well, hello "))
    assert shown == "[Alice]: well, hello"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (r"\frac{a + 1}{b} \cdot \sqrt{x}", "(a + 1)/b · √x"),
        (r"x^{2} + y_{ij} \leq 10^{-3}", "x² + yᵢⱼ ≤ 10⁻³"),
        (r"\text{speed} = \frac{\Delta s}{\Delta t}", "speed = (Δ s)/(Δ t)"),
        (r"\begin{aligned} a &= b \\ c &= d \end{aligned}", "a = b \n c = d"),
        (r"\unknown{x} 90^\circ", r"\unknownx 90°"),
    ],
)
def test_formulas_can_be_read(source: str, text: str) -> None:
    assert readable(source) == text


# ---- code ------------------------------------------------------------------------------------------


def test_texts_of_several_lines_keep_their_colour() -> None:
    def styles(language: str, *lines: str) -> list[set[str]]:
        highlighter = Highlighter(language)
        rows = [highlighter.line(line) for line in lines]
        return [{str(span.style) for span in row.spans if row.plain[span.start : span.end].strip()} for row in rows]

    assert styles("python", '"""a', "if", '"""') == [{"green"}] * 3
    assert styles("js", "/* a", "if", "b */ if") == [{"dim"}] * 2 + [{"dim", "magenta"}]
    assert styles("c", "/* a", "if", "b */", "if") == [{"dim"}] * 3 + [{"magenta"}]
    assert styles("bash", "ls a/*", "if") == [set(), {"magenta"}]
    assert styles("no such language", "if") == styles("text", "if") == [set()]
    assert styles("py", "if " * MAX_LINE) == [set()]


@pytest.mark.parametrize("language", ["python", "c", "json", "yaml", "ruby", "html", "php", "rust", "sql", "diff"])
def test_highlighting_changes_no_character(language: str) -> None:
    generator = random.Random(language)
    atoms = [
        '"',
        "'",
        "/*",
        "*/",
        "{",
        "}",
        "<a",
        ">",
        "#",
        "//",
        "x",
        " ",
        "\\",
        "`",
        "'''",
        "0x1f",
        "<<A",
        "日",
        "\t",
    ]
    highlighter = Highlighter(language)
    for _ in range(300):
        line = "".join(generator.choices(atoms, k=generator.randint(0, 12)))
        assert highlighter.line(line).plain == line


# ---- as it comes -----------------------------------------------------------------------------------

ATOMS = [
    "# ", "## ", "- ", "* ", "+ ", "1. ", "10. ", "> ", "```", "```python\n", "~~~", "\n", "\n", "\n\n", "  ", "    ",
    "|", "| a | b |\n", "|---|--:|\n", "| 1 | 2 |\n", "---", "***", "===", "**", "*", "_", "__", "~~", "`", "``", "[",
    "]", "(", ")", "](", "[a](", "!", "<", "<https://x.y>", "<h", "\\", "\\[", "\\]", "\\(", "\\)", "$", "$$", "word",
    "words and words ", "日本語", "。", "🙂", "👩\u200d👧", "👍🏽", "🇫🇷", "e\u0301", "\u0301", "\t", "x" * 30,
    "x" * 300, "*" * 15, "`" * 410, "a_b", "2*3", "http://a.b/c_d", "def f(x):\n", "/*", "*/", '"""', "# c\n", "1",
    "9", ".", "-", "=", "long " * 40, "$x", "[foo]: /url\n", "[foo]", "&amp;", "<br>", "<div>\n", "\n    code\n", "a\n",
    "![", "x^2\\)", "- - ",
]  # fmt: skip


def cut_up(generator: random.Random, text: str) -> list[str]:
    cuts = sorted(generator.choices(range(len(text) + 1), k=generator.randint(0, 8)))
    return [text[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(text)])]


@pytest.mark.parametrize("columns", [80, 40, 20, 8, 3])
def test_what_came_out_depends_on_the_text_so_far_and_not_on_its_pieces(columns: int) -> None:
    generator = random.Random(columns)
    for number in range(50):
        text = "".join(generator.choices(ATOMS, k=generator.randint(1, 25)))
        kind = {"styled": number % 4 > 0, "unicode": number % 3 > 0}
        by_character, pieces = Markdown(**kind), Markdown(**kind)
        so_far, whole = [""], ""
        for char in text:
            so_far.append(so_far[-1] + by_character.feed(char, columns))
        n_characters = 0
        for piece in cut_up(generator, text):
            whole += pieces.feed(piece, columns)
            n_characters += len(piece)
            assert whole == so_far[n_characters], (text, n_characters)
        assert by_character.flush(columns) == pieces.flush(columns)


@pytest.mark.parametrize(
    ("columns", "n_texts"), [(80, 1000), (20, 1000), pytest.param(40, 10_000, marks=pytest.mark.slow)]
)
def test_a_text_in_pieces_is_the_same_as_whole(columns: int, n_texts: int) -> None:
    generator = random.Random(columns)
    for _ in range(n_texts):
        text = "".join(generator.choices(ATOMS, k=generator.randint(2, 9)))
        markdown = Markdown()
        shown = "".join([markdown.feed(piece, columns) for piece in cut_up(generator, text)])
        assert shown + markdown.flush(columns) == rendered(text, columns), text


class Case:
    """A view that shows Markdown on a terminal."""

    def __init__(self, columns: int, rows: int) -> None:
        self.terminal, self.clock = Terminal(columns, rows), Clock()
        self.view = AnswerView(
            self.terminal, n_ctx=8192, clock=self.clock, size=self.terminal.size, page=Page(self.clock, markdown=True)
        )
        self.show(Started(1, 31, 0, 1234))

    def show(self, event: Started | TextDelta, after: float = 0.1) -> None:
        self.clock.now += after
        self.view.show(event)

    def text(self, text: str, after: float = 0.1) -> None:
        self.show(TextDelta(1, text, 1), after)

    @property
    def rows(self) -> list[str]:
        return self.terminal.screen.everything()


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (40, 10), (20, 5)])
def test_screen_is_that_of_the_finished_text_and_the_live_line_never_stays(columns: int, rows: int) -> None:
    generator = random.Random(rows)
    for number in range(25):
        text = ANSWER * 2 if number < 2 else "".join(generator.choices(ATOMS, k=generator.randint(1, 60)))
        case = Case(columns, rows)
        for piece in cut_up(generator, text) if number else text:
            if piece:
                case.text(piece, after=generator.choice((0.001, 0.02, 0.05, 0.2)))
            assert sum("prefill" in row for row in case.rows) <= 1
        case.view.close()
        assert case.rows == rows_of(rendered(text, columns), columns, rows)
        assert case.terminal.screen.cursor.x == 0


def test_rows_that_were_shown_stay_as_they_are() -> None:
    case, before = Case(20, 5), []
    for char in ANSWER * 2:
        case.text(char)
        rows = [row for row in case.rows if "prefill" not in row]
        finished = before[:-1]
        assert rows[: len(finished)] == finished
        before = rows


def test_text_comes_word_by_word() -> None:
    case = Case(40, 10)
    shown = []
    for piece in ("Bread", " needs", " **fo", "ur**", " things", " and"):
        case.text(piece)
        shown.append(case.rows[0])
    assert shown == [
        "prefill 310 tokens/s · TTFT 0.20 s",
        "Bread", "Bread needs", "Bread needs", "Bread needs four", "Bread needs four things",
    ]  # fmt: skip


def test_new_width_counts_from_the_next_word_on() -> None:
    case = Case(40, 10)
    case.text("- one two three four five six ")
    case.terminal.screen.resize(10, 20)
    case.text("seven eight nine ten\n\n---\n")
    case.terminal.screen.resize(10, 60)
    case.text("1. " + "word " * 10)
    case.view.close()
    shown = bare(re.sub(r"\r|\x1b7.*?\x1b8|\x1b(?:\[[\d?]*[A-Za-z]|D)", "", case.terminal.getvalue()))
    assert shown.splitlines() == [
        "• one two three four five six", "  seven eight nine", "  ten", "", "─" * 19, "1. " + "word " * 9 + "word",
    ]  # fmt: skip


UNITS = [
    "*", "**a ", "`", "[", "<http://", "a``b`", "|", ">", "- ", "#", "_a", "~~a", "\\", "word", "\\[", "日", "\u0301",
    " ", "1", "```\n", "|a|b|\n", "|a|b|\n|-|-|\n", "\n", "```py\n((", "[a](", "  ", "\t", "- > ", "***a", "\u200d",
    "$$",
]  # fmt: skip


@pytest.mark.parametrize("unit", UNITS)
def test_hostile_texts_take_linear_time(unit: str) -> None:
    def feed(size: int) -> None:
        markdown = Markdown()
        text = unit * (size // len(unit))
        for index in range(0, len(text), 20):
            markdown.feed(text[index : index + 20], 80)
        markdown.flush(80)

    assert loops(lambda: feed(4_000)) < 500
