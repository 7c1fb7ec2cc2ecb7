"""The access log: one line for each request that was answered, refused or left.

The event loop only notes what is to be written. A thread formats and writes the lines of `FLUSH_S` at once.
So a slow reader of the log delays no request: beyond MAX_WAITING lines the rest is dropped and counted.
"""

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec
from msgspec import Struct

from ...cluster.process.log import PACKAGE, as_text, clock_of, fields
from .exchange import Exchange, Work

logger = logging.getLogger(__name__)

FLUSH_S = 0.1  # seconds for which lines are collected
MAX_WAITING = 20_000  # lines
ATOMIC_BYTES = 4096  # a pipe takes so many at once without lines of others between them
LONGEST_PATH = 200
LAST_LINES_S = 1.0  # longest wait for the last lines at the end
# asked all the time by machines: logged at level debug, and where refused at info
PROBE_PATHS = ("/health", "/ready")
WATCH_PATHS = ("/metrics", "/status", "/requests", "/history", "/")
WATCH_PREFIX = "/requests/"
MESSAGE = "request"
LEFT_STATUS = 499  # the client left before the answer began, as nginx has it
LOGGER = f"{PACKAGE}.router.access"

Write = Callable[[bytes], None]


class Line(Struct, frozen=True, gc=False):
    """What is known of one request when its line is due."""

    at: float  # Unix seconds
    request_id: str
    key: str  # name of the API key; "": none
    client: str  # address of the peer; "": unknown
    method: str
    path: str
    status: int
    seconds: float
    work: Work | None
    is_quiet: bool


class AccessLog:
    """Writes lines as `log_format` has them. `logs_quiet`: those of PROBE_PATHS and WATCH_PATHS, too."""

    def __init__(
        self, log_format: str, *, logs_quiet: bool = False, write: Write | None = None, role: str = "router"
    ) -> None:
        self.num_dropped = 0
        self._logs_quiet = logs_quiet
        self._line_of = JsonLines(role).line if log_format == "json" else TextLines(role).line
        self._write = write or write_to_stderr
        self._waiting: deque[Line] = deque()
        self._is_due = threading.Event()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="access log", daemon=True)

    def __repr__(self) -> str:
        return f"AccessLog({len(self._waiting)} waiting, {self.num_dropped} dropped)"

    def start(self) -> None:
        """Starts the writing thread."""
        self._thread.start()

    def close(self) -> None:
        """Writes what waits, for at most LAST_LINES_S. Idempotent."""
        self._is_over = True
        self._is_due.set()
        if self._thread.is_alive():
            self._thread.join(LAST_LINES_S)

    def served(self, exchange: Exchange, now: float) -> None:
        """Notes the end of an exchange at `now`, in monotonic seconds."""
        status, path = exchange.status or LEFT_STATUS, exchange.path
        is_quiet = path in PROBE_PATHS or (
            status < 400 and (path in WATCH_PATHS or path.startswith(WATCH_PREFIX))
        )
        if is_quiet and not self._logs_quiet:
            return
        work = exchange.work() if exchange.work is not None else None
        self._add(
            Line(
                time.time(),
                exchange.request_id,
                exchange.caller.name,
                exchange.client,
                exchange.method,
                path,
                status,
                now - exchange.began,
                work,
                is_quiet,
            )
        )

    def refused(self, status: int, method: str, path: str, request_id: str, client: str) -> None:
        """Notes a request that was refused before its head or its body was complete."""
        self._add(Line(time.time(), request_id, "", client, method, path, status, 0.0, None, False))

    def _add(self, line: Line) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self.num_dropped += 1
            return
        self._waiting.append(line)
        if not self._is_due.is_set():
            self._is_due.set()

    def _run(self) -> None:
        num_told = 0
        while not self._is_over:
            self._is_due.wait()
            if not self._is_over:
                time.sleep(FLUSH_S)
            self._is_due.clear()
            self._flush()
            if self.num_dropped != num_told:
                num_told = self.num_dropped
                logger.warning(
                    "access lines dropped: the log is read too slowly", extra=fields(lines=num_told)
                )
        self._flush()

    def _flush(self) -> None:
        """Writes all waiting lines, in parts that a pipe takes at once."""
        part = b""
        while self._waiting:
            line = self._line_of(self._waiting.popleft())
            if part and len(part) + len(line) > ATOMIC_BYTES:
                self._write(part)
                part = b""
            part += line
        if part:
            self._write(part)


class TextLines:
    """Lines of words, as `TextFormatter` writes them."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._second, self._clock = -1, ""

    def line(self, line: Line) -> bytes:
        """One request."""
        if (second := int(line.at)) != self._second:
            self._second, self._clock = second, clock_of(line.at)
        level = "DEBUG" if line.is_quiet else "INFO "
        milliseconds = int((line.at - second) * 1000)
        work = line.work
        room = f" room={work.room[:8]}.." if work is not None else ""
        key = f" key={as_text('key', line.key)}" if line.key else ""
        client = f" client={line.client}" if line.client else ""
        text = (
            f"{self._clock}.{milliseconds:03d} {level} {self._role} {MESSAGE}{room}"
            f" request={as_text('request', line.request_id)}{key}{client}"
            f" method={line.method or '-'} path={as_text('path', line.path[:LONGEST_PATH])}"
            f" status={line.status} duration_ms={line.seconds * 1000:.1f}"
        )
        if work is not None:
            text += (
                f" outcome={work.outcome} prompt_tokens={work.num_prompt} cached_tokens={work.num_cached}"
                f" output_tokens={work.num_output}"
            )
            for name, value in (("ttft_ms", work.ttft_s), ("tpot_ms", work.tpot_s)):
                if value is not None:
                    text += f" {name}={value * 1000:.1f}"
            if work.accept_length is not None:
                text += f" accept_length={work.accept_length:.2f}"
            if work.decode:
                text += f" prefill={work.prefill[:8]} decode={work.decode[:8]}"
        return text.encode("utf-8", "replace") + b"\n"


class JsonLines:
    """JSON objects, as `JsonFormatter` writes them."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._second, self._clock = -1, ""

    def line(self, line: Line) -> bytes:
        """One request."""
        if (second := int(line.at)) != self._second:
            self._second = second
            self._clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(line.at))
        document: dict[str, object] = {
            "time": f"{self._clock}.{int((line.at - second) * 1000):03d}Z",
            "level": "debug" if line.is_quiet else "info",
            "role": self._role,
            "instance": "",
            "logger": LOGGER,
            "message": MESSAGE,
        }
        work = line.work
        if work is not None:
            document["room"] = work.room
        document |= {
            "request": line.request_id,
            "key": line.key,
            "client": line.client,
            "method": line.method,
            "path": line.path[:LONGEST_PATH],
            "status": line.status,
            "duration_ms": round(line.seconds * 1000, 3),
        }
        if work is not None:
            document |= {
                "outcome": work.outcome,
                "prompt_tokens": work.num_prompt,
                "cached_tokens": work.num_cached,
                "output_tokens": work.num_output,
                "ttft_ms": None if work.ttft_s is None else round(work.ttft_s * 1000, 3),
                "tpot_ms": None if work.tpot_s is None else round(work.tpot_s * 1000, 3),
                "accept_length": work.accept_length,
                "prefill": work.prefill,
                "decode": work.decode,
            }
        return msgspec.json.encode(document) + b"\n"


def write_to_stderr(data: bytes) -> None:
    """Writes whole, also to a pipe that takes only a part at once. A stderr that is closed takes nothing."""
    try:
        descriptor = sys.stderr.fileno()
    except (OSError, ValueError):  # a stream without a descriptor, as under a test runner
        sys.stderr.write(data.decode())
        return
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            time.sleep(FLUSH_S)
        except OSError:
            return
