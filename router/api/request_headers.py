"""The table of the header fields that a generation request may have.

docs/api.md and the OpenAPI document show it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

LONGEST_KEY = 255
LONGEST_TIMEOUT_MS = 86_400_000
LONGEST_REQUEST_ID = 128


@dataclass(frozen=True)
class HeaderField:
    """One header field."""

    name: bytes  # in lower case
    says: str
    schema: Mapping[str, object]  # JSON schema of its value


REQUEST_ID = HeaderField(
    b"x-request-id",
    f"the id of the request in the answer and in log lines: 1 to {LONGEST_REQUEST_ID} visible ASCII "
    "characters; any other value counts as none",
    {"type": "string", "minLength": 1, "maxLength": LONGEST_REQUEST_ID, "pattern": "^[!-~]+$"},
)
IDEMPOTENCY_KEY = HeaderField(
    b"idempotency-key",
    f"1 to {LONGEST_KEY} printable ASCII characters; "
    "equal requests with equal keys within ten minutes share one answer",
    {"type": "string", "minLength": 1, "maxLength": LONGEST_KEY, "pattern": "^[!-~]([ -~]*[!-~])?$"},
)
TIMEOUT = HeaderField(
    b"x-baton-timeout-ms",
    "milliseconds after which the answer is a 504, or an error frame once it streams",
    {"type": "integer", "minimum": 1, "maximum": LONGEST_TIMEOUT_MS},
)
TIMELINE = HeaderField(
    b"x-baton-timeline", "1: the answer tells where its time went", {"type": "string", "enum": ["1"]}
)
RECORD = HeaderField(
    b"x-baton-record", "0: workers record none of its tokens for training", {"type": "string", "enum": ["0"]}
)
TRACEPARENT = HeaderField(
    b"traceparent", "the client's span, by the W3C's rules; what is none is passed over", {"type": "string"}
)
TRACESTATE = HeaderField(b"tracestate", "what goes along with it", {"type": "string"})

REQUEST_HEADERS = (REQUEST_ID, IDEMPOTENCY_KEY, TIMEOUT, TIMELINE, RECORD, TRACEPARENT, TRACESTATE)
