"""What can be seen of an answer, in a real browser: tokens, steps, explanation, columns, tools, context, export."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.chromium import Chromium
from support.gguf_writer import runnable_model, write
from support.installed import eventually
from support.page import ACTIVE, IDLE, LAST, Page
from support.served import SECONDS, LiveServer

from llmrun.chat.tools.toolbox import Toolbox
from llmrun.config import load_settings
from llmrun.models.store.importing import import_model
from llmrun.models.store.store import Store
from llmrun.protocol.layers import Layer, layer
from llmrun.server.page.tools import PageTools

pytestmark = pytest.mark.usefixtures("package_on_path")
CHANGE = """(each => {
    each.value = '%s';
    each.dispatchEvent(new Event('change'));
})(document.querySelector('%s'))"""


def test_keys_alone_ask_edit_retry_stop_and_take_another_token(
    browser: Chromium, serve: Callable[..., LiveServer]
) -> None:
    page = Page(browser, serve())
    page.tab_to("Tokens")
    page.key("Space")
    page.ask("one two three")
    assert page.see("document.querySelectorAll('.answer .token').length") == 2
    page.see("document.querySelector('#turns').focus()")
    page.tab_to("one two")
    page.key("ArrowRight")
    assert page.see(f"{ACTIVE}.textContent") == " three"
    page.key("Enter")
    page.until("document.querySelector('#token').open")
    assert "60.7%" in page.see("document.querySelector('#token-title').textContent")
    page.tab_to("Take “ other” instead")
    page.key("Enter")
    page.until(f"{IDLE} && document.querySelector('.answer .alternatives')")
    texts = "[...document.querySelectorAll('.answer .token')].map(each => each.textContent).join('')"
    assert page.see(texts) == "one two otherone two three", "the echo goes on behind the beginning"
    page.see("document.querySelector('#turns').focus()")
    page.tab_to("Version before")
    page.key("Enter")
    page.until(f"{texts} === 'one two three'")
    page.see("document.querySelector('#turns').focus()")
    page.tab_to("Edit")
    page.key("Enter")
    page.write("Changed: ")
    page.key("Enter")
    page.until(f"{IDLE} && {texts} === 'one two threeChanged:'")
    page.tab_to("Tokens")
    page.key("Space")
    page.until("!document.querySelector('.token')")
    page.check()


def test_a_chat_is_exported_as_a_page_that_runs_nothing(
    browser: Chromium, serve: Callable[..., LiveServer], tmp_path: Path
) -> None:
    page = Page(browser, serve())
    page.ask("Some *words*")
    page.ask("<script>document.title='pwned'</script>")
    browser.ask("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path / "saved"))
    for form, words in (("Markdown", "## You"), ("JSON", "llmrun-chat"), ("HTML", "<em>words</em>")):
        page.see(f"[...document.querySelectorAll('#settings button')].find(e => e.textContent === '{form}').click()")
        suffix = {"Markdown": "md"}.get(form, form.lower())
        saved = tmp_path / "saved" / f"some-words.{suffix}"
        assert eventually(lambda saved=saved, words=words: saved.exists() and words in saved.read_text(), SECONDS)  # type: ignore[misc]
    page.check()
    browser.requests.clear()
    browser.open(saved)
    assert page.see("document.title") == "Some *words* – llmrun"
    assert page.see("document.querySelector('.question .text').getBoundingClientRect().right < innerWidth - 8")
    assert not browser.errors
    assert page.see("document.querySelectorAll('button, script').length") == 0
    assert page.see("getComputedStyle(document.querySelector('.question .text')).whiteSpace") == "pre-wrap"
    assert browser.requests == [saved.as_uri()]


def test_an_answer_is_explained_on_a_page_of_its_own(browser: Chromium, real: LiveServer) -> None:
    page = Page(browser, real)
    page.set("Maximum tokens", "5")
    page.ask("Hello")
    page.see("document.querySelector('#turns').focus()")
    page.tab_to("Explain")
    page.key("Enter")
    page.until("document.querySelector('.answer a[href^=\"/ui/explained/\"]')")
    assert page.see(f"{ACTIVE}.textContent") == "Open the explanation"
    page.check()
    browser.open(page.see(f"{ACTIVE}.href"))
    assert page.see("document.title") == "Inference, token by token"
    page.until("document.querySelector('[data-view=token]').textContent.includes(' is token ')")
    page.check()


def test_tokens_keep_markdown_and_come_for_answers_that_are_shown(browser: Chromium, real: LiveServer) -> None:
    page = Page(browser, real)
    tinted = """(async () => {
        const { TokenView } = await import("/ui/files/tokens.js");
        const { render } = await import("/ui/files/markdown.js");
        const text = "# A **bold** one\\n\\n```python\\nx = 1  # why\\n```\\n\\n- a & b <c>";
        const encode = (token) => [...new TextEncoder().encode(token)];
        const draft = { source: "heads", depth: 2, text: "<i>", accepted: false, probability: 0.25 };
        const made = (token) => ({ token, logprob: -0.5, bytes: encode(token), top_logprobs: [], draft });
        const tokens = text.match(/\\W*\\w+|\\W+/g).map(made);
        const rendered = document.createElement("div");
        render(rendered, text);
        const before = rendered.textContent;
        const view = new TokenView(() => {});
        view.addRendered(tokens, rendered);
        const shown = [...view.element.querySelectorAll(".token")];
        const wrong = shown.filter((each) => !tokens[each.dataset.at].token.includes(each.textContent));
        const words = shown.map((each) => each.textContent);
        view.open(0);
        const about = document.querySelector("#token").textContent;
        document.querySelector("#token").close();
        return [wrong.length, view.element.textContent === before, view.element.querySelector("strong").textContent,
            ["bold", "python", "x", "why", "a", "c"].map((word) => words.some((each) => each.trim().endsWith(word))),
            about.includes("“<i>”, which was refused: by the model's heads, with 25.0%, as token 2 of the draft.")];
    })()"""
    found = browser.ask("Runtime.evaluate", expression=tinted, returnByValue=True, awaitPromise=True)
    assert found["result"].get("value") == [0, True, "bold", [True, False, True, True, True, True], True], found
    page.set("Maximum tokens", "5")
    page.ask("Hello")
    assert page.see("document.querySelectorAll('.answer .token').length") == 0
    page.see("document.querySelector('#toggle-tokens').click()")
    page.until("document.querySelector('.answer .token')")
    page.browser.ask("Page.reload")
    page.until(f"{IDLE} && document.querySelector('.answer .token')")
    page.see("document.querySelector('.answer .token').click()")
    page.until("document.querySelector('#token').open")
    page.key("Escape")
    page.see("document.querySelector('#toggle-tokens').click()")
    page.until("!document.querySelector('.answer .token')")
    page.check()


def test_a_conversation_that_is_too_long_offers_what_the_terminal_offers(browser: Chromium, real: LiveServer) -> None:
    page = Page(browser, real)
    page.set("Maximum tokens", "4")
    for text in ("first " * 150, "second " * 150, "third " * 150):
        page.write_question(text)
        page.until(f"{IDLE} && document.querySelector('#question').value === ''")
        if page.see("document.querySelector('#problem .buttons') !== null"):
            break
    offer = "[...document.querySelectorAll('#problem .buttons button')].map(each => each.textContent)"
    assert page.see(offer) == [
        "Without the oldest turns",
        "Without turns in the middle",
        "With a summary of the oldest turns",
    ]
    n_answers = page.see("document.querySelectorAll('.answer').length")
    page.see("document.querySelector('#problem .buttons button').click()")
    page.until(f"document.querySelectorAll('.answer').length === {n_answers + 1} && {IDLE}")
    page.until("document.querySelector('#problem').textContent.includes('the model did not see 1 earlier turn')")


def test_the_steps_of_a_token_and_its_sliders(browser: Chromium, real: LiveServer) -> None:
    page = Page(browser, real)
    page.set("Maximum tokens", "5")
    page.set("Seed", "3")
    page.see("document.querySelector('#toggle-tokens').click()")
    page.ask("Hello")
    assert page.see("document.querySelectorAll('.answer .token').length") == 5, "all logits of this model are equal"
    page.see("document.querySelectorAll('.answer .token')[1].click()")
    page.tab_to("Steps and sliders")
    page.key("Enter")
    page.until("document.querySelector('#token .sliders')")
    heads = page.see("[...document.querySelectorAll('#token thead th')].map(each => each.textContent)")
    assert heads[:3] == ["candidate", "by the sliders", "model"]
    last = "document.querySelector('#token tbody tr:last-child td.result').textContent"
    as_it_was = page.see(last)
    page.see("(e => { e.value = 1; e.dispatchEvent(new Event('input')) })(document.querySelector('[name=top_k]'))")
    assert page.see(last) == "1"
    page.tab_to("As it was")
    page.key("Enter")
    assert page.see(last) == as_it_was
    page.see("[...document.querySelectorAll('#token td button')].find(e => e.textContent.startsWith('Take')).click()")
    page.until(f"{IDLE} && document.querySelector('.answer .alternatives')")
    page.see("document.querySelectorAll('.answer .token')[0].click()")
    page.key("ArrowRight")
    assert page.see("document.querySelector('#token-title').textContent.startsWith('Token 2')")
    page.key("Escape")
    page.see("document.querySelector('#toggle-tokens').click()")
    page.check()


def test_answers_side_by_side(browser: Chromium, real: LiveServer) -> None:
    page = Page(browser, real)
    page.set("Maximum tokens", "6")
    page.set("Seed", "3")
    page.see("document.querySelector('#toggle-settings').click()")
    page.see(CHANGE % (3, "#answers"))
    page.see("document.querySelector('#second-origin-seed').previousElementSibling.value = 4")
    page.write_question("Hello")
    page.until(f"{IDLE} && document.querySelectorAll('.columns article').length === 3")
    page.until("document.querySelector('.columns + .hint').textContent.startsWith('1 and 2: They part at token ')")
    hints = page.see("[...document.querySelectorAll('.columns .hint')].map(each => each.textContent)")
    assert all("tokens/s" in hint and " s · " in hint for hint in hints)
    assert ["Seed 3" in hints[0], "Seed 4" in hints[1], "Seed 5" in hints[2]] == [True, True, True]
    other = "[...document.querySelectorAll('.columns button')].find(e => e.textContent === 'Go on with this one')"
    words = page.see(f"{other}.closest('article').querySelector('.markdown').textContent")
    page.see(f"{other}.focus()")
    page.key("Enter")
    page.until("!document.querySelector('.columns')")
    assert page.see(f"{LAST}.textContent") == words
    assert page.see("document.querySelector('.answer .alternatives').textContent.includes('of 3')")
    page.see(CHANGE % (1, "#answers"))
    page.ask("And now?")
    assert page.see("document.querySelectorAll('article').length") == 4
    page.check()


def test_a_call_of_a_tool_is_asked_about(browser: Chromium, tmp_path: Path) -> None:
    file = tmp_path / "tools.py"
    file.write_text("def weather(city: str) -> str:\n    return f'sunny in {city}'\n")
    with Toolbox((str(file),), 60) as box, LiveServer(tmp_path, ("calling",), tools=PageTools(box)) as server:
        page = Page(browser, server)
        page.write_question('{"city": "Rome"}')
        page.until("document.querySelector('.call button')")
        assert page.see(f"{ACTIVE}.getAttribute('aria-label')") == "Allow once: weather"
        assert page.see("document.querySelector('.call pre').textContent") == "city: Rome"
        page.key("Enter")
        page.until(f"{IDLE} && {LAST}?.textContent.includes('I heard: sunny in Rome')")
        assert page.see("document.querySelectorAll('.call').length") == 1
        assert "sunny in Rome" in page.see("document.querySelector('.call details').textContent")
        page.write_question('{"city": "Oslo"}')
        page.until("document.querySelector('.call button')")
        page.see("[...document.querySelectorAll('.call button')].find(e => e.textContent === 'No').click()")
        page.until(f"{IDLE} && {LAST}?.textContent.includes('does not allow it')")
        page.see("document.querySelector('#toggle-tokens').click()")
        page.write_question('{"city": "Lima"}')
        page.until("document.querySelector('.call button')")
        assert page.see("document.querySelectorAll('.answer:last-child .tokens').length") == 1, "for the text after it"
        page.key("Escape")
        page.until(f"{IDLE} && document.querySelectorAll('.answer').length === 3")
        page.see("document.querySelector('#tools').click()")
        page.see("document.querySelector('#toggle-tokens').click()")
        page.check()


def test_code_is_shown_as_it_would_run_before_it_is_allowed(browser: Chromium, tmp_path: Path) -> None:
    hidden = "\u202e"
    with Toolbox(("python",), 600) as box, LiveServer(tmp_path, ("calling",), tools=PageTools(box)) as server:
        page = Page(browser, server)
        page.write_question(json.dumps({"code": "for x in range(2):\n    print(x)"}))
        page.until("document.querySelector('.call button')")
        assert (
            page.see("document.querySelector('.call pre').textContent")
            == "code: \n  for x in range(2):\n      print(x)"
        )
        names = page.see("[...document.querySelectorAll('.call button')].map(each => each.textContent)")
        assert names == ["Allow once", "Always in this chat", "No"]
        page.see("[...document.querySelectorAll('.call button')][1].click()")
        page.until(f"{IDLE} && {LAST}?.textContent.includes('I heard: 0')")
        page.write_question(json.dumps({"code": f"print('a{hidden}b')"}))
        page.until(f"{IDLE} && document.querySelectorAll('.answer').length === 2")
        shown = page.see("document.querySelectorAll('.call pre')[2].textContent")
        assert shown == """code: "print('a\\u202eb')\"""", "nothing in it is hidden"
        page.check()


def test_the_context_bar_opens_and_the_limit_of_the_machine_is_shown(browser: Chromium, real: LiveServer) -> None:
    page = Page(browser, real)
    page.set("Maximum tokens", "5")
    page.set("Seed", "3")
    page.ask("Hello")
    page.until("document.querySelector('.answer .figures').textContent.includes('predicted here')")
    page.see("document.querySelector('#context').focus()")
    page.key("Enter")
    page.until("document.querySelector('#window').open")
    rows = page.see("[...document.querySelectorAll('#window th')].map(each => each.textContent)")
    assert rows == ["user", "assistant", "template", "free"]
    browser.resize(360, 800)
    assert page.see("(wide => wide.scrollWidth <= wide.clientWidth)(document.querySelector('#window .wide'))")
    browser.resize(1200, 800)
    page.key("Escape")
    page.see("document.querySelector('#toggle-settings').click()")
    page.see("document.querySelector('#origin-top_k').previousElementSibling.focus()")
    page.write("7")
    assert page.see("document.querySelector('#origin-top_k').textContent") == "yours; else 40, default"
    assert page.see("document.querySelector('#origin-top_p').textContent") == "default"
    page.check()


def test_settings_show_what_applies_and_choose_tools_window_and_documents(
    browser: Chromium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    file, docs = tmp_path / "tools.py", tmp_path / "docs"
    file.write_text("def weather(city: str) -> str:\n    return city\ndef moon() -> str:\n    return 'full'\n")
    docs.mkdir()
    (docs / "tea.md").write_text("# Kitchen\nTea is in the kitchen.")

    def defaults(model: str) -> Layer:
        return layer("preset", {"temperature": 0.25})

    with (
        Toolbox((str(file),), 60) as box,
        LiveServer(tmp_path, ("echo",), tools=PageTools(box), names=(), defaults=defaults, n_ctx=None) as server,
    ):
        import_model(
            write(tmp_path / "mine-Q4_1.gguf", runnable_model({"llama.context_length": 2048})),
            Store(load_settings()),
            name="mine",
        )
        page = Page(browser, server)
        shown = "[...document.querySelectorAll('#settings .field')].find(each => each.textContent.startsWith('%s'))"
        page.until(f"({shown % 'Temperature'}).querySelector('input').placeholder === '0.25'")
        assert page.see("document.querySelector('#origin-temperature').textContent") == "your settings file"
        assert "when it is loaded; trained on 2,048" in page.see("document.querySelector('#window-told').textContent")
        assert not server.loaded, "nothing is loaded for that"
        page.see(CHANGE % (str(docs), "#documents"))
        page.until("document.querySelector('#documents-told').textContent === '1 passage of 1 file'")
        page.see(CHANGE % (512, "#window-size"))
        page.until("document.querySelector('#window-told').textContent === 'yours; trained on 2,048'")
        assert server.post("/ui/load", {"model": server.loaded[0]}).json["n_ctx"] == 512
        page.see("document.querySelector('#tools').closest('div').querySelector('.each input[value=moon]').click()")
        page.ask("Where is the tea?")
        assert page.see("document.querySelector('.question .passages summary').textContent") == "1 passage of 1 file"
        page.browser.ask("Page.reload")
        page.until(f"{IDLE} && document.querySelector('#documents').value === '{docs}'")
        page.see(CHANGE % ("", "#documents"))
        page.until("document.querySelector('#documents-told').textContent.startsWith('A folder of this machine')")
        page.ask("And now? Where is the tea?")
        assert page.see("document.querySelectorAll('.question .passages').length") == 1
        page.see(CHANGE % ("/no/such/folder", "#documents"))
        page.until("document.querySelector('#problem').textContent.includes('is not a folder')")
        assert page.see("document.querySelector('#documents').value") == ""
        page.check()
