"""Structured logs on standard logging: one line of text or one JSON object per record, on stderr.

    12:00:01.123 INFO  prefill[3f2a] prefill completed room=ab12cd34.. tokens=812 ms=41.2
    {"time": "2025-01-31T11:00:01.123Z", "level": "info", "role": "prefill", "instance": "3f2a...", ...}

Facts about a record are fields, given as `extra=fields(room=room, tokens=812)`. Users' text is never logged:
a field whose name marks it as text or tokens is replaced by its length.
"""

import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import TextIO

PACKAGE = __name__.partition(".")[0]
PRIVATE_FIELDS = frozenset(
    {"prompt", "prompt_ids", "prompt_text", "messages", "content", "text", "ids", "output_ids"}
)
SHORT_IDS = frozenset({"room", "instance", "peer", "router"})  # ids of 32 hex digits; text logs show 8


def fields(**values: object) -> dict[str, object]:
    """The `extra` argument of a log call that carries `values` as fields."""
    return {"fields": values}


def configure(
    role: str,
    instance: str = "",
    *,
    level: str = "info",
    log_format: str = "text",
    stream: TextIO | None = None,
) -> None:
    """Sends all records of this process to `stream` (default stderr), replacing earlier handlers.

    `level` applies to baton's own records. Other libraries log from level warning on, with "debug" from info
    on.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(
        JsonFormatter(role, instance) if log_format == "json" else TextFormatter(role, instance)
    )
    logging.basicConfig(
        handlers=[handler], level=logging.INFO if level == "debug" else logging.WARNING, force=True
    )
    logging.getLogger(PACKAGE).setLevel(level.upper())


def is_json() -> bool:
    """Whether `configure` chose JSON."""
    handlers = logging.getLogger().handlers
    return any(isinstance(handler.formatter, JsonFormatter) for handler in handlers)


def as_json_line(line: str, child: str) -> str:
    """A line of a child process as one JSON object with the child's name in `child`.

    A line that is no JSON object, such as one of a library, becomes the `message` of a new one.
    """
    try:
        document = json.loads(line)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        document = {"message": line}
    return json.dumps({"child": child} | document)


class TextFormatter(logging.Formatter):
    """One line per record in local time; a traceback follows on lines of its own."""

    def __init__(self, role: str, instance: str = "") -> None:
        super().__init__()
        self._origin = f"{role}[{instance[:4]}]" if instance else role

    def format(self, record: logging.LogRecord) -> str:
        """The record as text."""
        words = [
            f"{clock_of(record.created)}.{int(record.msecs):03d} {record.levelname:<5} {self._origin} "
            f"{_one_line(record.getMessage())}"
        ]
        words += [f"{name}={as_text(name, value)}" for name, value in fields_of(record).items()]
        line = " ".join(words)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object per record in UTC; a traceback is its `error` member."""

    def __init__(self, role: str, instance: str = "") -> None:
        super().__init__()
        self._role, self._instance = role, instance

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        document: dict[str, object] = {
            "time": f"{clock}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "role": self._role,
            "instance": self._instance,
            "logger": record.name,
            "message": record.getMessage(),
        }
        document |= {name: value for name, value in fields_of(record).items() if name not in document}
        if record.exc_info:
            document["error"] = self.formatException(record.exc_info)
        return json.dumps(document, default=str)


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """The fields of a record, private ones replaced, the room first."""
    found: Mapping[str, object] = getattr(record, "fields", {})
    ordered = sorted(found.items(), key=lambda item: item[0] != "room")
    return {name: _withheld(value) if name in PRIVATE_FIELDS else value for name, value in ordered}


def _withheld(value: object) -> object:
    if isinstance(value, (int, float)):  # a count
        return value
    return f"<{len(value)} withheld>" if isinstance(value, (str, bytes, list, tuple, dict)) else "<withheld>"


def clock_of(at: float) -> str:
    """The local time of day at `at`, in Unix seconds, without its fraction."""
    return time.strftime("%H:%M:%S", time.localtime(at))


def as_text(name: str, value: object) -> str:
    """A field's value in a line of words: quoted unless it is one plain word."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    text = str(value)
    if name in SHORT_IDS and len(text) == 32:
        return f"{text[:8]}.."
    is_plain = text != "" and text.isprintable() and " " not in text and '"' not in text
    return text if is_plain else json.dumps(text)


def _one_line(text: str) -> str:
    """`text` without line breaks and control characters, so that a record cannot imitate two."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
