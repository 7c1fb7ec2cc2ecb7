"""Authentication: each path but the OPEN_PATHS needs an API key.

OPEN_PATHS are health, readiness and version, the description of the API, and the page, which shows nothing
without a key. The check uses the path of the request line, before anything is routed, read or rewritten.
"""

import hmac

from ...cluster.security.api_keys import ApiKey, ApiKeys
from ..errors import forbidden
from .exchange import Exchange
from .rate_limits import ANYONE, Caller
from .request_head import Fields

OPEN_PATHS = (b"/health", b"/ready", b"/version", b"/", b"/docs", b"/openapi.json")
STATUS = b"/status"  # path that the launcher may read
SCHEME = "bearer "


class Guard:
    """Identifies the caller of a request. `must_see_all`, `must_ask` and `must_operate` check the caller's
    permissions.

    Without `keys` every request is admitted. The launcher of this process has a token of its own.
    """

    def __init__(self, keys: ApiKeys | None, operator_token: str = "", *, parts: int = 1) -> None:
        self._keys = keys
        self._parts = parts  # routers among which the limits are divided
        self._token = operator_token
        self._callers: dict[str, tuple[ApiKey, Caller]] = {}  # by key id, with the entry at that time

    def __repr__(self) -> str:
        return f"Guard({self._keys or 'everybody'})"

    def caller_of(self, raw_path: bytes, fields: Fields) -> Caller | None:
        """The caller of a request for `raw_path` (undecoded); None without a valid key."""
        if self._keys is None or raw_path in OPEN_PATHS:
            return ANYONE
        given = presented(fields)
        if raw_path == STATUS and self._token and hmac.compare_digest(given.encode(), self._token.encode()):
            return ANYONE
        key = self._keys.find(given)
        return self._known(key) if key is not None else None

    def _known(self, key: ApiKey) -> Caller:
        entry, caller = self._callers.get(key.id, (None, ANYONE))
        if entry is not key:  # a new key, or the file was reloaded
            caller = caller_of(key, self._parts)
            self._callers[key.id] = key, caller
        return caller


def must_see_all(caller: Caller) -> None:
    """Raises ApiError (403) unless the key may see the cluster and other tenants' load."""
    if not caller.sees_all:
        text = "This shows the whole cluster, which takes an operator's or an observer's key."
        raise forbidden(text, "operator_key_required")


def must_operate(caller: Caller) -> None:
    """Raises ApiError (403) unless the key may change the cluster. Without keys every caller may."""
    if caller.id and not caller.is_operator:
        raise forbidden("This changes the cluster, which takes an operator's key.", "operator_key_required")


def must_be_at_home(exchange: Exchange) -> None:
    """Raises ApiError (403) for a page of another origin: a browser sends simple requests without asking."""
    if exchange.is_foreign:
        raise forbidden("Pages of other origins may not change the cluster.", "foreign_origin")


def must_be_permitted(exchange: Exchange) -> None:
    """Raises ApiError (403) for a body of a page of another origin that no preflight asked for."""
    if exchange.is_unasked:
        text = "Pages of other origins may call this only where --allowed-origins has theirs."
        raise forbidden(text, "foreign_origin")


def must_ask(caller: Caller) -> None:
    """Raises ApiError (403) for an observer's key, which may not generate."""
    if caller.is_observer:
        raise forbidden("An observer's key shows the cluster; for answers use another key.", "observer_key")


def presented(fields: Fields) -> str:
    """The key in `Authorization: Bearer ...`, else in `x-api-key`; "" without exactly one such header."""
    text = _only(fields, b"authorization")
    if text[: len(SCHEME)].lower() == SCHEME:
        return text[len(SCHEME) :].strip()
    return "" if b"authorization" in fields else _only(fields, b"x-api-key").strip()


def _only(fields: Fields, name: bytes) -> str:
    """The value of a header field that is there once, else ""."""
    values = fields.get(name, ())
    return values[0].decode("latin-1") if len(values) == 1 else ""


def caller_of(key: ApiKey, parts: int = 1) -> Caller:
    """The caller with a key's identity and one of `parts` equal parts of its limits, rounded up."""

    def part_of(limit: int) -> int:
        return -(-limit // parts)

    return Caller(
        id=key.id,
        name=key.name,
        salt=key.salt,
        priority=key.priority,
        best_priority=key.priority,
        requests_per_minute=part_of(key.requests_per_minute),
        tokens_per_minute=part_of(key.tokens_per_minute),
        max_requests=part_of(key.max_requests),
        parts=parts,
        is_operator=key.operator,
        is_observer=key.observer,
        may_record=not key.no_recording,
    )
