"""The id of a request: the client's `X-Request-Id`, or a minted one. It is in the answer and in log lines."""

import os
import re

from ..api.request_headers import LONGEST_REQUEST_ID, REQUEST_ID
from ..errors import MESSAGE_PATHS
from .request_head import Fields

HEADER = REQUEST_ID.name
SAFE = re.compile(rb"[!-~]{1,%d}" % LONGEST_REQUEST_ID)  # visible ASCII: no blanks, no line breaks


def given_id(fields: Fields) -> str:
    """The client's id; "" without one, with several, and for one that is too long or not visible ASCII."""
    values = fields.get(HEADER)
    if values is None or len(values) != 1 or not SAFE.fullmatch(values[0]):
        return ""
    return values[0].decode("ascii")


def headers_of(path: str) -> tuple[bytes, ...]:
    """The header fields of an answer that have its id. Anthropic's API has a name of its own."""
    return (HEADER, b"request-id") if path in MESSAGE_PATHS else (HEADER,)


def minted_id() -> str:
    """A new id for a request without one."""
    return "req_" + os.urandom(12).hex()
