"""What people look at: the list of recent requests, the story of one, and a page that shows both beside the workers.

The page is one document: its style and script are parts of it, named in its policy by their hashes, so that the browser
runs nothing else, whatever a worker or a client may have put into what the page shows.
"""

import base64
import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .answer import JSON_HEADERS
from .auth import CALLER
from .errors import bad_request, unknown_request
from .replies import compact
from .scheduling.history import KEPT, History

USUAL_LIMIT = 50
PAGE = Path(__file__).parent / "page"
STYLE_LINK = '<link rel="stylesheet" href="page.css">'
SCRIPT_LINK = '<script src="page.js" type="module"></script>'


class Overview:
    """The addresses of an operator."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._page, self._page_headers = page_of(PAGE)

    def routes(self) -> list[Route]:
        return [
            Route("/", self.page, methods=["GET"]),
            Route("/requests", self.requests, methods=["GET"]),
            Route("/requests/{id}", self.request, methods=["GET"]),
        ]

    async def page(self, request: Request) -> Response:
        return Response(self._page, headers=self._page_headers)

    async def requests(self, request: Request) -> Response:
        """The newest ones that the caller may see, `?limit=` of them."""
        raw = request.query_params.get("limit", str(USUAL_LIMIT))
        limit = int(raw) if raw.isascii() and raw.isdigit() and len(raw) < 9 else 0
        if not 1 <= limit <= KEPT:
            raise bad_request(f"limit must be a whole number from 1 to {KEPT}", param="limit")
        return _fresh(compact(self._history.recent(request.scope[CALLER], limit)))

    async def request(self, request: Request) -> Response:
        name = request.path_params["id"]
        found = self._history.find(name, request.scope[CALLER])
        if found is None:
            raise unknown_request(name)
        return _fresh(compact(found))


def _fresh(body: bytes) -> Response:
    return Response(body, headers=JSON_HEADERS | {"cache-control": "no-store"})


def page_of(directory: Path) -> tuple[bytes, dict[str, str]]:
    """The page made of the files there, and the headers that it is sent with."""
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
        f"default-src 'none'; style-src {_source(style)}; script-src {_source(script)}; connect-src 'self'; img-src data:; "
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
    """How a policy names an inline element."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
