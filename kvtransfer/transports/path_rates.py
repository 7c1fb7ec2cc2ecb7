"""The transports that hand-offs really took, and their rates, as decode measured them."""

import logging

from ...cluster.net.transport_names import PATH_BYTES, PATH_SECONDS, path_taken
from ...cluster.process.log import fields
from ..transport import Complete

logger = logging.getLogger(__name__)


class PathRates:
    """Bytes and seconds of complete hand-offs, by the transport of their blocks.

    A path is logged with its rate after its first hand-off.
    """

    def __init__(self) -> None:
        self._bytes: dict[str, float] = {}
        self._seconds: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"PathRates({', '.join(self._bytes)})"

    def add(self, done: Complete) -> None:
        """Counts one hand-off. A room without blocks took no path."""
        path = path_taken(done.num_blocks, done.num_shm_blocks, done.num_device_blocks, done.num_nixl_blocks)
        if path is None:
            return
        if path not in self._bytes and done.pull_seconds > 0:
            rate = done.num_bytes / done.pull_seconds / 1e9
            logger.info(
                "first hand-off by this way",
                extra=fields(transport=path, bytes=done.num_bytes, gb_per_s=round(rate, 3)),
            )
        self._bytes[path] = self._bytes.get(path, 0.0) + done.num_bytes
        self._seconds[path] = self._seconds.get(path, 0.0) + done.pull_seconds

    def counters(self) -> dict[str, float]:
        """Totals by name, for heartbeats: bytes, and seconds from first announcement to last block."""
        found = {PATH_BYTES + path: total for path, total in self._bytes.items()}
        return found | {PATH_SECONDS + path: total for path, total in self._seconds.items()}
