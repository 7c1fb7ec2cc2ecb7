"""The other ranks of a tensor-parallel worker, as rank 0 sees them: child processes that do its plans.

    start   children inherit the ring of plans, an eventfd each, the memory in which the process group meets,
            and one end of a socket pair for the hand-off
    tell    a plan goes to all of them before rank 0 does it itself
    watch   a thread ends the whole worker when a rank has ended or hangs, with one line that names it
    close   the last plan, then an end by force

No child outlives rank 0: the kernel kills it with its parent.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from ..cluster.config.load import to_argv
from ..cluster.config.roles import WorkerConfig
from ..cluster.errors import StartupError
from ..cluster.process.log import PACKAGE
from ..cluster.process.process import EXIT_CRASHED
from ..cluster.process.sd_notify import without_manager
from ..engine.parallel.group import LIBRARY_SETTINGS
from ..engine.parallel.plans import LeavePlan, Plan, encode_plan
from .plan_ring import PlanRing, PlanWriter, RingFull
from .rank_watch import RankSign, RankWatch

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.25
SILENCE_SHARE = 0.6  # of --watchdog-s, so that the line comes before rank 0's own watchdog ends it
RING_LIMIT_S = 60.0  # for room in the ring, where the watchdog is off
EXPLAIN_S = 3.0  # for the watch to find the rank behind an error of rank 0
CLOSE_S = 5.0  # for ranks to end by themselves


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
    if config.tp > 1 and (config.host_cache_gib > 0 or config.disk_cache):
        flag = "--disk-cache" if config.disk_cache else "--host-cache-gib"
        raise StartupError(
            f"tp {config.tp}: {flag} keeps the pages of one device, and each rank has a part; start "
            "without it, or use tp 1"
        )


class Ranks:
    """Ranks 1 to `size` - 1. `end` ends this process at once; `links` go to the ranks' hand-off threads."""

    def __init__(
        self,
        processes: list[subprocess.Popen[bytes]],
        writer: PlanWriter,
        meeting: int,
        links: list[socket.socket],
        watch: RankWatch,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self.processes = processes
        self.writer = writer
        self.meeting = meeting
        self.links = links
        self._watch = watch
        self._end = end
        self._is_serving = False
        self._closing = threading.Event()

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
            processes.append(
                subprocess.Popen(
                    _command(config.role, place, flags),
                    pass_fds=(ring.fd, wake, meeting, theirs.fileno()),
                    env=rank_environment(),
                    stdin=subprocess.DEVNULL,
                )
            )
            theirs.close()
            wakes.append(wake)
            links.append(ours)
        limit_s = config.watchdog_s * SILENCE_SHARE
        writer = PlanWriter(ring, wakes, limit_s=limit_s or RING_LIMIT_S)
        ranks = cls(processes, writer, meeting, links, RankWatch(limit_s, LOOK_EVERY_S))
        threading.Thread(target=ranks.watch, name="ranks", daemon=True).start()
        logger.info("started ranks 1 to %d, pids %s", config.tp - 1, [each.pid for each in processes])
        return ranks

    @property
    def size(self) -> int:
        """Ranks of the worker, rank 0 included."""
        return len(self.processes) + 1

    @property
    def num_issued(self) -> int:
        """Plans sent so far."""
        return self.writer.num_issued

    @property
    def meeting_path(self) -> Path:
        """The file in which the process group meets."""
        return Path(f"/proc/self/fd/{self.meeting}")

    def tell(self, plan: Plan) -> None:
        """Sends `plan` to all ranks. A rank that leaves the ring full ends the worker."""
        try:
            self.writer.send(encode_plan(plan))
        except RingFull as error:
            process = self.processes[error.reader]
            self.fail(f"rank {error.reader + 1} (pid {process.pid}) takes no plans: {error}")

    def begin_serving(self) -> None:
        """From here on a rank without signs of life is lost."""
        self._is_serving = True

    def look(self) -> str:
        """Why the worker must end now; "" if all ranks live."""
        ring = self.writer.ring
        signs = [
            RankSign(
                rank=i + 1,
                pid=process.pid,
                code=process.poll(),
                seen_alive=ring.seen_alive(i),
                state=_state_of(process.pid),
            )
            for i, process in enumerate(self.processes)
        ]
        return self._watch.look(signs, is_serving=self._is_serving)

    def watch(self) -> None:
        """Looks after the ranks until `close`. Runs in a thread of its own."""
        while not self._closing.wait(LOOK_EVERY_S):
            reason = self.look()
            if reason and not self._is_serving and self._closing.wait(EXPLAIN_S):
                return  # rank 0 failed as well, and tells why
            if reason:
                self.fail(reason)
                return

    def fail(self, reason: str) -> None:
        """Ends the worker: one line, no rank left, no wait for a collective that cannot end."""
        logger.error("the worker ends: %s", reason)
        self.kill()
        self._end(EXIT_CRASHED)

    def explain(self, error: BaseException) -> None:
        """Called for an error of rank 0: raises StartupError, naming the rank, if a rank has ended.

        A collective fails with RuntimeError when another rank is gone.
        """
        until = time.monotonic() + EXPLAIN_S
        while isinstance(error, RuntimeError) and time.monotonic() < until:
            lost = [each for each in self.processes if each.poll() is not None]
            if lost:
                rank = self.processes.index(lost[0]) + 1
                raise StartupError(
                    f"rank {rank} (pid {lost[0].pid}) ended with exit code {lost[0].returncode}; its own "
                    "line tells why"
                ) from None
            time.sleep(LOOK_EVERY_S / 5)

    def kill(self) -> None:
        """Ends all ranks by force."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)

    def close(self, *, is_clean: bool = True) -> None:
        """Ends the ranks; after an error by force. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        if is_clean:
            self.writer.send(encode_plan(LeavePlan()))
        else:
            self.kill()
        until = time.monotonic() + CLOSE_S
        for process in self.processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("rank with pid %d does not end by itself", process.pid)
        self.kill()
        for process in self.processes:
            process.wait()
        for link in self.links:
            link.close()

    def __repr__(self) -> str:
        return f"<Ranks 1 to {self.size - 1}, {self.num_issued} plans>"


def rank_environment() -> dict[str, str]:
    """The environment of a rank: without a service manager, and with the settings of the collectives."""
    return without_manager(dict(LIBRARY_SETTINGS) | dict(os.environ))


def _command(role: str, place: RankPlace, flags: list[str]) -> list[str]:
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    placed = msgspec.json.encode(place).decode()
    return [sys.executable, *safe, "-m", f"{PACKAGE}.worker.rank_process", role, placed, *flags]


def _pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _state_of(pid: int) -> str:
    """The letter of a process's state; "" if the kernel does not tell."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]
