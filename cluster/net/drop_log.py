"""Logs dropped messages at a bounded rate."""

import logging
import time
from collections.abc import Callable

from ..process.log import fields
from ..process.log_throttle import LogThrottle
from ..security.keyring import split_key

logger = logging.getLogger(__name__)


class DropLog:
    """Logs dropped messages: one line per peer and kind of fault, so that no peer can fill a disk."""

    def __init__(self, text: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._text = text
        self._log_throttle = LogThrottle(clock=clock)

    def say(self, peer: str, reason: str) -> None:
        """Logs a message of `peer`: an address whose key is cut off, or "" if unknown."""
        kind = "".join(char for char in reason if not char.isdigit())  # a peer controls the numbers
        if self._log_throttle.is_due(f"{peer} {kind}"):
            logger.warning("%s", self._text, extra=fields(peer=split_key(peer)[0], reason=reason))
