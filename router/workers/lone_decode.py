"""Notices decode workers that were meant to have prefill workers and have none.

They compute the prompts themselves, or with `--local-prefill off` requests wait. Nothing else says so: the
router is ready, and answers are the same.
"""

import logging
from collections.abc import Iterable

from ...cluster.process.log import fields
from .registry import Worker

logger = logging.getLogger(__name__)

LONE_DECODE_S = 10.0  # a prefill worker may start somewhat later than decode, or again


def lacks_prefill(workers: Iterable[Worker]) -> bool:
    """Whether decode workers serve, none of them aggregated, and no prefill worker."""
    serving = [worker for worker in workers if worker.is_serving]
    has_decode = any(worker.role == "decode" for worker in serving)
    return has_decode and not any(worker.role == "prefill" or worker.is_aggregated for worker in serving)


class LoneDecode:
    """Says it in the log, once each time that it lasts."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._is_told = False

    def __repr__(self) -> str:
        return f"LoneDecode({'told' if self._is_told else 'since ' + str(self._since)})"

    def look(self, workers: Iterable[Worker], now: float) -> None:
        """Looks at the workers at `now`, in monotonic seconds. Call it every second or so."""
        if not lacks_prefill(workers):
            if self._is_told:
                logger.info("a prefill worker serves again")
            self._since, self._is_told = None, False
            return
        if self._since is None:
            self._since = now
        if not self._is_told and now - self._since >= LONE_DECODE_S:
            self._is_told = True
            logger.warning(
                "no prefill worker serves: decode workers compute prompts, or requests wait",
                extra=fields(seconds=round(now - self._since, 1)),
            )
