"""Both ends of the KV plane in one worker: the main one of its role, and one for prefixes, the other way.

    prefill   offers prompts to decode workers, and pulls prefixes from them
    decode    pulls prompts from prefill workers, and offers prefixes to them

The two ends share nothing but the pages of the pool. Rooms of prefixes have ids of their own, so a room is
known to one end only. Counters of the end for prefixes begin with `PREFIX`.
"""

from collections.abc import Sequence

from ...cluster.process.failpoints import Reach
from ..transport import Offer, PollableTransport, PullRequest, TransportEvent

PREFIX = "prefix_"  # of counters


class TwoWayTransport:
    """A transport that offers through `sender` and pulls through `receiver`, one of which is `main`."""

    frees_later = False

    def __init__(
        self, *, sender: PollableTransport, receiver: PollableTransport, main: PollableTransport
    ) -> None:
        assert main in (sender, receiver), main
        self._sender, self._receiver, self._main = sender, receiver, main
        self._other = receiver if main is sender else sender

    def __repr__(self) -> str:
        return f"TwoWayTransport({self._main!r}, for prefixes {self._other!r})"

    @property
    def reach(self) -> Reach:
        """The failpoints of the main end."""
        return self._main.reach

    @reach.setter
    def reach(self, reach: Reach) -> None:
        self._main.reach = reach

    def offer(self, offer: Offer) -> None:
        """As `KVTransport.offer`."""
        self._sender.offer(offer)

    def launched(self, room: str, epoch: int, start: int, tokens: int) -> None:
        """As `KVTransport.launched`."""
        self._sender.launched(room, epoch, start, tokens)

    def advance(
        self,
        room: str,
        epoch: int,
        tokens_ready: int,
        first_token: int | None = None,
        ready_at: float | None = None,
    ) -> None:
        """As `KVTransport.advance`."""
        self._sender.advance(room, epoch, tokens_ready, first_token, ready_at)

    def pull(self, request: PullRequest) -> None:
        """As `KVTransport.pull`."""
        self._receiver.pull(request)

    def poll(self, timeout: float) -> Sequence[TransportEvent]:
        """As `KVTransport.poll`; waits for the main end only."""
        return [*self._other.poll(0.0), *self._main.poll(timeout)]

    def release(self, room: str, epoch: int, reason: str) -> None:
        """As `KVTransport.release`."""
        self._sender.release(room, epoch, reason)
        self._receiver.release(room, epoch, reason)

    def close(self) -> None:
        """As `KVTransport.close`."""
        self._other.close()
        self._main.close()

    def pollables(self) -> list[int]:
        """As `PollableTransport.pollables`."""
        return [*self._main.pollables(), *self._other.pollables()]

    def next_deadline(self, now: float) -> float | None:
        """As `PollableTransport.next_deadline`."""
        times = [self._main.next_deadline(now), self._other.next_deadline(now)]
        return min((at for at in times if at is not None), default=None)

    @property
    def counters(self) -> dict[str, float]:
        """Totals by name, those of both ends."""
        others = {PREFIX + name: total for name, total in self._other.counters.items()}
        return {**self._main.counters, **others}
