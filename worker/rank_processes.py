"""The processes of the other ranks of a worker, which rank 0 starts, watches and ends.

    watch   a thread ends the whole worker when a rank has ended or hangs, with one line that names it
    close   the ranks end by themselves, then by force

No child outlives rank 0: the kernel kills it with its parent. What the ranks do is up to `Ranks` (tensor
parallel) and `PeerRanks` (data-parallel attention).
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

from ..cluster.errors import StartupError
from ..cluster.process.log import PACKAGE
from ..cluster.process.process import EXIT_CRASHED
from ..cluster.process.sd_notify import without_manager
from ..engine.errors import RanksApart
from ..engine.parallel.group import LIBRARY_SETTINGS
from .rank_watch import RankSign, RankWatch

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.25
SILENCE_SHARE = 0.6  # of --watchdog-s, so that the line comes before rank 0's own watchdog ends it
EXPLAIN_S = 3.0  # for the watch to find the rank behind an error of rank 0
CLOSE_S = 5.0  # for ranks to end by themselves


class RankProcesses(ABC):
    """Ranks 1 to `size` - 1, and the memory `meeting` in which the process group meets.

    `limit_s`: the longest silence of a rank, 0 for any. `end` ends this process at once.
    """

    def __init__(
        self,
        processes: list[subprocess.Popen[bytes]],
        meeting: int,
        limit_s: float,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self.processes = processes
        self.meeting = meeting
        self._watch = RankWatch(limit_s, LOOK_EVERY_S)
        self._end = end
        self._is_serving = False
        self._seen_here = 0
        self._closing = threading.Event()

    def start_watch(self) -> None:
        """Looks after the ranks from now on, in a thread."""
        threading.Thread(target=self.watch, name="ranks", daemon=True).start()
        logger.info("started ranks 1 to %d, pids %s", self.size - 1, [each.pid for each in self.processes])

    @property
    def size(self) -> int:
        """Ranks of the worker, rank 0 included."""
        return len(self.processes) + 1

    @property
    def meeting_path(self) -> Path:
        """The file in which the process group meets."""
        return Path(f"/proc/self/fd/{self.meeting}")

    def beat(self) -> None:
        """A sign of life of rank 0 in the start, in which the others may wait for it."""
        self._seen_here = time.monotonic_ns()

    def begin_serving(self) -> None:
        """From here on a rank is lost after a short silence; rank 0 has a watchdog of its own."""
        self._is_serving = True

    def look(self) -> str:
        """Why the worker must end now; "" if all ranks live."""
        own = RankSign(rank=0, pid=os.getpid(), code=None, seen_alive=self._seen_here)
        signs = self.signs() if self._is_serving else [own, *self.signs()]
        return self._watch.look(signs, is_serving=self._is_serving)

    def signs(self) -> list[RankSign]:
        """What is seen of the ranks."""
        return [
            RankSign(
                rank=rank,
                pid=process.pid,
                code=process.poll(),
                seen_alive=self._seen_alive(rank),
                state=_state_of(process.pid),
            )
            for rank, process in enumerate(self.processes, start=1)
            if not self._has_left(rank)
        ]

    def watch(self) -> None:
        """Looks after the ranks until `close`."""
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
        """Called for an error of rank 0. If a rank has ended, that is why: a serving worker ends with the
        line that names it, and a start raises StartupError.

        A collective fails with RuntimeError when another rank is gone, a vote with RanksApart.
        """
        until = time.monotonic() + EXPLAIN_S
        while isinstance(error, (RuntimeError, RanksApart)) and time.monotonic() < until:
            lost = [each for each in self.processes if each.poll() is not None]
            if lost and self._is_serving and (reason := self.look()):
                self.fail(reason)  # as the watch would, which looks less often
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
            self._say_goodbye()
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

    @abstractmethod
    def _seen_alive(self, rank: int) -> int:
        """The time of the last sign of life of `rank`, in any unit."""

    @abstractmethod
    def _say_goodbye(self) -> None:
        """Lets the ranks end."""

    def _has_left(self, rank: int) -> bool:
        """Whether `rank` may end by itself."""
        return False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} 1 to {self.size - 1}>"


def silence_limit(watchdog_s: float) -> float:
    """The longest silence of a rank where a worker's own watchdog has `watchdog_s`; 0: any."""
    return watchdog_s * SILENCE_SHARE


def spawn_rank(module: str, arguments: Sequence[str], fds: Sequence[int]) -> subprocess.Popen[bytes]:
    """Starts `python -m baton.MODULE ARGUMENTS...`, which inherits `fds`."""
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    return subprocess.Popen(
        [sys.executable, *safe, "-m", f"{PACKAGE}.{module}", *arguments],
        pass_fds=tuple(fds),
        env=rank_environment(),
        stdin=subprocess.DEVNULL,
    )


def rank_environment() -> dict[str, str]:
    """The environment of a rank: without a service manager, and with the settings of the collectives."""
    return without_manager(dict(LIBRARY_SETTINGS) | dict(os.environ))


def _state_of(pid: int) -> str:
    """The letter of a process's state; "" if the kernel does not tell."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]
