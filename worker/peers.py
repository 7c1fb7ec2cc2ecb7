"""Ranks with data-parallel attention: one decode worker each, whose forwards run in lockstep.

start   rank 0 starts the others; all inherit the table of `PeerTable` and the memory in which the process
        group meets
serve   each rank has links, rooms, pages and heartbeats of its own; a router sees as many workers
drain   rank 0 gets the signals and tells the others by the table; a rank that has drained goes on to join
        the forwards of the others, until all have
loss    the rank that dies or hangs ends the worker, all ranks of it, as `RankProcesses` says
"""

import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from ..cluster.config.load import to_argv
from ..cluster.config.roles import DecodeConfig
from ..cluster.process.process import EXIT_OK, Shutdown
from .peer_table import PeerDescriptors, PeerOrder, PeerState, PeerTable
from .rank_processes import RankProcesses, silence_limit, spawn_rank
from .rank_watch import RankSign

logger = logging.getLogger(__name__)

CALL_S = 0.5  # between two looks of the thread that waits for calls, whether the process ends


class PeerPlace(msgspec.Struct, frozen=True):
    """What a rank other than 0 needs beside the flags of its role. `group`: the instance of rank 0.
    Descriptors are inherited.
    """

    rank: int
    size: int
    parent: int
    meeting: int
    group: str
    descriptors: PeerDescriptors

    @property
    def meeting_path(self) -> Path:
        """The file in which the process group meets."""
        return Path(f"/proc/self/fd/{self.meeting}")

    def table(self) -> PeerTable:
        """The table as this rank sees it."""
        return PeerTable(self.descriptors, self.rank, self.size)


class PeerRanks(RankProcesses):
    """Ranks 1 to `size` - 1, which serve by themselves, and the `table` as rank 0 sees it."""

    def __init__(
        self,
        processes: list[subprocess.Popen[bytes]],
        meeting: int,
        table: PeerTable,
        limit_s: float,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        super().__init__(processes, meeting, limit_s, end)
        self.table = table

    @classmethod
    def start(cls, config: DecodeConfig, group: str) -> "PeerRanks":
        """Starts the ranks of a worker of `config.dp_attention`; each begins to load its part."""
        size = config.dp_attention
        descriptors = PeerDescriptors.create(size)
        meeting = os.memfd_create("baton-ranks", os.MFD_CLOEXEC)
        flags, processes = to_argv(config), []
        for rank in range(1, size):
            place = PeerPlace(rank, size, os.getpid(), meeting, group, descriptors)
            arguments = [msgspec.json.encode(place).decode(), *flags]
            processes.append(spawn_rank("decode.peer_process", arguments, (*descriptors.all, meeting)))
        limit_s = silence_limit(config.watchdog_s)
        ranks = cls(processes, meeting, PeerTable(descriptors, 0, size), limit_s)
        ranks.start_watch()
        return ranks

    def signs(self) -> list[RankSign]:
        """As `RankProcesses.signs`. Rank 0 waits for the others like them for it, so it counts, too."""
        if not self._is_serving:  # in the start all kinds of workers count it
            return super().signs()
        own = RankSign(rank=0, pid=os.getpid(), code=None, seen_alive=self.table.seen_alive(0))
        return [own, *super().signs()]

    def _seen_alive(self, rank: int) -> int:
        return self.table.seen_alive(rank)

    def _say_goodbye(self) -> None:
        self.table.order = PeerOrder.STOP
        self.table.enter(PeerState.HAS_LEFT)

    def _has_left(self, rank: int) -> bool:
        is_well = self.processes[rank - 1].poll() in (None, EXIT_OK)
        return is_well and self.table.state_of(rank) is PeerState.HAS_LEFT


class PeerLife:
    """The life of one rank beside that of the others.

    `feed` resets the watchdog at a time in monotonic seconds, which a rank that waits for others does, too.
    `nudge` wakes the main loop.
    """

    def __init__(
        self, table: PeerTable, shutdown: Shutdown, feed: Callable[[float], None], nudge: Callable[[], None]
    ) -> None:
        self.table = table
        self._shutdown = shutdown
        self._feed = feed
        self._nudge = nudge
        table.on_wait = lambda: self.turn(time.monotonic())

    def start(self) -> None:
        """Calls of other ranks wake this one from now on."""
        threading.Thread(target=self._hear, name="peers", daemon=True).start()

    def turn(self, now: float) -> None:
        """Gives a sign of life, and passes orders on: from rank 0's signals to the others."""
        self._feed(now)
        self.table.beat()
        drain, stop = self._shutdown.drain, self._shutdown.stop
        if self.table.rank == 0:
            self.table.order = PeerOrder.STOP if stop.is_set() else PeerOrder(int(drain.is_set()))
            return
        order = self.table.order
        if order >= PeerOrder.DRAIN:
            drain.set()
        if order is PeerOrder.STOP:
            stop.set()

    def may_leave(self) -> bool:
        """Whether the others need this rank no more, which has drained."""
        self.table.enter(PeerState.IS_DONE)
        return self.table.are_all_done

    def leave(self) -> None:
        """This rank joins no forward any more."""
        self.table.enter(PeerState.HAS_LEFT)

    def _hear(self) -> None:
        while self.table.state_of(self.table.rank) is not PeerState.HAS_LEFT:
            if self.table.wait_for_call(CALL_S):
                self._nudge()

    def __repr__(self) -> str:
        return f"<PeerLife {self.table!r}>"
