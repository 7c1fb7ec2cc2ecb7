"""Logs dropped messages at a bounded rate."""

import logging
import time
from collections.abc import Callable

from ..process.log import fields
from ..process.log_throttle import LogThrottle
from ..security.keyring import split_key

logger = logging.getLogger(__name__)


class DropLog:
    """Logs messages that were dropped: a line per peer and kind of fault, so that no peer can fill a disk."""

    def __init__(self, text: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._text = text
        self._log_throttle = LogThrottle(clock=clock)

    def say(self, peer: str, reason: str) -> None:
        """`peer` may be an address with a key, of which only the address is told; "": unknown."""
        kind = "".join(char for char in reason if not char.isdigit())  # a peer can change the numbers at will
        if self._log_throttle.is_due(f"{peer} {kind}"):
            logger.warning("%s", self._text, extra=fields(peer=split_key(peer)[0], reason=reason))
