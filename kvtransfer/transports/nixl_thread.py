"""The thread that makes all calls of NIXL, since some take a second and each may wait for a peer.

The link thread gives orders and takes their results; a descriptor wakes it. The agent is opened by the
first order, so a worker whose peers are all on its host opens no port.

A read that has begun cannot be stopped. What it writes into stays registered and allocated until it has
ended, whatever becomes of its room and its peer.
"""

import os
import queue
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

from ..memory.pinning import Bytes
from ..memory.slab import SlabError
from .nixl_agent import NixlAgent, OpenAgent, Region

PIECE_BYTES = 256 << 10  # what one descriptor covers: a short block does not read its whole slot
BUSY_S = 0.0001  # between two looks at reads that are under way, ours or of peers
IDLE_S = 0.005  # between two looks for peers that connect or go
JOIN_S = 2.0


@dataclass(frozen=True)
class Slots:
    """Equal slots in one run of memory, `num_slots` of `slot_bytes` bytes from `base` on."""

    base: int
    num_slots: int
    slot_bytes: int

    @property
    def region(self) -> Region:
        """All of the memory."""
        return self.base, self.num_slots * self.slot_bytes

    @property
    def pieces(self) -> list[Region]:
        """The memory of every descriptor, slot by slot."""
        return [
            (self.base + slot * self.slot_bytes + at, min(PIECE_BYTES, self.slot_bytes - at))
            for slot in range(self.num_slots)
            for at in range(0, self.slot_bytes, PIECE_BYTES)
        ]

    def indexes(self, slot: int, size: int) -> range:
        """The descriptors of the first `size` bytes of a slot."""
        first = slot * -(-self.slot_bytes // PIECE_BYTES)
        return range(first, first + -(-size // PIECE_BYTES))


def address_of(memory: Bytes) -> int:
    """The address of an array."""
    return int(memory.__array_interface__["data"][0])


# --- orders of the link thread ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Open:
    """Opens the agent, for `lane`."""

    lane: str


@dataclass(frozen=True)
class Share:
    """Registers prefill's memory for the reads of one peer."""

    lane: str
    memory: Bytes


@dataclass(frozen=True)
class Connect:
    """Prepares reads from the slots `remote` of agent `agent` into `memory`, whose slots are alike."""

    lane: str
    agent: str
    metadata: bytes
    remote: Slots
    memory: Bytes


@dataclass(frozen=True)
class Read:
    """Reads `size` bytes of the peer's slot `slot` into our slot `landing`."""

    lane: str
    slot: int
    landing: int
    size: int


@dataclass(frozen=True)
class Leave:
    """Ends a lane of either side, once its reads have ended."""

    lane: str


# --- what became of them ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Opened:
    """The agent is open."""

    lane: str


@dataclass(frozen=True)
class Shared:
    """The memory can be read by whoever has the metadata."""

    lane: str
    agent: str
    metadata: bytes


@dataclass(frozen=True)
class Connected:
    """Reads may begin."""

    lane: str


@dataclass(frozen=True)
class ReadEnded:
    """A read has written its landing slot, or failed for `reason` and writes no more."""

    lane: str
    landing: int
    reason: str = ""


@dataclass(frozen=True)
class Failed:
    """The lane cannot be used."""

    lane: str
    reason: str


@dataclass(frozen=True)
class Left:
    """Nothing reads or writes the lane's memory any more. Prefill's is zeroed."""

    lane: str
    memory: Bytes = field(repr=False)


Order = Open | Share | Connect | Read | Leave
Outcome = Opened | Shared | Connected | ReadEnded | Failed | Left


@dataclass
class _Lane:
    """The records of one lane on this thread."""

    memory: Bytes
    registered: object
    remote: Slots | None = None  # of decode only
    agent: str = ""
    lists: tuple[object, object] | None = None  # of our slots, of the peer's
    reads: dict[int, object] = field(default_factory=dict)  # by landing slot
    is_leaving: bool = False


class NixlThread:
    """One agent and its thread. `name`: of the agent, unique among all workers."""

    def __init__(self, open_agent: OpenAgent, name: str) -> None:
        self._open_agent, self._name = open_agent, name
        # No SimpleQueue: before Python 3.13 its `get` waits without limit if the thread loses its core for
        # `timeout` just before the wait. Reads under way would stand still until the next order.
        self._orders: queue.Queue[Order | None] = queue.Queue()
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._agent: NixlAgent | None = None
        self._lanes: dict[str, _Lane] = {}
        self._known: set[str] = set()  # other agents
        self._is_serving = False
        self._ends_at: float | None = None
        self._thread: threading.Thread | None = None
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __repr__(self) -> str:
        return f"NixlThread({self._name[:8]}, lanes={len(self._lanes)})"

    @property
    def wake_fds(self) -> list[int]:
        """A descriptor that is readable while there are outcomes; none after `close`."""
        return [self._wake_fd] if self._ends_at is None else []

    def order(self, order: Order) -> None:
        """Has an order carried out."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="nixl", daemon=True)
            self._thread.start()
        self._orders.put(order)

    def serve(self, *, is_serving: bool) -> None:
        """Whether peers may be reading our memory now, so that the thread makes progress often."""
        is_news = is_serving and not self._is_serving
        self._is_serving = is_serving
        if is_news and self._thread is not None:
            self._orders.put(None)  # ends its sleep

    def outcomes(self) -> list[Outcome]:
        """What became of orders since the last call."""
        if self._thread is None or self._ends_at is not None:
            return []
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        found: list[Outcome] = []
        with suppress(queue.Empty):
            while True:
                found.append(self._outcomes.get_nowait())
        return found

    def close(self) -> None:
        """Ends the thread and closes the agent's connections. Idempotent.

        A thread that hangs in a call is left behind; it does not keep the process.
        """
        if self._ends_at is not None:
            return
        self._ends_at = time.monotonic() + JOIN_S / 2
        if self._thread is not None:
            self._orders.put(None)
            self._thread.join(JOIN_S)
            if self._thread.is_alive():
                return  # it may still write the descriptor
        os.close(self._wake_fd)

    # --- on the thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._ends_at is None or (self._num_reads and time.monotonic() < self._ends_at):
            try:
                order = self._orders.get(timeout=self._pause())
                if order is not None:
                    self._carry_out(order)
            except queue.Empty:
                pass
            self._look()
        if not self._num_reads:
            for lane in list(self._lanes):
                self._end(lane)
            self._agent = None

    @property
    def _num_reads(self) -> int:
        return sum(len(lane.reads) for lane in self._lanes.values())

    def _pause(self) -> float | None:
        if self._num_reads or (self._is_serving and self._lanes):
            return BUSY_S
        return IDLE_S if self._lanes else None

    def _carry_out(self, order: Order) -> None:
        try:
            if isinstance(order, Leave):
                self._leave(order.lane)
            elif isinstance(order, Read):
                self._read(order)
            elif self._ends_at is None:
                self._open(order)
        except SlabError as error:
            self._tell(Failed(order.lane, str(error)))

    def _open(self, order: Open | Share | Connect) -> None:
        if self._agent is None:
            self._agent = self._open_agent(self._name)
        if isinstance(order, Open):
            self._tell(Opened(order.lane))
        elif isinstance(order, Share):
            self._share(self._agent, order)
        else:
            self._connect(self._agent, order)

    def _share(self, agent: NixlAgent, order: Share) -> None:
        registered = agent.register((address_of(order.memory), order.memory.size))
        try:
            metadata = agent.metadata(registered)
        except SlabError:
            with suppress(SlabError):
                agent.deregister(registered)
            raise
        self._lanes[order.lane] = _Lane(order.memory, registered)
        self._tell(Shared(order.lane, agent.name, metadata))

    def _connect(self, agent: NixlAgent, order: Connect) -> None:
        name = agent.add_remote(order.metadata)
        self._known.add(name)
        if name != order.agent:
            self._forget(agent, name)
            raise SlabError(f"the metadata is that of agent {name[:40]!r}, not of {order.agent[:40]!r}")
        remote, memory = order.remote, order.memory
        registered = agent.register((address_of(memory), memory.size))
        lane = _Lane(memory, registered, remote, name)
        try:
            ours = Slots(address_of(memory), remote.num_slots, remote.slot_bytes)
            lane.lists = agent.prepare("", ours.pieces), agent.prepare(name, remote.pieces)
        except SlabError:
            agent.deregister(registered)
            self._forget(agent, name)
            raise
        self._lanes[order.lane] = lane
        self._tell(Connected(order.lane))

    def _read(self, order: Read) -> None:
        lane = self._lanes.get(order.lane)
        if lane is None or self._agent is None or lane.lists is None or lane.remote is None:
            self._tell(ReadEnded(order.lane, order.landing, "the lane is not connected"))
            return
        into = lane.remote.indexes(order.landing, order.size)
        of = lane.remote.indexes(order.slot, order.size)
        try:
            lane.reads[order.landing] = self._agent.read(*lane.lists, into, of)
        except SlabError as error:
            self._tell(ReadEnded(order.lane, order.landing, str(error)))

    def _look(self) -> None:
        """Makes progress, and tells of the reads that have ended."""
        if self._agent is None:
            return
        for name, lane in list(self._lanes.items()):
            for landing, read in list(lane.reads.items()):
                reason = ""
                try:
                    if not self._agent.is_done(read):
                        continue
                except SlabError as error:
                    reason = str(error)
                del lane.reads[landing]
                with suppress(SlabError):
                    self._agent.release(read)
                self._tell(ReadEnded(name, landing, reason))
            if lane.is_leaving and not lane.reads:
                self._end(name)
        if self._lanes:
            with suppress(SlabError):
                self._agent.progress()

    def _leave(self, name: str) -> None:
        lane = self._lanes.get(name)
        if lane is not None:
            lane.is_leaving = True  # ends by the next look, or behind its last read

    def _end(self, name: str) -> None:
        lane, agent = self._lanes.pop(name), self._agent
        assert agent is not None, "a lane has an agent"
        for prepared in lane.lists or ():
            with suppress(SlabError):
                agent.release_list(prepared)
        self._forget(agent, lane.agent)
        with suppress(SlabError):
            agent.deregister(lane.registered)
        if lane.remote is None:
            lane.memory[:] = 0  # the next pair must not read it
        self._tell(Left(name, lane.memory))

    def _forget(self, agent: NixlAgent, name: str) -> None:
        """Forgets another agent that no lane uses."""
        if name in self._known and all(lane.agent != name for lane in self._lanes.values()):
            self._known.discard(name)
            with suppress(SlabError):
                agent.remove_remote(name)

    def _tell(self, outcome: Outcome) -> None:
        if self._ends_at is not None:
            return  # nobody listens, and the descriptor may be closed
        self._outcomes.put(outcome)
        os.eventfd_write(self._wake_fd, 1)
