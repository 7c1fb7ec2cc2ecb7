"""Which web pages of other origins may call this server: CORS, as the WHATWG's Fetch standard has it.

Without `--allowed-origins` no header is sent, and browsers keep foreign pages from reading answers. With it

    what        the interface for clients, `is_for_pages`: answers, tokens, models, health, version,
                description. Never the state of the cluster, the requests of others, the page, or what changes
                the cluster
    answers     every answer there says which origin may read it: errors, streams and 401, too
    preflight   OPTIONS needs no key, since browsers send none with it
    cookies     `Access-Control-Allow-Credentials` is never sent. Keys travel in Authorization, which a page
                must know; nothing that a browser adds by itself admits a foreign page

A browser sends simple requests without asking first, and only keeps their answers from the page. So orders
that change the cluster are refused for pages of other origins, whatever is allowed (`is_foreign`), and bodies
for the API where the page's origin is not allowed and the browser need not ask (`is_simple`).
"""

from ...cluster.config.origins import ANY
from .request_head import Fields

Headers = list[tuple[bytes, bytes]]

PAGE_PATHS = (b"/tokenize", b"/detokenize", b"/health", b"/ready", b"/version", b"/openapi.json")
METHODS = b"GET, HEAD, POST"
MAX_AGE = b"600"  # seconds for which a browser need not ask again
EXPOSED = b", ".join(
    [
        b"x-request-id",
        b"request-id",
        b"retry-after",
        *[b"x-ratelimit-%b-%b" % (what, of) for of in (b"requests", b"tokens") for what in
          (b"limit", b"remaining", b"reset")],
    ]
)  # fmt: skip
FOREIGN_SITES = (b"cross-site", b"same-site")


class Cors:
    """The headers for pages of the origins in `allowed`: a comma-separated list, or `*` for all."""

    def __init__(self, allowed: str) -> None:
        self._is_any = allowed == ANY
        self._origins = frozenset(origin.encode() for origin in allowed.split(",") if origin)

    def __repr__(self) -> str:
        return f"Cors({'all' if self._is_any else len(self._origins)} origins)"

    def allows(self, fields: Fields) -> bool:
        """Whether the origin that a request names may call the API."""
        origins = fields.get(b"origin", [])
        return self._is_any or (len(origins) == 1 and origins[0] in self._origins)

    def headers(self, raw_path: bytes, fields: Fields) -> Headers:
        """The header fields of an answer at `raw_path` (undecoded)."""
        if not is_for_pages(raw_path):
            return []
        origins = fields.get(b"origin")
        if self._is_any:
            named = [(b"access-control-allow-origin", b"*")]
            return [*named, (b"access-control-expose-headers", EXPOSED)] if origins is not None else named
        varied = [(b"vary", b"Origin")]  # also for others: a cache must not give them this answer
        if origins is None or len(origins) != 1 or origins[0] not in self._origins:
            return varied
        return [
            (b"access-control-allow-origin", origins[0]),
            (b"access-control-expose-headers", EXPOSED),
            *varied,
        ]

    def preflight(self, method: str, raw_path: bytes, fields: Fields) -> Headers | None:
        """The further header fields of the answer to a preflight; None for any other request.

        A page of another origin gets no permission, which is the browser's reason to refuse.
        """
        if method != "OPTIONS" or b"origin" not in fields or b"access-control-request-method" not in fields:
            return None
        if not is_for_pages(raw_path):
            return None
        if not self._is_any and fields[b"origin"][0] not in self._origins:
            return []
        permission = [(b"access-control-allow-methods", METHODS), (b"access-control-max-age", MAX_AGE)]
        asked = fields.get(b"access-control-request-headers")
        if asked is not None:  # clients add headers of their own, which change nothing here
            permission += [(b"access-control-allow-headers", asked[0])]
            permission += [(b"vary", b"Access-Control-Request-Headers")]
        return permission


def is_for_pages(raw_path: bytes) -> bool:
    """Whether pages of allowed origins may call this path."""
    return raw_path.startswith(b"/v1/") or raw_path in PAGE_PATHS


def is_simple(fields: Fields) -> bool:
    """Whether the type of the body lets a browser send it without a preflight."""
    types = fields.get(b"content-type", ())
    return [kind.partition(b";")[0].strip().lower() for kind in types] != [b"application/json"]


def is_foreign(fields: Fields) -> bool:
    """Whether a browser sent the request for a page of another origin than this server's.

    Programs send no Origin. A proxy in front must keep Host, else its own pages count as foreign.
    """
    if any(site in FOREIGN_SITES for site in fields.get(b"sec-fetch-site", ())):
        return True
    hosts = fields.get(b"host", [b""])
    return any(
        origin.partition(b"://")[2].lower() != hosts[0].lower() for origin in fields.get(b"origin", ())
    )
