"""The W3C's trace context as clients send it and processes pass it on.

By https://www.w3.org/TR/trace-context-2/ a `traceparent` that is none, or is there twice, is ignored, and its `tracestate`
with it; a `tracestate` that is none is ignored alone.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

LONGEST_PARENT = 512  # characters; a later version of the standard may say more than the 55 of this one
LONGEST_STATE = 512  # characters that are passed on
LONG_MEMBER = 128  # characters of a member that goes first where the state is too long
MOST_MEMBERS = 32
PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
MEMBER = re.compile(r"([a-z0-9][a-z0-9_*/@-]{0,255})=[ -+\--<>-~]{0,255}[!-+\--<>-~]")


@dataclass(frozen=True)
class TraceContext:
    """Where a span belongs; false where nobody traces."""

    parent: str = ""
    """`traceparent` in the form of version 00."""
    state: str = ""
    """`tracestate`: what the tracing systems on the way keep there, in their own words."""

    def __bool__(self) -> bool:
        return bool(self.parent)


NOWHERE = TraceContext()


class Carrier(Protocol):
    """A message with a trace context."""

    @property
    def traceparent(self) -> str: ...

    @property
    def tracestate(self) -> str: ...


def carried_by(message: Carrier) -> TraceContext:
    """The context that a message has."""
    return TraceContext(message.traceparent, message.tracestate)


def context_of(parents: Sequence[str], states: Sequence[str] = ()) -> TraceContext:
    """A client's context, of its headers `traceparent` and `tracestate`, each as often as it was sent."""
    parent = parent_of(parents[0]) if len(parents) == 1 else ""
    return TraceContext(parent, state_of(states)) if parent else NOWHERE


def parent_of(header: str) -> str:
    """A `traceparent` in the form of version 00; "" for one that the standard tells to ignore."""
    found = PARENT.fullmatch(header.strip(" \t")) if len(header) <= LONGEST_PARENT else None
    if found is None:
        return ""
    version, trace, parent, flags, more = found.groups()
    if version == "ff" or set(trace) == {"0"} or set(parent) == {"0"} or (version == "00" and more):
        return ""
    return f"00-{trace}-{parent}-{int(flags, 16) & 1:02x}"


def state_of(headers: Sequence[str]) -> str:
    """The members of all `tracestate` headers, in their order; "" when one of them is none, or a key is there twice."""
    members = [member for header in headers for part in header.split(",") if (member := part.strip(" \t"))]
    matches = [MEMBER.fullmatch(member) for member in members]
    keys = {match[1] for match in matches if match is not None}
    if len(keys) < len(members) or len(members) > MOST_MEMBERS:
        return ""
    return ",".join(_shortened(members))


def _shortened(members: list[str]) -> list[str]:
    """As many as may be passed on: of too long a state the long members go first, then the last ones."""
    if _length(members) > LONGEST_STATE:
        members = [member for member in members if len(member) <= LONG_MEMBER]
    while _length(members) > LONGEST_STATE:
        members = members[:-1]
    return members


def _length(members: list[str]) -> int:
    return sum(map(len, members)) + max(0, len(members) - 1)
