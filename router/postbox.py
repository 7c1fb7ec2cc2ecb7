"""Frames to workers: kept in order for a connection that takes none right now, given up with the worker."""

from collections.abc import Callable

from ..cluster.codec import encode
from ..cluster.errors import PeerLost
from ..cluster.messages import ControlDown
from .registry import Worker

MAX_OUTBOX = 4096  # frames

Transmit = Callable[[bytes, bytes], bool]  # (identity, frame); False: its queue is full; raises PeerLost


class Postbox:
    """Sends through `transmit`, and marks a worker that cannot be reached with the time since when."""

    def __init__(self, transmit: Transmit) -> None:
        self._transmit = transmit

    def post(self, worker: Worker, message: ControlDown, now: float) -> None:
        """Sends, or keeps for `flush`."""
        frame = encode(message)
        if not worker.outbox and self._try(worker, frame, now):
            return
        worker.outbox.append(frame)
        if len(worker.outbox) > MAX_OUTBOX and worker.unreachable_since is None:
            worker.unreachable_since = now

    def flush(self, worker: Worker, now: float) -> None:
        """Sends what was kept, as far as the connection takes it."""
        while worker.outbox and self._try(worker, worker.outbox[0], now):
            worker.outbox.popleft()

    def answer(self, identity: bytes, message: ControlDown) -> bool:
        """Sends to a connection that is no registered worker's; False when it took nothing."""
        try:
            return self._transmit(identity, encode(message))
        except PeerLost:
            return False

    def _try(self, worker: Worker, frame: bytes, now: float) -> bool:
        try:
            return self._transmit(worker.identity, frame)
        except PeerLost:
            if worker.unreachable_since is None:
                worker.unreachable_since = now
            return False
