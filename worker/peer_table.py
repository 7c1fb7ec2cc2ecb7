"""What ranks with data-parallel attention tell each other, in shared memory: the sizes of their next forward.

    words of 8 bytes   magic, ranks, order; then of each rank: turns posted, time of its last sign of life,
                       state, whether it rests; then two tables of wishes, one row for each rank

A rank writes its wish and then counts it as posted. It posts the next one only when all have posted this one
and it has read them, so two tables, used in turns, are enough. A rank that waits for others gives signs of
life: the silent one is the one that they wait for. The memory has no name: a child inherits its descriptor,
and it is freed with the last process.
"""

import mmap
import os
import select
import struct
import time
from collections.abc import Callable, Sequence
from enum import IntEnum

import msgspec
import numpy as np

from ..engine.errors import LifecycleError
from ..engine.parallel.lockstep import RanksLeft, Turn

MAGIC = 0x7372656570  # "peers"
WORD = 8
HEAD_WORDS, RANK_WORDS, WISH_WORDS = 3, 4, 8
POSTED, ALIVE, STATE, RESTS = range(RANK_WORDS)
ORDER = 2  # the word of the head
QUICK_LOOKS = 20  # before a rank that waits for others gives its core away
WAIT_S = 0.2  # between two signs of life of a rank that waits


class PeerOrder(IntEnum):
    """What rank 0 asks all ranks to do."""

    SERVE = 0
    DRAIN = 1
    STOP = 2


class PeerState(IntEnum):
    """How far a rank is."""

    SERVES = 0
    IS_DONE = 1  # it has drained, and joins the forwards of others
    HAS_LEFT = 2


class PeerDescriptors(msgspec.Struct, frozen=True):
    """The descriptors that ranks inherit: the table, and two eventfds of each rank. A rank waits for others
    with the first of its own; the second calls one that rests.
    """

    table: int
    ready: list[int]
    call: list[int]

    @classmethod
    def create(cls, num_ranks: int) -> "PeerDescriptors":
        """New ones. All ranks serve, and have posted nothing."""
        table = os.memfd_create("baton-peers", os.MFD_CLOEXEC)
        os.ftruncate(table, WORD * _num_words(num_ranks))
        os.pwrite(table, struct.pack("=QQ", MAGIC, num_ranks), 0)
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        ready, call = ([os.eventfd(0, flags) for _ in range(num_ranks)] for _ in range(2))
        return cls(table, ready, call)

    @property
    def all(self) -> tuple[int, ...]:
        """Every descriptor."""
        return (self.table, *self.ready, *self.call)


class PeerTable:
    """The table as rank `rank` of `num_ranks` sees it, an `engine.parallel.lockstep.Exchange`.

    `on_wait` is called again and again while the rank waits for others, and `clock_ns` returns monotonic
    nanoseconds. Raises ValueError for memory that is no such table.
    """

    def __init__(
        self,
        descriptors: PeerDescriptors,
        rank: int,
        num_ranks: int,
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        count = _num_words(num_ranks)
        if os.fstat(descriptors.table).st_size < WORD * count:
            raise ValueError(f"descriptor {descriptors.table} is no table of {num_ranks} ranks")
        self.rank, self.num_ranks = rank, num_ranks
        self.on_wait: Callable[[], None] = _nothing
        self._clock_ns = clock_ns
        self._descriptors = descriptors
        self._memory = mmap.mmap(descriptors.table, WORD * count)
        words = np.frombuffer(self._memory, dtype=np.uint64, count=count)
        if words[:2].tolist() != [MAGIC, num_ranks]:
            raise ValueError(f"descriptor {descriptors.table} is no table of {num_ranks} ranks")
        self._head = words[:HEAD_WORDS]
        ranks, rest = np.split(words[HEAD_WORDS:], [RANK_WORDS * num_ranks])
        self._ranks = ranks.reshape(num_ranks, RANK_WORDS)
        self._wishes = rest.reshape(2, num_ranks, WISH_WORDS)
        self._posted = 0
        self.beat()

    # --- forwards together ----------------------------------------------------------------------------------

    def swap(self, turn: Turn, wish: Sequence[int]) -> list[list[int]]:
        """As `Exchange.swap`."""
        number, width = self._posted + 1, 1 + len(wish)
        table = self._wishes[number % 2]
        table[self.rank, :width] = turn, *wish
        self._ranks[self.rank, RESTS] = 0
        self._ranks[self.rank, POSTED] = self._posted = number
        self._call_others()
        self._wait_for(number)
        found: list[list[int]] = table[:, :width].tolist()
        strangers = [rank for rank, row in enumerate(found) if row[0] != turn]
        if strangers:
            other = found[strangers[0]][0]
            raise LifecycleError(
                f"rank {self.rank} is in turn {turn.name} of round {number}, and rank {strangers[0]} in turn "
                f"{other}"
            )
        return [row[1:] for row in found]

    @property
    def is_called(self) -> bool:
        """As `Exchange.is_called`."""
        return bool(self._ranks[:, POSTED].max() > self._posted)

    def rest(self) -> None:
        """As `Exchange.rest`."""
        self._ranks[self.rank, RESTS] = 1

    def _call_others(self) -> None:
        for rank, rests in enumerate(self._ranks[:, RESTS].tolist()):
            if rank != self.rank:
                os.eventfd_write(self._descriptors.ready[rank], 1)
                if rests:
                    os.eventfd_write(self._descriptors.call[rank], 1)

    def _wait_for(self, number: int) -> None:
        """Returns when all ranks have posted so many turns. Raises RanksLeft."""
        posted, own = self._ranks[:, POSTED], self._descriptors.ready[self.rank]
        looks = 0
        while posted.min() < number:
            looks += 1
            if looks < QUICK_LOOKS:
                continue
            has_left = self._ranks[:, STATE] == PeerState.HAS_LEFT
            if bool((has_left & (posted < number)).any()):
                raise RanksLeft
            self.beat()
            self.on_wait()
            if select.select([own], [], [], WAIT_S)[0]:
                os.eventfd_read(own)

    # --- life -----------------------------------------------------------------------------------------------

    def wait_for_call(self, timeout_s: float) -> bool:
        """Whether another rank has called this one, which rests; waits for it."""
        own = self._descriptors.call[self.rank]
        if not select.select([own], [], [], timeout_s)[0]:
            return False
        os.eventfd_read(own)
        return True

    def beat(self) -> None:
        """Gives a sign of life."""
        self._ranks[self.rank, ALIVE] = self._clock_ns()

    def seen_alive(self, rank: int) -> int:
        """Nanoseconds of the monotonic clock at the last sign of life of `rank`; 0 before the first."""
        return int(self._ranks[rank, ALIVE])

    @property
    def order(self) -> PeerOrder:
        """What rank 0 asks for."""
        return PeerOrder(int(self._head[ORDER]))

    @order.setter
    def order(self, order: PeerOrder) -> None:
        if order > self.order:
            self._head[ORDER] = order
            self._call_others()

    def state_of(self, rank: int) -> PeerState:
        """How far `rank` is."""
        return PeerState(int(self._ranks[rank, STATE]))

    def enter(self, state: PeerState) -> None:
        """This rank is so far."""
        if state > self.state_of(self.rank):
            self._ranks[self.rank, STATE] = state
            self._call_others()

    @property
    def are_all_done(self) -> bool:
        """Whether all ranks have drained."""
        return bool((self._ranks[:, STATE] >= PeerState.IS_DONE).all())

    def __repr__(self) -> str:
        return f"<PeerTable rank {self.rank} of {self.num_ranks}, {self._posted} turns>"


def _num_words(num_ranks: int) -> int:
    return HEAD_WORDS + (RANK_WORDS + 2 * WISH_WORDS) * num_ranks


def _nothing() -> None:
    """While nobody is to be told."""
