"""Reads request bodies by the router's rule for unknown fields: they are refused, or left out and logged."""

import logging
import re

from ...cluster.process.log import fields
from ..errors import printable
from .body_checks import B, parse_body

logger = logging.getLogger(__name__)

MAX_LOGGED = 256  # names; clients choose them
MAX_IN_HEADER = 16
INDEX = re.compile(r"\[[0-9]+\]")


class BodyReader:
    """Reads bodies. One per router."""

    def __init__(self, *, ignores_unknown: bool) -> None:
        self._ignores_unknown = ignores_unknown
        self._logged: set[str] = set()

    def __repr__(self) -> str:
        rule = "ignores" if self._ignores_unknown else "refuses"
        return f"BodyReader({rule} unknown fields, {len(self._logged)} seen)"

    def read(self, raw: bytes, kind: type[B]) -> tuple[B, tuple[str, ...]]:
        """The checked body, and the paths of the fields that were left out of it.

        Raises ApiError (400), which names the fields at fault.
        """
        if not self._ignores_unknown:
            return parse_body(raw, kind), ()
        ignored: list[str] = []
        body = parse_body(raw, kind, ignored)
        for path in ignored:
            self._log(INDEX.sub("[]", path), kind)
        return body, tuple(ignored)

    def _log(self, path: str, kind: type) -> None:
        """Logs each path once, and at most MAX_LOGGED of them."""
        if path in self._logged or len(self._logged) > MAX_LOGGED:
            return
        self._logged.add(path)
        if len(self._logged) > MAX_LOGGED:
            logger.warning("further unknown fields of requests are ignored without a line each")
            return
        logger.warning(
            "an unknown field of requests is ignored", extra=fields(field=printable(path), body=kind.__name__)
        )


def header_of(ignored: tuple[str, ...]) -> bytes:
    """The paths of ignored fields as the value of a header."""
    names = [re.sub(r"[^A-Za-z0-9_.\[\]-]", "?", path[:80]) for path in ignored[:MAX_IN_HEADER]]
    more = [f"and {len(ignored) - MAX_IN_HEADER} more"] if len(ignored) > MAX_IN_HEADER else []
    return ", ".join(names + more).encode()
