"""Decode's link to one prefill endpoint: the handshake, the rooms pulled over it, and the next requests.

At most `window` blocks are in flight per endpoint. When a room stays silent, decode repeats its requests: the
handshake (another process may have taken the endpoint), the Attach (the Announce may be lost), and each
overdue block, at most MAX_REPULLS times. After `PROBE_S` seconds without any message, decode greets the peer
again. A peer that does not answer a greeting within `ANSWER_S` seconds counts as gone, because its I/O thread
answers even while a forward runs.
"""

from msgspec.structs import replace

from ...cluster.errors import HandshakeRefused
from ...cluster.protocol.messages import Announce, Attach, KVHello, KVRefused, KVWelcome, Pull
from ...cluster.security.ciphers import AES_128_GCM, CURVE
from .layout import KVLayout, agree
from .rank_pairs import Shard, sources_of
from .seal import Opener
from .session import MAX_REPULLS, InFlight, Peer, ReceiverRoom, ReceiverState, SendMessage

PROBE_S = 0.3  # silence of a peer with open rooms before decode greets it again
ANSWER_S = 0.7  # PROBE_S + ANSWER_S: a pull waits at most one second for a dead or stopped peer
GREETING_S = 2.0  # limit of the first answer; connecting may delay it


class PeerLink:
    """The link between this decode worker and one prefill endpoint."""

    def __init__(self, endpoint: Peer, hello: KVHello, *, window: int, silence_s: float, now: float) -> None:
        self.endpoint = endpoint
        self.instance = ""  # "" until the peer agreed
        self.layout: KVLayout | None = None  # of this pair of ranks
        self.rank_endpoints: tuple[str, ...] = ()  # of all of the worker's ranks, if the peer is rank 0
        self.cipher = ""  # from the peer's Welcome
        self.rooms: dict[str, ReceiverRoom] = {}  # in the order of their turns
        self.idle_since = now
        self.progressed_at = now  # blocks of some room came, for which the others wait
        self._to_pull: dict[str, ReceiverRoom] = {}  # the rooms that may have blocks to pull
        self._num_opened = 0
        self._hello = hello
        self._default_window = self._window = window
        self._run_blocks = 1
        self._silence_s = silence_s
        self._greeted_at = now
        self._heard_at = now
        self._asked_since: float | None = None  # first unanswered question

    def __repr__(self) -> str:
        state = "greeted" if self.layout else "greeting"
        return f"PeerLink({self.endpoint} {state} rooms={len(self.rooms)} in_flight={self.num_in_flight})"

    def add(self, room: ReceiverRoom) -> None:
        """Opens a room, behind all others."""
        self.rooms[room.request.room] = room
        room.turn, self._num_opened = self._num_opened, self._num_opened + 1

    def remove(self, room: ReceiverRoom, now: float) -> None:
        """Ends a room."""
        del self.rooms[room.request.room]
        self._to_pull.pop(room.request.room, None)
        self.idle_since = now

    def may_pull(self, room: ReceiverRoom) -> None:
        """Notes that more blocks of an open room are ready than before."""
        self._to_pull[room.request.room] = room

    @property
    def num_in_flight(self) -> int:
        """Pulled blocks without an answer, over all rooms."""
        return sum(len(room.in_flight) for room in self.rooms.values())

    @property
    def num_pulls(self) -> int:
        """Pulls with blocks in flight, over all rooms."""
        return sum(room.num_pulls for room in self.rooms.values())

    @property
    def is_sealing(self) -> bool:
        """Whether the peer seals its blocks."""
        return self.cipher == AES_128_GCM

    def is_greeted(self, instance: str) -> bool:
        """Whether the handshake with process `instance` is done."""
        return self.layout is not None and self.instance == instance

    @property
    def sources(self) -> tuple[int, ...]:
        """The ranks of prefill from which this rank pulls. The handshake must be done."""
        assert self.layout is not None
        wire, sender = self.layout.wire, self.layout.sender
        return sources_of(wire.num_kv_heads, self.layout.receiver, sender.num_ranks)

    def pull_runs(self, run_blocks: int, window: int | None) -> None:
        """From now on, one pull asks for up to `run_blocks` blocks of a room.

        `window`: pulls in flight; None: as many as the settings allow.
        """
        self._run_blocks = run_blocks
        self._window = self._default_window if window is None else min(window, self._default_window)

    def hello(self, now: float) -> SendMessage:
        """The handshake's first message."""
        self._greeted_at = now
        if self._asked_since is None:
            self._asked_since = now
        return SendMessage(self.endpoint, self._hello)

    def heard(self, now: float) -> None:
        """Records that a message of the peer arrived at `now`."""
        self._heard_at = now
        self._asked_since = None

    @property
    def probe_at(self) -> float:
        """Monotonic time of the next greeting, unless a message arrives before."""
        return max(self._heard_at, self._greeted_at) + PROBE_S

    @property
    def gone_at(self) -> float | None:
        """Monotonic time at which the peer counts as gone, unless a message arrives before.

        None while no question is open.
        """
        if self._asked_since is None:
            return None
        return self._asked_since + (GREETING_S if self.layout is None else ANSWER_S)

    def ends_at(self, idle_s: float, lease_s: float) -> float:
        """Monotonic time at which a link without rooms closes.

        A link with an open question stays for a whole lease, because a Release may have to be repeated.
        """
        return self.idle_since + (idle_s if self._asked_since is None else min(idle_s, lease_s))

    def welcome(self, ours: KVLayout, welcome: KVWelcome) -> None:
        """Stores the agreement. Raises HandshakeRefused for a Welcome that does not follow from our Hello."""
        common = agree(welcome.layout, ours.wire)
        if common != welcome.layout:
            raise HandshakeRefused("prefill's common KV layout is not the common one")
        if welcome.num_ranks == 0 and ours.receiver.num_ranks > 1:
            raise HandshakeRefused(
                f"decode has {ours.receiver.num_ranks} tensor-parallel ranks, and prefill's release knows of "
                "no ranks: run the same release on every host"
            )
        try:
            sender = Shard(welcome.rank, max(1, welcome.num_ranks))
            layout = KVLayout(common, sender=sender, receiver=ours.receiver)
        except ValueError as error:
            raise HandshakeRefused(f"prefill is {error}") from None
        if sender.num_ranks > 1 and sender.rank == 0 and len(welcome.rank_endpoints) != sender.num_ranks:
            raise HandshakeRefused(
                f"prefill names {len(welcome.rank_endpoints)} addresses of {sender.num_ranks} ranks"
            )
        if welcome.cipher not in self._hello.ciphers:
            accepted = ", ".join(self._hello.ciphers)
            raise HandshakeRefused(f"prefill chose cipher {welcome.cipher[:16]!r}, ours: {accepted}")
        if self.is_greeted(welcome.instance) and welcome.cipher != self.cipher:
            raise HandshakeRefused(f"prefill changed the cipher from {self.cipher} to {welcome.cipher}")
        self.instance, self.layout, self.cipher = welcome.instance, layout, welcome.cipher
        self.rank_endpoints = welcome.rank_endpoints

    def fall_back(self) -> KVRefused | None:
        """Gives up sealed blocks because their port does not answer.

        The handshake is void; later ones offer CURVE only.

        Returns the refusal that ends the link's rooms if the settings do not allow CURVE, else None.
        """
        if CURVE not in self._hello.ciphers:
            reason = (
                f"its port for blocks does not answer, "
                f"and --kv-cipher {self.cipher} takes them from nowhere else"
            )
            return KVRefused(instance=self.instance, reason=reason)
        self._hello = replace(self._hello, ciphers=(CURVE,))
        self.instance = ""  # the agreement is void
        return None

    def take_key(self, room: ReceiverRoom, announce: Announce) -> None:
        """Stores the transfer key of sealed blocks, which comes with the first ready tokens.

        Raises RemoteProtocolError if the Announce has no key, or the key does not fit.
        """
        if not self.is_sealing or (not announce.tokens_ready and not announce.key):
            return
        if room.opener is None or room.opener.key != announce.key:
            room.opener = Opener(announce.key)

    def attach(self, room: ReceiverRoom, now: float) -> SendMessage:
        """Asks for a room's announcements."""
        room.heard_at = now
        request = room.request
        attach = Attach(
            room=request.room, epoch=request.epoch, instance=self._hello.instance, have=request.have
        )
        return SendMessage(self.endpoint, attach)

    def fill(self, now: float) -> list[SendMessage]:
        """Pulls until the window is full, the oldest room first.

        On a slow link, turns would make all rooms late together; in order of age the last room ends no later.
        """
        pulls: list[SendMessage] = []
        num_left = self._window - self.num_pulls if self._to_pull else 0
        for room in sorted(self._to_pull.values(), key=_turn_of):  # most rooms wait for their forward
            while room.num_to_pull:
                if num_left <= 0:
                    return pulls
                if not room.in_flight:
                    room.heard_at = now
                    room.lease.renew(now)
                first, count = room.next_block, min(self._run_blocks, room.num_to_pull)
                room.in_flight.update(dict.fromkeys(range(first, first + count), InFlight(now)))
                pulls.append(self._pull(room, first, count))
                room.pulled(count)
                num_left -= 1
            del self._to_pull[room.request.room]
        return pulls

    def lease_end(self, room: ReceiverRoom, lease_s: float) -> float:
        """Monotonic time at which a room counts as stuck. One that waits for its turn is not, while others
        progress.
        """
        if room.in_flight:
            return room.lease.ends_at
        return max(room.lease.ends_at, self.progressed_at + lease_s)

    def repull(self, room: ReceiverRoom, block: int, now: float, count: int = 1) -> SendMessage:
        """Asks for the blocks [block, block + count), all in flight, once more."""
        num_repulls = room.in_flight[block].num_repulls + 1
        again = InFlight(now, num_repulls)
        room.in_flight.update(dict.fromkeys(range(block, block + count), again))
        return self._pull(room, block, count)

    def ask_at(self, room: ReceiverRoom) -> float:
        """Monotonic time at which the room has been silent for long enough to repeat requests."""
        if room.state is ReceiverState.GREETING:
            return self._greeted_at + self._silence_s
        return room.heard_at + self._silence_s

    def ask_again(self, room: ReceiverRoom, now: float) -> list[SendMessage]:
        """Repeats the messages of one room that may be lost. The handshake is repeated once for all rooms."""
        if room.state is ReceiverState.GREETING:
            return []
        questions = [self.attach(room, now)]
        for block, count in runs_in_flight(room):
            in_flight = room.in_flight[block]
            if in_flight.num_repulls < MAX_REPULLS and now >= in_flight.sent_at + self._silence_s:
                questions.append(self.repull(room, block, now, count))
        return questions

    def ask_anew(self, room: ReceiverRoom, now: float) -> list[SendMessage]:
        """Repeats all requests of a room over a new connection.

        Blocks that a broken connection lost do not count as repeats. Otherwise a few broken connections would
        use up the repeats of every block in flight, and their rooms would wait for the end of their lease.
        """
        for in_flight in room.in_flight.values():
            in_flight.sent_at = now
        return [self.attach(room, now), *(self._pull(room, *run) for run in runs_in_flight(room))]

    def _pull(self, room: ReceiverRoom, block: int, count: int) -> SendMessage:
        request = room.request
        pull = Pull(
            room=request.room, epoch=request.epoch, instance=self._hello.instance, block=block, count=count
        )
        return SendMessage(self.endpoint, pull)


def _turn_of(room: ReceiverRoom) -> int:
    return room.turn


def runs_in_flight(room: ReceiverRoom) -> list[tuple[int, int]]:
    """(first block, count) of each run of neighbours that one pull asked for."""
    runs: list[tuple[int, int]] = []
    for block in sorted(room.in_flight):
        first, count = runs[-1] if runs else (-1, 0)
        if block == first + count and room.in_flight[block] is room.in_flight[first]:
            runs[-1] = first, count + 1
        else:
            runs.append((block, 1))
    return runs
