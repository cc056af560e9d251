"""Hostile answers in a real browser: nothing runs, nothing is fetched, and the page stays alive."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from support.chromium import Chromium
from support.page import LAST, Page
from support.served import LiveServer

from llmrun.chat.store.store import Sessions, folder_in
from llmrun.chat.store.turns import Answer, Question
from llmrun.config import load_settings
from llmrun.models.fingerprint import ModelFingerprint

pytestmark = pytest.mark.usefixtures("package_on_path")
FOREIGN = "http://evil.example"
HOSTILE = [
    "<script>document.title='pwned'</script>",
    "<img src=x onerror=\"document.title='pwned'\">",
    f"<img src={FOREIGN}/a.png>",
    f"![picture]({FOREIGN}/b.png)",
    f'![picture][1]\n\n[1]: {FOREIGN}/c.png "title"',
    "[click](javascript:document.title='pwned')",
    "[click](JaVaScRiPt&colon;document.title='pwned')",
    "[click](java\tscript:document.title='pwned')",
    "[click](data:text/html,<script>document.title='pwned'</script>)",
    "![x](data:image/svg+xml,<svg onload=document.title='pwned'>)",
    "[click](vbscript:x) [click](file:///etc/passwd) [click](/ui/chats) [click](//evil.example/x)",
    "<a href=javascript:document.title='pwned'>click</a>",
    f"<iframe src={FOREIGN}></iframe>",
    "<svg onload=\"document.title='pwned'\"><circle/></svg>",
    f"<link rel=stylesheet href={FOREIGN}/d.css><style>@import '{FOREIGN}/e.css'</style>",
    f"<meta http-equiv=refresh content='0;url={FOREIGN}'>",
    f"<base href={FOREIGN}><form action={FOREIGN}><input autofocus onfocus=document.title='pwned'></form>",
    "<details open ontoggle=document.title='pwned'>x</details>",
    "<math><mtext><table><mglyph><style><img src=x onerror=document.title='pwned'>",
    "```html\"onmouseover=document.title='pwned'\n<script>document.title='pwned'</script>\n```",
    "`<script>document.title='pwned'</script>`",
    '[a](http://x.example "\\" onmouseover=document.title=1 ")',
    "| a | b |\n| :-: | --: |\n| <b onclick=document.title='pwned'>x</b> | y |",
    "</div></article></main><h1 id=title>pwned</h1>",
    "*" * 3000 + "[" * 3000 + "`" * 2999 + "> " * 300,
    "\n".join("  " * depth + "- x" for depth in range(120)),
    "A" * 150_000,
    "x [" * 80_000,
    "\u202etxt.exe\u202c \u2066\u2067 \x1b[31m \x1b]0;pwned\x07 \x00 \x9b \ufeff \u0085",
    "\U000e0041\u200b\u0301" * 500 + "\ufdd0\uffff",
]


ATTACK = "document.title='pwned'"
LINKS = (
    "javascript:{}", "JaVaScRiPt:{}", "java&#115;cript:{}", "java\tscript:{}", " javascript:{}", "\x01javascript:{}",
    "javascript&colon;{}", "data:text/html,<script>{}</script>", "data:image/svg+xml,<svg onload={}>", "vbscript:{}",
    "blob:{}", "file:///etc/passwd#{}", "//evil.example/{}", "/ui/chats?{}", "http://evil.example/a.png#{}",
)  # fmt: skip
TAGS = (
    "<script>{}</script>", "<img src=x onerror=\"{}\">", "<svg/onload={}>", "<body onpageshow={}>",
    "<details open ontoggle={}>",
    "<iframe srcdoc=\"<script>{}</script>\">", "<object data='data:text/html,{}'>", "<input autofocus onfocus={}>",
    "<video src=http://evil.example/v onerror={}>", "<a href=javascript:{}>x</a>",
    "<style>@import 'http://evil.example/{}'</style>",
    "<template><script>{}</script></template>", "<math href=javascript:{}>", "<x contenteditable onblur={} tabindex=1>",
)  # fmt: skip
FRAMES = (
    "{}", "> {}", "- {}", "1. {}", "# {}", "`{}`", "```\n{}\n```", "```{}\nx\n```",
    "| a | {} |\n| - | - |\n| {} | b |", "**{}**",
    "[{}](http://x.example)", "[x]({})", "![x]({})", "<{}>", "[x][1]\n\n[1]: {} 'title'", "${}$",
    "$$\n{}\n$$", "\\({}\\)",
    "[x](http://x.example \"{}\")", "\x1b]8;;{}\x07x\x1b]8;;\x07", "\u202e{}\u202c", "{}\x00", "</div></article>{}",
)  # fmt: skip


def hostile(count: int) -> list[str]:
    """Answers of attacks in attacks; every third is broken off somewhere."""
    random = Random(7)
    found = []
    for number in range(count):
        parts = []
        for _ in range(random.randint(1, 4)):
            text = random.choice(random.choice((LINKS, TAGS))).format(ATTACK)
            for _ in range(random.randint(1, 3)):
                text = random.choice(FRAMES).replace("{}", text)
            parts.append(text)
        answer = random.choice(("\n\n", "\n", " ", "")).join(parts)
        found.append(answer[: random.randint(1, len(answer))] if number % 3 == 2 else answer)
    return found


def check_shown(page: Page) -> None:
    """Nothing of the answers shown runs or leads anywhere but, by a click, to the web."""
    page.see("document.querySelectorAll('details').forEach(each => { each.open = true })")
    page.see("document.querySelectorAll('.text a').forEach(each => each.dispatchEvent(new MouseEvent('mouseover')))")
    assert page.see("document.title") == "hostile – llmrun"
    kinds = (
        "script, img, iframe, svg, form, style, link, base, object, video, input, template, math a, math :not(math *)"
    )
    assert page.see(f"document.querySelectorAll('.text :is({kinds})').length") == 0
    ours = "http://www.w3.org/1998/Math/MathML"
    assert page.see(
        f"[...document.querySelectorAll('.text math, .text math *')].every(each => each.namespaceURI === '{ours}')"
    )
    addresses = page.see("[...document.querySelectorAll('.text a')].map(each => each.getAttribute('href'))")
    assert addresses
    assert all(address.startswith(("http://", "https://", "mailto:")) for address in addresses)
    assert page.see(
        "[...document.querySelectorAll('.text *')].every("
        "each => !each.getAttributeNames().some(name => /^on|^style$|href|src/.test(name) && each.tagName !== 'A'"
        " && !(name === 'style' && each.closest('math'))))"
    )
    shown = page.see("document.querySelector('#turns').textContent")
    assert not {"\u202e", "\u2066", "\x1b", "\x00", "\x9b"} & set(shown)


def save(answers: list[str]) -> None:
    with Sessions(folder_in(load_settings().state_dir)) as store:
        chat = store.new("hostile")
        for text in answers:
            chat.add_question(Question(text[:1000]))
            chat.add_answer(Answer(text, text[:1000], model=ModelFingerprint(text[:50])))
        chat.release()


def test_300_hostile_answers_run_and_fetch_nothing(browser: Chromium, serve: Callable[..., LiveServer]) -> None:
    server = serve()
    answers = [*HOSTILE, *hostile(300 - len(HOSTILE)), "x" * 1_000_000, "[x](" * 250_000, "\u202e" * 500_000]
    save(answers)
    page = Page(browser, server, path="/#chat=1")
    page.until(f"document.querySelectorAll('.answer').length === {len(answers)}")
    check_shown(page)
    page.ask("still alive")
    assert page.see(f"{LAST}.textContent").strip() == "still alive"
    page.check()


def test_hostile_answers_stream_and_run_and_fetch_nothing(browser: Chromium, serve: Callable[..., LiveServer]) -> None:
    server = serve()
    save(["[web](http://x.example)"])
    page = Page(browser, server, path="/#chat=1")
    for text in HOSTILE[:24:2]:
        page.ask(text)
    check_shown(page)
    page.check()
