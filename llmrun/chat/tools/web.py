"""Ready-made tools that read a page of the web, and search it through a SearXNG server."""

from __future__ import annotations

from urllib.parse import urlencode

from llmrun.chat.attachments import read_url
from llmrun.chat.fetching import fetch, host_of
from llmrun.protocol.codec import load_json

_MOST_RESULTS = 8
_MAX_ANSWER = 4 << 20  # bytes


class Web:
    """The tool that reads a page.

    Args:
        named: hosts that the user has named, whose addresses may be private.
    """

    def __init__(self, named: tuple[str, ...]) -> None:
        self._named = named

    def read_url(self, url: str, start: int = 0) -> str:
        """Read a web page, or a document or text on the web.

        Args:
            url: its address, beginning with https:// or http://
            start: the character to begin at, to read on in a long text
        """
        text = read_url(url, named=self._named).text
        return text[max(0, start) :] or f"[its text has {len(text):,} characters]"


class Search(Web):
    """The tools of someone who has a SearXNG server.

    Args:
        server: its address.
    """

    def __init__(self, named: tuple[str, ...], server: str) -> None:
        super().__init__(named)
        self._server = server.rstrip("/").removesuffix("/search")

    def search_web(self, query: str) -> str:
        """Search the web. The result is a list of pages: title, URL and an excerpt; read_url reads one.

        Args:
            query: words to search for
        """
        url = f"{self._server}/search?{urlencode({'q': query, 'format': 'json'})}"
        answer = load_json(fetch(url, _MAX_ANSWER, (host_of(self._server),)).data)
        results = answer["results"][:_MOST_RESULTS]
        texts = (
            f"{number}. {each.get('title', '')}\n{each['url']}\n{each.get('content') or ''}".rstrip()
            for number, each in enumerate(results, 1)
        )
        return "\n\n".join(texts) or "[nothing was found]"
