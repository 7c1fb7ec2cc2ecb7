"""Who may ask: every path needs an API key, but the two that say whether the router lives and serves.

The decision is made on the path as the request line has it, before anything is routed, read or rewritten.
"""

import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from ..cluster.api_keys import ApiKey, ApiKeys
from .callers import ANYONE, Caller
from .errors import unauthorized

OPEN_PATHS = (b"/health", b"/ready")
STATUS = b"/status"  # which the launcher may read
CALLER = "caller"  # where a scope has its Caller
SCHEME = "bearer "


class Guard:
    """Lets requests through to `app`, each with its caller. Without `keys` everybody is welcome.

    The launcher of this process has a token of its own.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys | None, operator_token: str = "") -> None:
        self._app = app
        self._keys = keys
        self._token = operator_token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = self._caller_of(scope)
        if caller is None:
            return await _refuse(send)
        scope[CALLER] = caller
        await self._app(scope, receive, send)

    def _caller_of(self, scope: Scope) -> Caller | None:
        if self._keys is None or scope["raw_path"] in OPEN_PATHS:
            return ANYONE
        given = presented(scope["headers"])
        if scope["raw_path"] == STATUS and self._token and hmac.compare_digest(given.encode(), self._token.encode()):
            return ANYONE
        key = self._keys.find(given)
        return caller_of(key) if key is not None else None


def presented(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The key of `Authorization: Bearer ...`; "" without exactly one such header."""
    values = [value for name, value in headers if name == b"authorization"]
    text = values[0].decode("latin-1") if len(values) == 1 else ""
    return text[len(SCHEME) :].strip() if text[: len(SCHEME)].lower() == SCHEME else ""


def caller_of(key: ApiKey) -> Caller:
    """Whom a key stands for."""
    return Caller(
        id=key.id,
        name=key.name,
        salt=key.salt,
        priority=key.priority,
        best_priority=key.priority,
        requests_per_minute=key.requests_per_minute,
        tokens_per_minute=key.tokens_per_minute,
        max_requests=key.max_requests,
    )


async def _refuse(send: Send) -> None:
    error = unauthorized()
    headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer"), (b"connection", b"close")]
    body = error.encode()
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
