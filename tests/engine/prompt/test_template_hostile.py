"""Hostile chat templates: none runs code, and each has ended, with an error or a text, soon and within its memory.

They run in one process of their own, where an audit hook sees whatever Python does for them.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmrun.engine.prompt.template import MAX_TEMPLATE_CHARACTERS

SECONDS = 0.1  # the limit while these tests run
MOST_LOOPS = 1000  # of work after the limit, see support/effort: a neighbour that fills memory makes each page slow
MEGABYTES = 700  # it is looked at every few milliseconds only

CODE = {
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "cycler's globals": "{{ cycler.__init__.__globals__.os.system('touch PWNED') }}",
    "joiner's globals": "{{ joiner.__init__.__globals__['os'].popen('touch PWNED').read() }}",
    "namespace's globals": "{{ namespace.__init__.__globals__.os.system('touch PWNED') }}",
    "own builtins": "{{ self.__init__.__globals__.__builtins__.open('PWNED', 'w') }}",
    "context": "{{ self._TemplateReference__context.cycler.__init__.__globals__.os.system('touch PWNED') }}",
    "our function's globals": "{{ raise_exception.__globals__['__builtins__']['open']('PWNED', 'w') }}",
    "our function's code": "{{ strftime_now.__code__.co_consts }}",
    "attr filter": "{{ (messages | attr('__class__') | attr('__base__')) | attr('__subclasses__')() }}",
    "map attribute": "{{ messages | map(attribute='__class__.__mro__') | list }}",
    "groupby attribute": "{{ messages | groupby('__class__.__init__.__globals__') | list }}",
    "subscript": "{{ ''['__class__']['__mro__'] }}",
    "built name": "{{ messages[0][('__cla' ~ 'ss__')] }}",
    "escaped name": "{{ ''['\\x5f\\x5fclass\\x5f\\x5f'] }}",
    "unicode name": "{{ ''.__ｃlass__.__mro__ }}",
    "str.format": "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
    "format_map": "{{ '{a.__class__.__mro__}'.format_map({'a': 1}) }}",
    "format by name": "{{ ('{0.__class__}' | attr('format'))(1) }}",
    "format by map": "{{ ['{0.__class__.__mro__}'] | map('format', 1) | list }}",
    "format indirectly": "{% set f = '{0.__class__.__mro__}'.format %}{{ f(1) }}",
    "generator frame": "{% set g = messages | map('upper') %}{{ g.gi_frame.f_globals }}",
    "call block caller": "{% macro m() %}{{ caller.__globals__ }}{% endmacro %}{% call m() %}{% endcall %}",
    "macro internals": "{% macro m() %}{% endmacro %}{{ m._environment.loader }}{{ m._func.__globals__ }}",
    "environment": "{{ self._environment }}{{ environment.globals }}{{ loop.__init__.__globals__ }}",
    "undefined": "{{ nothing.__class__.__mro__ }}{{ nothing._fail_with_undefined_error.__globals__ }}",
    "percent": "{{ '%s' % ''.__class__ }}{{ '%(a)s' % {'a': ''.__class__} }}",
    "bound method": "{{ ''.format.__self__.__class__.__base__ }}{{ ''.join.__self__ }}",
    "lipsum's globals": "{{ lipsum.__globals__ }}",
    "dict and its methods": "{{ dict.__base__ }}{{ dict(a=1).__init__.__objclass__ }}",
    "date": "{{ strftime_now.__globals__.datetime }}{{ strftime_now.__defaults__ }}",
    "exception": "{{ raise_exception(messages.__class__) }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import '/etc/passwd' as x %}{{ x }}",
    "from import": "{% from '/etc/passwd' import x %}",
    "extends": "{% extends '/etc/passwd' %}",
    "change a message": "{{ messages[0].update({'content': 'x'}) }}",
    "clear the messages": "{{ messages.clear() }}{{ messages[0].__setitem__('content', 'x') }}",
    "append a message": "{% set x = messages.append(1) %}{{ messages.__iadd__([1]) }}",
    "line statements": "# for x in range(10)\n{{ x.__class__ }}\n# endfor",
    "code in a name": "{% set __import__('os').system('touch PWNED') = 1 %}",
    "code in a string": "{{ '\\'); __import__(\"os\").system(\"touch PWNED\"); (\\'' }}",
}
GREED = {
    "nested ranges": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "huge range": "{% for a in range(10**12) %}{% endfor %}",
    "power": "{{ 10 ** (10 ** 8) }}",
    "power of powers": "{% set ns = namespace(x=7) %}{% for i in range(99) %}{% set ns.x = ns.x ** 7 %}{% endfor %}",
    "products": "{% set ns = namespace(x=7) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "negative power": "{{ 2 ** -(10 ** 9) }}{{ (0 - 2) ** (10 ** 9) }}",
    "division of a giant literal": "{{ 0x" + "f" * 80_000 + " % 0x" + "e" * 40_000 + " }}",
    "division of made numbers": "{% set x = (0).from_bytes(('f' * 9999999).encode(), 'big') %}{{ x // (x - 1) }}",
    "rounding": "{{ 1.5 | round(10 ** 9, 'ceil') }}",
    "giant decimal literal": "{{ " + "9" * 120_000 + " }}",
    "digits of a number": "{{ ('9' * 9999999) | int }}{{ ('9' * 99999) | float }}",
    "repeat": "{{ 'a' * 10 ** 10 }}",
    "repeat a list": "{{ ([0] * 10 ** 8) | length }}",
    "doubling": "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "join": "{{ range(99999) | join('x' * 100000) }}",
    "replace": "{{ ('a' * 10000) | replace('a', 'b' * 100000) }}",
    "replace by names": "{{ ('a' * 10000) | replace(new='b' * 100000, old='a') }}",
    "pads": "{{ 'a' | center(10 ** 10) }}{{ 'a'.ljust(10 ** 9) }}{{ 'a'.zfill(10 ** 9) }}",
    "format pads": "{{ '%9999999999d' | format(1) }}{{ '{:>9999999999}'.format(1) }}",
    "format star": "{{ '%*d' | format(2000000000, 1) }}",
    "indent": "{{ 'a\nb' | indent(10 ** 9) }}",
    "wordwrap": "{{ ('a' * 3000000) | wordwrap(1) }}",
    "slices": "{{ [1] | slice(10 ** 9) | list | length }}",
    "batches": "{{ [1] | batch(10 ** 9, 'x') | list | length }}",
    "tabs": "{{ '\t'.expandtabs(10 ** 9) }}",
    "translate": "{{ ('a' * 9999999).translate({97: 'b' * 9999}) }}",
    "json": "{{ messages | tojson(indent=10 ** 9) }}",
    "deep json": "{% set n = namespace(x=[]) %}"
    "{% for i in range(99999) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x | tojson }}",
    "date": "{{ strftime_now('%c' * 10 ** 7) }}",
    "lipsum": "{{ lipsum(10 ** 6) }}",
    "sum": "{% for i in range(99999) %}{{ range(99999) | sum }}{% endfor %}",
    "sort": "{% for i in range(99999) %}{% set x = range(99999) | sort(reverse=true) %}{% endfor %}",
    "regex-like filters": "{{ ('<' * 300000) | striptags }}{{ ('www.' * 200000) | urlize }}"
    "{{ ('&' * 999999) | urlencode }}",
    "title": "{{ ('a-' * 3000000) | title }}{{ ('a' * 9999999) | wordcount }}",
    "recursive macro": "{% macro m(n) %}{{ m(n + 1) }}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "recursive loop": "{% for x in [[]] recursive %}{{ loop([[], []]) }}{% endfor %}",
    "wide recursion": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(99) }}",
    "caller recursion": "{% macro m() %}{% call m() %}x{% endcall %}{% endmacro %}{{ m() }}",
    "cycler": "{% set c = cycler('a' * 999999, 'b') %}{% for i in range(99999) %}{{ c.next() }}{% endfor %}",
    "endless output": "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
    "many constants": "{{ ('a' * 300000) | wordwrap(1) | length }}" * 200,
    "deep parentheses": "{{ " + "(" * 60_000 + "1" + ")" * 60_000 + " }}",
    "deep lists": "{{ " + "[" * 60_000 + "]" * 60_000 + " }}",
    "deep negation": "{{ " + "not " * 30_000 + "1 }}",
    "long sum": "{{ 1" + " + 1" * 30_000 + " }}",
    "long concatenation": "{{ 'a'" + " ~ 'a'" * 20_000 + " }}",
    "long attribute chain": "{{ a" + ".b" * 60_000 + " }}",
    "long filter chain": "{{ 'a'" + " | upper" * 14_000 + " }}",
    "long comparison": "{{ 1" + " < 2" * 30_000 + " }}",
    "many elifs": "{% if a %}" + "{% elif a %}" * 10_000 + "{% endif %}",
    "deep ifs": "{% if 1 %}" * 12_000,
    "deep loops": "{% for a in [1] %}" * 150 + "{% endfor %}" * 150,
    "many macros": "".join(f"{{% macro m{n}() %}}{{% endmacro %}}" for n in range(3_500)),
    "unclosed": "{{ '" + "\\" * 120_000,
    "braces": "{{" * 60_000,
    "tags": "{%" * 60_000,
    "comments": "{#" * 60_000,
    "raw": "{% raw %}" * 13_000,
    "spaces": "{{" + " " * 120_000 + "}}",
    "lines": "{%- if 1 -%}\n\n" + " \n" * 60_000 + "{%- endif -%}",
    "undefined chain": "{{ a.b.c.d }}",
    "control characters": "\x00\x1b]0;x\x07{{ '\x00' }}\u202e{{ messages }}",
}  # fmt: skip
TEMPLATES = {**CODE, **GREED}

WORKER = r"""
import json, os, re, resource, sys, time
from llmrun.engine.prompt import template as module
from llmrun.errors import BadTemplateError
from llmrun.protocol.messages import Message
from support.effort import loop_seconds

module.MAX_RENDER_SECONDS = float(sys.argv[1])
control = module.ControlTexts(["<s>", "<|im_end|>"])
messages = [Message("user", "Hi <s>")]
warm_up = "{{ messages | tojson | urlize | striptags | wordwrap | pprint }}{{ strftime_now('%d') }}{{ nothing() }}"
try:  # what is imported late is imported now
    module.ChatTemplate(warm_up, bos="", eos="").render(messages, control)
except BadTemplateError:
    watched, seen = False, []
BAD = r"os\.(system|exec|fork|posix_spawn|spawn|remove|rename|mkdir|chmod|kill)|subprocess|socket|ctypes|open$|import$"
HARMLESS = ("'/proc/self/statm'", "('<template>', 'rb'")  # our own look at the memory; Python's at a text with an error
is_bad = re.compile(BAD).match

def watch(name, facts):
    if watched and is_bad(name) and not any(harmless in str(facts) for harmless in HARMLESS):
        seen.append([name, str(facts)[:200]])

sys.addaudithook(watch)

def memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

for line in sys.stdin:
    source = json.loads(line)
    before, started, text, error = memory(), time.process_time(), "", None
    watched = True
    try:
        parts = module.ChatTemplate(source, bos="<s>", eos="</s>").render(messages, control)
        text = "".join(part.text for part in parts)
    except BadTemplateError as caught:
        error = f"{caught.what}: {caught.why}"
    finally:
        watched = False
    late = (time.process_time() - started - module.MAX_RENDER_SECONDS) / loop_seconds()
    events, seen = seen, []
    print(json.dumps({"late": late, "megabytes": memory() - before, "text": text[:5000], "error": error,
                      "events": events, "messages": [message.content for message in messages]}), flush=True)
"""


@functools.cache
def outcomes(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the outcome of every template, all in one process, which must survive them."""
    paths = [str(Path(__file__).parents[2]), os.environ["PYTHONPATH"]]
    done = subprocess.run(
        [sys.executable, "-c", WORKER, str(SECONDS)],
        input="".join(json.dumps(source) + "\n" for source in TEMPLATES.values()),
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        timeout=600,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    names = [*TEMPLATES]
    assert len(lines) == len(names), f"it ended in {names[len(lines)]!r} with {done.returncode}: {done.stderr[-2000:]}"
    assert done.stderr == ""
    assert not list(folder.iterdir())
    return dict(zip(names, lines, strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture
def outcome(request: pytest.FixtureRequest, folder: Path, package_on_path: None) -> dict[str, Any]:
    return outcomes(folder)[request.param]


@pytest.mark.skipif(sys.platform != "linux", reason="memory is capped where the system can")
@pytest.mark.parametrize("outcome", TEMPLATES, indirect=True)
def test_it_ends_soon_small_and_without_running_code(outcome: dict[str, Any]) -> None:
    assert outcome["late"] < MOST_LOOPS
    assert outcome["megabytes"] < MEGABYTES
    assert outcome["events"] == []
    assert outcome["messages"] == ["Hi <s>"]
    if outcome["error"] is not None:
        assert outcome["error"].startswith("the chat template")
        assert "\n" not in outcome["error"]


@pytest.mark.skipif(sys.platform != "linux", reason="memory is capped where the system can")
@pytest.mark.parametrize("outcome", CODE, indirect=True)
def test_it_shows_nothing_of_python(outcome: dict[str, Any]) -> None:
    for secret in ("<module", "<class", "<built-in", "<function", "object at 0x", "Popen", "root:"):
        assert secret not in outcome["text"]


def test_at_least_sixty_and_none_is_refused_for_its_length() -> None:
    assert len(TEMPLATES) >= 60
    assert max(map(len, TEMPLATES.values())) <= MAX_TEMPLATE_CHARACTERS
