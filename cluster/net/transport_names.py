"""Names of the transports for KV blocks, and how a pair of workers agrees on one.

Each side lists the transports that it supports and allows; prefill picks the best common one. `zmq_blocks`
works between any two hosts, so every worker lists it, and the other transports fall back to it.
"""

import os
from collections.abc import Sequence

from ..errors import HandshakeRefused
from ..security.ciphers import AUTO

ZMQ_BLOCKS = "zmq_blocks"
SHM = "shm"
TRANSPORTS = (SHM, ZMQ_BLOCKS)  # best first


def transports_fault(text: str) -> str:
    """The fault of the setting `text`, as the end of a sentence that begins with it; "" if valid."""
    if text == AUTO:
        return ""
    names = text.split(",")
    unknown = [name for name in names if name not in TRANSPORTS]
    if unknown or len(set(names)) < len(names):
        return f"is no list of transports: write {AUTO}, or some of {','.join(TRANSPORTS)}"
    if ZMQ_BLOCKS not in names:
        return f"lacks the transport that the others fall back to: write {text},{ZMQ_BLOCKS}"
    if SHM in names and not has_shm():
        return f"names {SHM}, which needs Linux: write {ZMQ_BLOCKS}"
    return ""


def transports_of(text: str) -> tuple[str, ...]:
    """The names in the valid setting `text`, best first. "auto" gives all transports of this platform."""
    names = TRANSPORTS if text == AUTO else text.split(",")
    return tuple(name for name in TRANSPORTS if name in names and (name != SHM or has_shm()))


def has_shm() -> bool:
    """Whether this platform has memfds with seals, which one process can pass to another."""
    return hasattr(os, "memfd_create")


def best_common(ours: Sequence[str], theirs: Sequence[str]) -> str:
    """The transport of a pair. An empty list comes from an older release, which has only zmq_blocks.

    Raises HandshakeRefused, which shows both lists.
    """
    common = [name for name in TRANSPORTS if name in ours and name in (theirs or (ZMQ_BLOCKS,))]
    if not common:
        raise HandshakeRefused(
            f"no common transport: ours {list(ours)}, theirs {[name[:32] for name in theirs]}"
        )
    return common[0]
