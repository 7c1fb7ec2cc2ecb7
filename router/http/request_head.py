"""The head of a request: its fields by name, its faults and its target."""

from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

import httptools

from ..errors import ApiError, body_is_encoded, body_too_large, expectation_failed, malformed

CONTINUE = b"100-continue"
Fields = dict[bytes, list[bytes]]  # values by name in lower case, in the order in which they came


def fields_of(headers: Iterable[tuple[bytes, bytes]]) -> Fields:
    """Groups header fields by name."""
    fields: Fields = {}
    for name, value in headers:
        if name in fields:
            fields[name].append(value)
        else:
            fields[name] = [value]
    return fields


def fault_of(fields: Fields, version: str, max_body: int) -> ApiError | None:
    """The error for a head that the parser wrongly accepts (hosts, lengths, encodings, expectations), or
    None."""
    num_hosts = len(fields.get(b"host", ()))
    if num_hosts > 1 or (num_hosts == 0 and version != "1.0") or version not in ("1.0", "1.1"):
        return malformed()
    codings = fields.get(b"transfer-encoding")
    if codings is not None and (
        len(codings) > 1
        or codings[0].lower() != b"chunked"
        or version == "1.0"
        or b"content-length" in fields
    ):
        return malformed()
    for length in fields.get(b"content-length", ()):
        if length.strip().isdigit() and int(length[:20]) > max_body:
            return body_too_large(max_body)
    encoding = fields.get(b"content-encoding")
    if encoding is not None and encoding[0].lower() != b"identity":
        return body_is_encoded(encoding[0].decode("latin-1"))
    expected = fields.get(b"expect")
    if expected is not None and (len(expected) > 1 or expected[0].lower() != CONTINUE):
        return expectation_failed()
    return None


def head_of_body(fields: Fields) -> bytes:
    """A minimal head with the body framing of `fields`; b"" for a request without a body."""
    for name in (b"transfer-encoding", b"content-length"):
        if name in fields and fields[name][0].strip().lstrip(b"0"):  # trailing blanks are not part of a value
            return b"POST / HTTP/1.1\r\n%b: %b\r\n\r\n" % (name, fields[name][0])
    return b""


class Target(NamedTuple):
    """Method and address of a request line."""

    method: str
    raw_path: bytes  # as received
    path: str  # decoded
    query: bytes  # as received, without the question mark


def target_of(url: bytes, method: bytes) -> Target:
    """Parses a request target in origin form (/path), absolute form (http://...) or asterisk form (*)."""
    target = url
    if not url.startswith(b"/"):
        try:
            parts = httptools.parse_url(url)
        except httptools.HttpParserInvalidURLError:
            parts = None
        path = (parts.path if parts is not None else None) or b"*"
        target = path + (b"?" + parts.query if parts is not None and parts.query else b"")
    raw_path, _, query = target.partition(b"?")
    path = unquote_to_bytes(raw_path) if b"%" in raw_path else raw_path
    return Target(method.decode("ascii"), raw_path, path.decode("utf-8", "replace"), query)
