"""The W3C trace context that clients send and processes pass on.

By https://www.w3.org/TR/trace-context-2/ an invalid or repeated `traceparent` is ignored together with its
`tracestate`. An invalid `tracestate` is ignored alone.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

LONGEST_PARENT = 512  # characters; a later version of the standard may have more than the 55 of this one
LONGEST_STATE = 512  # characters that are passed on
LONG_MEMBER = 128  # characters; longer members are dropped first from a state that is too long
MOST_MEMBERS = 32
PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
MEMBER = re.compile(r"([a-z0-9][a-z0-9_*/@-]{0,255})=[ -+\--<>-~]{0,255}[!-+\--<>-~]")


@dataclass(frozen=True)
class TraceContext:
    """The parent and state of a span. Its truth value is false for an untraced request."""

    parent: str = ""
    """`traceparent` in the form of version 00."""
    state: str = ""
    """`tracestate`: entries of the tracing systems on the way, in their own formats."""

    def __bool__(self) -> bool:
        return bool(self.parent)


NOWHERE = TraceContext()


class Carrier(Protocol):
    """The protocol of messages with a trace context."""

    @property
    def traceparent(self) -> str: ...

    @property
    def tracestate(self) -> str: ...


def carried_by(message: Carrier) -> TraceContext:
    """The trace context of a message."""
    return TraceContext(message.traceparent, message.tracestate)


def context_of(parents: Sequence[str], states: Sequence[str] = ()) -> TraceContext:
    """A client's context from all values of its headers `traceparent` and `tracestate`."""
    parent = parent_of(parents[0]) if len(parents) == 1 else ""
    return TraceContext(parent, state_of(states)) if parent else NOWHERE


def parent_of(header: str) -> str:
    """A `traceparent` in the form of version 00; "" if the standard requires to ignore it."""
    found = PARENT.fullmatch(header.strip(" \t")) if len(header) <= LONGEST_PARENT else None
    if found is None:
        return ""
    version, trace, parent, flags, more = found.groups()
    if version == "ff" or set(trace) == {"0"} or set(parent) == {"0"} or (version == "00" and more):
        return ""
    return f"00-{trace}-{parent}-{int(flags, 16) & 1:02x}"


def state_of(headers: Sequence[str]) -> str:
    """The members of all `tracestate` headers in order; "" for an invalid member or a repeated key."""
    members = [member for header in headers for part in header.split(",") if (member := part.strip(" \t"))]
    matches = [MEMBER.fullmatch(member) for member in members]
    keys = {match[1] for match in matches if match is not None}
    if len(keys) < len(members) or len(members) > MOST_MEMBERS:
        return ""
    return ",".join(_shortened(members))


def _shortened(members: list[str]) -> list[str]:
    """The members up to the maximum length.

    A state that is too long loses its long members first, then its last ones.
    """
    if _length(members) > LONGEST_STATE:
        members = [member for member in members if len(member) <= LONG_MEMBER]
    while _length(members) > LONGEST_STATE:
        members = members[:-1]
    return members


def _length(members: list[str]) -> int:
    return sum(map(len, members)) + max(0, len(members) - 1)
