"""Messages to workers, kept in order while a connection takes none, and dropped with the worker."""

from collections.abc import Callable

from ...cluster.errors import PeerLost
from ...cluster.protocol.codec import encode, pack, send_waiting
from ...cluster.protocol.messages import ControlDown
from .registry import Worker

MAX_OUTBOX = 4096  # messages

# (identity, frame) -> False when its queue is full; raises PeerLost
Transmit = Callable[[bytes, bytes], bool]

Soon = Callable[[Callable[[], None]], None]  # calls at the end of this turn of the event loop


class Outbox:
    """Sends through `transmit`. Marks an unreachable worker with the time of the first failure.

    With `soon`, messages posted in one turn of the event loop leave together, in as few frames as the worker
    accepts. Waking ZeroMQ's thread for each message would cost more than the rest of a request.
    """

    def __init__(self, transmit: Transmit, clock: Callable[[], float], soon: Soon | None = None) -> None:
        self._transmit = transmit
        self._clock = clock
        self._soon = soon
        self._due: dict[str, Worker] = {}  # workers to be flushed at the end of this turn

    def post(self, worker: Worker, message: ControlDown, now: float) -> None:
        """Sends a message now, or with others at the end of this turn, or keeps it for `flush`."""
        worker.outbox.append(pack(message))
        self._flush_soon(worker, now)

    def greet(self, worker: Worker, message: ControlDown, now: float) -> None:
        """Puts a message before all that wait: a worker takes no order before its Welcome."""
        worker.outbox.appendleft(pack(message))
        self._flush_soon(worker, now)

    def _flush_soon(self, worker: Worker, now: float) -> None:
        if self._soon is None:
            self.flush(worker, now)
        else:
            if not self._due:
                self._soon(self._flush_due)
            self._due[worker.instance] = worker
        if len(worker.outbox) > MAX_OUTBOX and worker.unreachable_since is None:
            worker.unreachable_since = now

    def _flush_due(self) -> None:
        due, self._due = self._due, {}
        now = self._clock()
        for worker in due.values():
            self.flush(worker, now)

    def flush(self, worker: Worker, now: float) -> None:
        """Sends kept messages, as far as the connection takes them."""
        send_waiting(
            worker.outbox,
            lambda frame: self._try(worker, frame, now),
            takes_several=worker.hello.takes_batches,
        )

    def answer(self, identity: bytes, message: ControlDown) -> bool:
        """Sends to a connection without a registered worker.

        False when the connection did not accept the message.
        """
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
