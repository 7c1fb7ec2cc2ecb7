"""The hand-offs of a rank other than 0: does what rank 0 commands, and reports what happens.

The agent owns the rank's end of the KV plane. `run` is the loop of the rank's link thread.
"""

import logging
import threading
import time
from collections.abc import Callable

import zmq

from ...cluster.errors import LocalProtocolError
from ...cluster.process.log import fields
from ...engine.kv.page_order import PageOrder
from ..transport import Attached, Dropped, Freed, Lost, PollableTransport, PullRequest
from .channel import Channel, RankLost
from .messages import (
    AdvancePart,
    BeginRank,
    Command,
    OfferPart,
    PartGone,
    PullPart,
    RankCounters,
    RankReady,
    ReleasePart,
    Report,
    decode_command,
    encode,
    report_of,
)

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.2
SWEEP_S = 1.0  # between two reports of totals


class RankAgent:
    """Joins the rank's `transport` with the `channel` to rank 0.

    `order`: of the rank's pages. A page that is given to a pull gets a stamp there, because work of its
    earlier owners may still run on this rank.
    """

    def __init__(
        self,
        rank: int,
        transport: PollableTransport,
        channel: Channel,
        order: PageOrder | None = None,
        *,
        endpoint: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Tells rank 0 that the rank serves. `endpoint`: prefill's address for decode's ranks."""
        self.rank = rank
        self.transport = transport
        self._channel, self._order, self._clock = channel, order, clock
        self._counters_at = 0.0
        self._counters: dict[str, float] = {}
        self._tell(RankReady(rank, endpoint))

    def __repr__(self) -> str:
        return f"RankAgent(rank={self.rank}, {self.transport})"

    def turn(self) -> None:
        """Performs the commands that have arrived, does the due I/O and reports. Raises RankLost."""
        for data in self._channel.receive():
            self._perform(decode_command(data))
        for event in self.transport.poll(0.0):
            if not isinstance(event, Attached | Freed):
                self._tell(report_of(event))
        now = self._clock()
        if now >= self._counters_at + SWEEP_S:
            self._counters_at = now
            self._tell_counters()

    def next_deadline(self, now: float) -> float:
        """Latest monotonic time of the next turn."""
        at = self.transport.next_deadline(now)
        idle = now + (0.001 if self._channel.is_full else IDLE_WAIT_S)
        return idle if at is None else min(at, idle)

    def run(self, stopping: threading.Event) -> None:
        """Serves until `stopping` is set or rank 0 has gone; then closes the transport."""
        try:
            while not stopping.is_set():
                self.turn()
                self._wait()
        except RankLost as lost:
            logger.info("rank 0 has left", extra=fields(rank=self.rank, reason=str(lost)))
        finally:
            self.close()

    def close(self) -> None:
        """Ends the rank's rooms, and its channel. Idempotent."""
        self.transport.close()
        self._channel.close()

    def _wait(self) -> None:
        now = self._clock()
        wait = max(0.0, self.next_deadline(now) - now)
        poller = zmq.Poller()
        for fd in (*self.transport.pollables(), *self._channel.fds):
            poller.register(fd, zmq.POLLIN)
        poller.poll(int(wait * 1000) + (wait > 0))

    def _perform(self, command: Command) -> None:
        match command:
            case BeginRank():
                raise LocalProtocolError("rank 0 began twice")
            case OfferPart(offer=offer):
                try:
                    self.transport.offer(offer)
                except LocalProtocolError as error:
                    self._tell(report_of(Dropped(room=offer.room, epoch=offer.epoch, reason=str(error))))
            case AdvancePart():
                self.transport.advance(
                    command.room, command.epoch, command.tokens_ready, command.first_token, command.ready_at
                )
            case PullPart():
                self._pull(command)
            case ReleasePart(room=room, epoch=epoch, reason=reason):
                self.transport.release(room, epoch, reason)
                self._tell(PartGone(room, epoch))

    def _pull(self, part: PullPart) -> None:
        if self._order is not None:
            self._order.stamp(part.pages)
        request = PullRequest(
            room=part.room,
            epoch=part.epoch,
            num_tokens=part.num_tokens,
            have=part.have,
            pages=part.pages,
            features=None,
            endpoint=part.endpoint,
            peer_instance=part.peer_instance,
        )
        try:
            self.transport.pull(request)
        except LocalProtocolError as error:
            kind = type(error).__name__
            self._tell(report_of(Lost(room=part.room, epoch=part.epoch, kind=kind, reason=str(error))))

    def _tell_counters(self) -> None:
        counters = dict(self.transport.counters)
        if counters != self._counters:
            self._counters = counters
            self._tell(RankCounters(counters))

    def _tell(self, report: Report) -> None:
        self._channel.send(encode(report))
