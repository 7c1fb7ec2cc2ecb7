"""The operator's pages: the list of recent requests, the timeline of one request, and an HTML page over both.

The page is one document with inline style and script. Its content security policy names both by their hashes,
so the browser runs no other script, even if a worker's or a client's text contains one.
"""

import base64
import hashlib
from pathlib import Path
from urllib.parse import parse_qs

from ..answers.replies import compact
from ..errors import bad_request, unknown_request
from ..http.auth import must_see_all
from ..http.exchange import Exchange, send
from ..scheduling.history import KEPT, History
from ..scheduling.load_history import MOST, LoadHistory

USUAL_LIMIT = 50
FRESH = {"cache-control": "no-store"}
PAGE = Path(__file__).parent / "page"
STYLE_LINK = '<link rel="stylesheet" href="page.css">'
SCRIPT_LINK = '<script src="page.js" type="module"></script>'


class Dashboard:
    """The handlers of the operator's pages."""

    def __init__(self, history: History, load_history: LoadHistory) -> None:
        self._history, self._load_history = history, load_history
        self._page, self._page_headers = page_of(PAGE)

    async def page(self, exchange: Exchange) -> None:
        await send(exchange, self._page, headers=self._page_headers)

    async def requests(self, exchange: Exchange) -> None:
        """The newest requests that the caller may see, `?limit=` of them. Raises ApiError (400)."""
        limit = _number_in(exchange, "limit", usual=USUAL_LIMIT, least=1, most=KEPT)
        await send(exchange, compact(self._history.recent(exchange.caller, limit)), headers=FRESH)

    async def load(self, exchange: Exchange) -> None:
        """The load of the last 15 minutes; with `?since=POINT` what came after that point.

        Raises ApiError (400, 403).
        """
        must_see_all(exchange.caller)
        since = _number_in(exchange, "since", usual=-1, least=0, most=MOST)
        view = self._load_history.view(since if since >= 0 else None)
        await send(exchange, compact(view), headers=FRESH)

    async def request(self, exchange: Exchange, name: str) -> None:
        """The timeline of one request. Raises ApiError (404)."""
        found = self._history.find(name, exchange.caller)
        if found is None:
            raise unknown_request(name)
        await send(exchange, compact(found), headers=FRESH)


def _number_in(exchange: Exchange, name: str, *, usual: int, least: int, most: int) -> int:
    """The whole number `name` of the query, `usual` without it. Raises ApiError (400)."""
    asked = parse_qs(exchange.query.decode("latin-1"), keep_blank_values=True)
    if name not in asked:
        return usual
    raw = asked[name][-1]
    number = int(raw) if raw.isascii() and raw.isdigit() and len(raw) <= len(str(most)) else -1
    if not least <= number <= most:
        raise bad_request(f"{name} must be a whole number from {least} to {most}", param=name)
    return number


def page_of(directory: Path) -> tuple[bytes, dict[str, str]]:
    """The HTML page from the files of `directory`, and its response headers."""
    document, style, script = (
        (directory / name).read_text(encoding="utf-8") for name in ("index.html", "page.css", "page.js")
    )
    assert "</style" not in style, "would end the element"
    assert "</script" not in script, "would end the element"
    whole = document.replace(STYLE_LINK, f"<style>{style}</style>")
    whole = whole.replace(SCRIPT_LINK, f'<script type="module">{script}</script>')
    assert style in whole, STYLE_LINK
    assert script in whole, SCRIPT_LINK
    policy = (
        f"default-src 'none'; style-src {_source(style)}; script-src {_source(script)}; "
        "connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    )
    headers = {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cache-control": "no-cache",
    }
    return whole.encode(), headers


def _source(text: str) -> str:
    """The source expression of a content security policy for an inline element."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
