"""The other ranks of a tensor-parallel worker, as rank 0 sees them: child processes that do its plans.

    start   children inherit the ring of plans, an eventfd each, the memory in which the process group meets,
            and one end of a socket pair for the hand-off
    tell    a plan goes to all of them before rank 0 does it itself
    close   the last plan, then an end by force

`RankProcesses` watches them.
"""

import os
import socket
import subprocess
import threading
from collections.abc import Callable

import msgspec

from ..cluster.config.load import to_argv
from ..cluster.config.roles import WorkerConfig
from ..cluster.errors import StartupError
from ..engine.engine import Engine
from ..engine.parallel.plan_messages import LeavePlan, Plan, encode_plan
from .plan_ring import PlanRing, PlanWriter, RingFull
from .rank_processes import RankProcesses, silence_limit, spawn_rank

LEAVE_S = 2.0  # for rank 0 to leave the process group when the others have
RING_LIMIT_S = 60.0  # for room in the ring, where the watchdog is off


class RankPlace(msgspec.Struct, frozen=True):
    """What a child needs beside its role's flags. Descriptors are inherited."""

    rank: int
    size: int
    instance: str
    parent: int
    ring: int
    wake: int
    meeting: int
    link: int


def check_rank_settings(config: WorkerConfig) -> None:
    """Raises StartupError for a setting that several ranks do not have."""
    if config.tensor_ranks > 1 and (config.host_cache_gib > 0 or config.disk_cache):
        flag = "--disk-cache" if config.disk_cache else "--host-cache-gib"
        raise StartupError(
            f"tp {config.tp}: {flag} keeps the pages of one device, and each rank has a part; start "
            "without it, or use tp 1"
        )


class Ranks(RankProcesses):
    """Ranks 1 to `size` - 1, which do plans. `links` go to their hand-off threads."""

    def __init__(
        self,
        processes: list[subprocess.Popen[bytes]],
        writer: PlanWriter,
        meeting: int,
        links: list[socket.socket],
        limit_s: float,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        super().__init__(processes, meeting, limit_s, end)
        self.writer = writer
        self.links = links
        self._engine: Engine | None = None
        self._leaving: threading.Thread | None = None

    @classmethod
    def start(cls, config: WorkerConfig, instance: str) -> "Ranks":
        """Starts the ranks of a worker of `config.tp`; each begins to load its part."""
        ring = PlanRing.create(config.tp - 1)
        meeting = os.memfd_create("baton-ranks", os.MFD_CLOEXEC)
        processes, wakes, links = [], [], []
        flags = to_argv(config)
        for rank in range(1, config.tp):
            wake, (ours, theirs) = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK), _pair()
            place = RankPlace(
                rank=rank,
                size=config.tp,
                instance=instance,
                parent=os.getpid(),
                ring=ring.fd,
                wake=wake,
                meeting=meeting,
                link=theirs.fileno(),
            )
            arguments = [config.role, msgspec.json.encode(place).decode(), *flags]
            fds = (ring.fd, wake, meeting, theirs.fileno())
            processes.append(spawn_rank("worker.rank_process", arguments, fds))
            theirs.close()
            wakes.append(wake)
            links.append(ours)
        limit_s = silence_limit(config.watchdog_s)
        writer = PlanWriter(ring, wakes, limit_s=limit_s or RING_LIMIT_S)
        ranks = cls(processes, writer, meeting, links, limit_s)
        ranks.start_watch()
        return ranks

    @property
    def num_issued(self) -> int:
        """Plans sent so far."""
        return self.writer.num_issued

    def lead(self, engine: Engine) -> None:
        """`engine`, that of rank 0, tells its plans to the other ranks, and leaves their group with them."""
        engine.tell = self.tell
        self._engine = engine

    def tell(self, plan: Plan) -> None:
        """Sends `plan` to all ranks. A rank that leaves the ring full ends the worker."""
        try:
            self.writer.send(encode_plan(plan))
        except RingFull as error:
            process = self.processes[error.reader]
            self.fail(f"rank {error.reader + 1} (pid {process.pid}) takes no plans: {error}")

    def close(self, *, is_clean: bool = True) -> None:
        """As `RankProcesses.close`."""
        super().close(is_clean=is_clean)
        if self._leaving is not None:
            self._leaving.join(LEAVE_S)
        for link in self.links:
            link.close()

    def _seen_alive(self, rank: int) -> int:
        return self.writer.ring.seen_alive(rank - 1)

    def _say_goodbye(self) -> None:
        """The end of a process group of GPUs waits for all ranks, so rank 0 leaves it while the others do."""
        self.writer.send(encode_plan(LeavePlan()))
        if self._engine is not None:
            self._leaving = threading.Thread(target=self._engine.leave_ranks, name="leave", daemon=True)
            self._leaving.start()


def _pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
