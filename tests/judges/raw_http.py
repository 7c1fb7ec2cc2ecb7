"""The raw HTTP corpus and damaged copies of it against a router process, on hundreds of connections.

Each request is answered or closed within its bound. With keys none is served; without keys, well-formed
requests reach the application, which does not know their path.
"""

import contextlib
import json
import random
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from baton.router.http import http_protocol
from baton.tests.corpora.corpus import Case, data, http_requests

ROUNDS = 4  # of the corpus
DAMAGED = 12  # copies of each case
LONGEST = 4096  # bytes of a case that is damaged
CONNECTIONS = 200
SLACK_S = 5.0  # of two busy cores
KEEP_ALIVE_S = 30.0  # the router's --keep-alive-s
INNER = re.compile(
    rb"0x[0-9a-f]{4}|/(?:etc|tmp|work|root|home)/|Traceback|\.py\b|\d+\.\d+\.\d+\.\d+|:\d{4,5}\b"
)
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
BODY = re.compile(rb"\r\n\r\n(\{.*?\}\})")
REQUEST_ID = re.compile(rb"\r\nx-request-id: (?P<id>[^\r\n]+)", re.IGNORECASE)


@dataclass(frozen=True)
class Told:
    """What came back on one connection."""

    answer: bytes
    seconds: float
    """To its end, which is the other side's."""

    @property
    def statuses(self) -> list[int]:
        return [int(status) for status in STATUS.findall(self.answer)]


def bound_of(expect: str) -> float:
    """Seconds until a connection must end: refused ones soon, others when nothing more is asked."""
    refused_s = max(http_protocol.HEAD_TIMEOUT_S, http_protocol.BODY_TIMEOUT_S) + http_protocol.LINGER_S
    return SLACK_S + (
        refused_s
        if expect in ("reject", "reject-body", "partial")
        else KEEP_ALIVE_S + refused_s
    )


def tell(port: int, sent: bytes, bound_s: float) -> Told | None:
    """Everything up to the end of the connection; None when that does not come in time."""
    began, answer = time.monotonic(), b""
    with socket.create_connection(("127.0.0.1", port), timeout=bound_s) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
        with contextlib.suppress(ConnectionError):
            try:
                while part := connection.recv(1 << 16):
                    answer += part
                    connection.settimeout(max(0.1, bound_s - (time.monotonic() - began)))
            except TimeoutError:
                return None
    return Told(answer, time.monotonic() - began)


def damaged(case: Case, coin: random.Random) -> bytes:
    """A case with a few bytes of its own changed, lost or doubled."""
    sent = bytearray(data(case))
    for _ in range(coin.randint(1, 3)):
        at = coin.randrange(len(sent))
        kind = coin.choice(("change", "lose", "double"))
        sent[at : at + 1] = {
            "change": bytes([coin.randrange(256)]),
            "lose": b"",
            "double": sent[at : at + 1] * 2,
        }[kind]
    return bytes(sent)


def without_own_id(answer: bytes, sent: bytes) -> bytes:
    """The answer without an x-request-id that is the client's own."""
    return REQUEST_ID.sub(lambda header: b"" if header["id"] in sent else header[0], answer)


def fault_of(case: Case, sent: bytes, told: Told | None, *, is_keyed: bool, is_whole: bool) -> str:
    """What is wrong with an answer, or ""; of a damaged case only what holds for every request is asked."""
    if told is None:
        return f"no end within {bound_of(case.expect):.0f} s"
    found = told.statuses
    good = {501, 505} if is_keyed else {200, 501, 505}
    if strange := [status for status in found if not (400 <= status < 500 or status in good)]:
        return f"answered {strange[0]}"
    if 200 not in found and INNER.search(without_own_id(told.answer, sent)):
        return "shows what is inside"
    if any(
        set(json.loads(body)["error"]) != {"message", "type", "param", "code"}
        for body in BODY.findall(told.answer)
    ):
        return "no error object"
    if not is_whole:
        return ""
    known = 401 if is_keyed else 404
    expected = {
        "reject": len(found) <= 1 and not {401, 404}.intersection(found),
        "reject-body": len(found) <= 1,
        "control": found[:1] == [known],
        "partial": found in ([], [408]) or (is_keyed and found == [401]),
    }
    return "" if expected.get(case.expect, True) else f"{case.expect}: {found}"


def judged(port: int, *, is_keyed: bool, seed: int = 1) -> tuple[int, float, list[str]]:
    """(connections, seconds of the longest refusal, what was wrong with any)."""
    coin, cases = random.Random(seed), http_requests()
    sent = [(case, data(case), True) for case in cases for _ in range(ROUNDS)]
    small = [case for case in cases if len(data(case)) <= LONGEST]
    sent += [(case, damaged(case, coin), False) for case in small for _ in range(DAMAGED)]
    coin.shuffle(sent)

    def play(what: tuple[Case, bytes, bool]) -> tuple[float, str]:
        case, raw, is_whole = what
        told = tell(port, raw, bound_of(case.expect if is_whole else "either"))
        fault = fault_of(case, raw, told, is_keyed=is_keyed, is_whole=is_whole)
        is_refusal = told is not None and case.expect in ("reject", "reject-body")
        return (
            told.seconds if told is not None and is_refusal and is_whole else 0.0
        ), fault and f"{case.name}: {fault}"

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        results = list(pool.map(play, sent))
    return len(sent), max(seconds for seconds, _ in results), [fault for _, fault in results if fault]
