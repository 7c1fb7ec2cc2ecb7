"""The router's own page, and what it asks for: recent requests, one of them, and the history of the load."""

from urllib.parse import parse_qs

from ..answers.replies import compact
from ..errors import bad_request, unknown_request
from ..http.auth import must_see_all
from ..http.exchange import Exchange, send
from ..scheduling.history import KEPT, History
from ..scheduling.load_history import MOST, LoadHistory
from .html_page import HtmlPage

USUAL_LIMIT = 50
FRESH = {"cache-control": "no-store"}


class Dashboard:
    """The handlers of the operator's pages."""

    def __init__(self, history: History, load_history: LoadHistory) -> None:
        self._history, self._load_history = history, load_history
        self._page = HtmlPage.read("index.html")

    async def page(self, exchange: Exchange) -> None:
        await send(exchange, self._page.body, headers=self._page.headers)

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
