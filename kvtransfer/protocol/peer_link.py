"""Decode's link to one prefill endpoint: the handshake, the rooms pulled over it, and the next requests.

At most `window` blocks are in flight per endpoint. Silence about a room makes decode ask again: the handshake (the process
may be another one), the Attach (an Announce may be lost), and each overdue block at most MAX_REPULLS times. After `PROBE_S`
without any message decode greets the peer again. A peer that leaves a greeting unanswered for `ANSWER_S` counts as gone: its
I/O thread answers even while a forward runs.
"""

from msgspec.structs import replace

from ...cluster.errors import HandshakeRefused
from ...cluster.protocol.messages import Announce, Attach, KVHello, KVRefused, KVWelcome, Pull
from ...cluster.security.ciphers import AES_128_GCM, CURVE
from .layout import KVLayout, agree
from .seal import Opener
from .session import MAX_REPULLS, InFlight, Peer, ReceiverRoom, ReceiverState, SendMessage

PROBE_S = 0.3  # of silence of a peer with open rooms
ANSWER_S = 0.7  # with PROBE_S: a pull waits no longer than a second for a peer that is dead or stopped
GREETING_S = 2.0  # for the first answer, which the making of a connection may delay


class PeerLink:
    """The link between this decode worker and one prefill endpoint."""

    def __init__(self, endpoint: Peer, hello: KVHello, *, window: int, silence_s: float, now: float) -> None:
        self.endpoint = endpoint
        self.instance = ""  # "" until the peer agreed
        self.layout: KVLayout | None = None
        self.cipher = ""  # as the peer's Welcome says
        self.rooms: dict[str, ReceiverRoom] = {}  # in the order of their turns
        self.idle_since = now
        self._hello = hello
        self._window = window
        self._silence_s = silence_s
        self._greeted_at = now
        self._heard_at = now
        self._asked_since: float | None = None  # first unanswered question

    def __repr__(self) -> str:
        state = "greeted" if self.layout else "greeting"
        return f"PeerLink({self.endpoint} {state} rooms={len(self.rooms)} in_flight={self.num_in_flight})"

    @property
    def num_in_flight(self) -> int:
        return sum(len(room.in_flight) for room in self.rooms.values())

    @property
    def is_sealing(self) -> bool:
        """Whether the peer's blocks are sealed."""
        return self.cipher == AES_128_GCM

    def is_greeted(self, instance: str) -> bool:
        """Whether the handshake with this process is done."""
        return self.layout is not None and self.instance == instance

    def hello(self, now: float) -> SendMessage:
        """The handshake's first message."""
        self._greeted_at = now
        if self._asked_since is None:
            self._asked_since = now
        return SendMessage(self.endpoint, self._hello)

    def heard(self, now: float) -> None:
        """A message of the peer arrived."""
        self._heard_at = now
        self._asked_since = None

    @property
    def probe_at(self) -> float:
        """When to greet again unless something is heard before."""
        return max(self._heard_at, self._greeted_at) + PROBE_S

    @property
    def gone_at(self) -> float | None:
        """When the peer counts as gone unless something is heard before; None while no question is open."""
        if self._asked_since is None:
            return None
        return self._asked_since + (GREETING_S if self.layout is None else ANSWER_S)

    def ends_at(self, idle_s: float, lease_s: float) -> float:
        """When a link without rooms is closed. With an open question it stays for a lease: a Release may be needed again."""
        return self.idle_since + (idle_s if self._asked_since is None else min(idle_s, lease_s))

    def welcome(self, ours: KVLayout, welcome: KVWelcome) -> None:
        """Stores the agreement. Raises HandshakeRefused for a Welcome that does not follow from our Hello."""
        common = agree(welcome.layout, ours.wire)
        if common != welcome.layout:
            raise HandshakeRefused("prefill's common KV layout is not the common one")
        if welcome.cipher not in self._hello.ciphers:
            accepted = ", ".join(self._hello.ciphers)
            raise HandshakeRefused(f"prefill chose cipher {welcome.cipher[:16]!r}, ours: {accepted}")
        if self.is_greeted(welcome.instance) and welcome.cipher != self.cipher:
            raise HandshakeRefused(f"prefill changed the cipher from {self.cipher} to {welcome.cipher}")
        self.instance, self.layout, self.cipher = welcome.instance, KVLayout(common), welcome.cipher

    def fall_back(self) -> KVRefused | None:
        """The port for sealed blocks does not answer: from now on only CURVE is offered, and the handshake is void.

        Returns the refusal that ends the link's rooms where the settings do not allow CURVE.
        """
        if CURVE not in self._hello.ciphers:
            reason = f"its port for blocks does not answer, and --kv-cipher {self.cipher} takes them from nowhere else"
            return KVRefused(instance=self.instance, reason=reason)
        self._hello = replace(self._hello, ciphers=(CURVE,))
        self.instance = ""  # what was agreed is void
        return None

    def take_key(self, room: ReceiverRoom, announce: Announce) -> None:
        """Stores the key of sealed blocks, which comes with the first ready tokens; else raises RemoteProtocolError."""
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
        for _ in range(self._window - self.num_in_flight):
            room = next((r for r in self.rooms.values() if r.has_block_to_pull), None)
            if room is None:
                break
            if not room.in_flight:
                room.heard_at = now
                room.lease.renew(now)
            room.in_flight[room.next_block] = InFlight(now)
            pulls.append(self._pull(room, room.next_block))
            room.next_block += 1
        return pulls

    def repull(self, room: ReceiverRoom, block: int, now: float) -> SendMessage:
        """Asks for a block once more."""
        in_flight = room.in_flight[block]
        in_flight.num_repulls += 1
        in_flight.sent_at = now
        return self._pull(room, block)

    def ask_at(self, room: ReceiverRoom) -> float:
        """When silence about the room has lasted long enough to ask again."""
        if room.state is ReceiverState.GREETING:
            return self._greeted_at + self._silence_s
        return room.heard_at + self._silence_s

    def ask_again(self, room: ReceiverRoom, now: float) -> list[SendMessage]:
        """Repeats what may have been lost of one room; the handshake is repeated for all of them together."""
        if room.state is ReceiverState.GREETING:
            return []
        questions = [self.attach(room, now)]
        for block, in_flight in room.in_flight.items():
            if in_flight.num_repulls < MAX_REPULLS and now >= in_flight.sent_at + self._silence_s:
                questions.append(self.repull(room, block, now))
        return questions

    def ask_anew(self, room: ReceiverRoom, now: float) -> list[SendMessage]:
        """Asks for everything of a room again, over a new connection.

        Blocks that a broken connection lost do not count as repeats. Otherwise a few broken connections would use up the
        repeats of every block in flight, and their rooms would wait for the end of their lease.
        """
        for in_flight in room.in_flight.values():
            in_flight.sent_at = now
        return [self.attach(room, now), *(self._pull(room, block) for block in room.in_flight)]

    def _pull(self, room: ReceiverRoom, block: int) -> SendMessage:
        request = room.request
        pull = Pull(room=request.room, epoch=request.epoch, instance=self._hello.instance, block=block)
        return SendMessage(self.endpoint, pull)
