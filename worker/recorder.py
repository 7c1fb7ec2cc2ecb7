"""Records finished sequences of a worker as training samples, beside serving and never before it.

    offer   the scheduler thread hands over the ids of a finished request; it drops them when much waits
    thread  gathers them into a shard, makes room for it, writes it under another name and renames it

A shard is written when it is full, when its first sample is SHARD_AGE_S old, and at the end. A worker that is
killed loses the samples of the shard that it had not written. When a write fails, as on a full disk, the
recorder says so once, drops what waits and stays off.
"""

import contextlib
import logging
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from safetensors.torch import save

from ..cluster.errors import ConfigError
from ..cluster.protocol.messages import Recording
from ..engine.sample_shards import RECORDED, Sample, ShardBuffer, shard_bytes

logger = logging.getLogger(__name__)

SHARD_AGE_S = 300.0  # longest wait of a sample for others of its shard
MAX_WAITING_TOKENS = 1 << 20  # of sequences that the thread has not taken; more are dropped
LEAST_OUTPUT = 2  # tokens of an answer; a drafter has nothing to predict in a shorter one
ABANDONED_S = 600.0  # a partial file of that age is of a worker that was killed
CLOSE_S = 5.0  # longest wait for the last shard
LOWEST_PRIORITY = 19
PARTIAL = ".partial"
COUNTERS = (
    "recorded_samples",
    "recorded_tokens",
    "recorded_bytes",
    "record_dropped",
    "record_deleted_shards",
)


class SampleRecorder:
    """Writes samples to shards in `directory`, readable by this user only.

    A shard has at most `shard_limit` bytes, all recorded shards of the directory at most `total_limit`; the
    oldest are deleted, also those of other workers. `name` distinguishes the worker. `clock` tells seconds
    since the epoch.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        *,
        shard_limit: int,
        total_limit: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.directory = directory
        self.counters: dict[str, float] = dict.fromkeys(COUNTERS, 0.0)
        self.fault = ""
        self._name, self._clock = name, clock
        self._shard_limit, self._total_limit = shard_limit, total_limit
        self._waiting: deque[tuple[Sequence[int], Sequence[int]]] = deque()
        self._num_waiting = 0  # tokens
        self._num_taken = 0  # sequences that were not dropped at once
        self._changed = threading.Condition()
        self._is_closing = False
        self._last_stamp = 0
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)

    def __repr__(self) -> str:
        return f"<SampleRecorder {self.directory}, {self.counters['recorded_samples']:g} samples{self.fault}>"

    @classmethod
    def open(cls, directory: str, instance: str, *, shard_mb: int, total_mb: int) -> "SampleRecorder":
        """A recorder whose thread runs. Raises ConfigError if nothing can be written to `directory`, or if
        not even two shards fit.
        """
        if 2 * shard_mb > total_mb:
            raise ConfigError(
                f"--record-total-mb {total_mb} holds less than two shards of --record-shard-mb {shard_mb}; "
                "raise it, or lower the other"
            )
        path = Path(directory).absolute()
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
            _delete_abandoned(path)
        except OSError as error:
            raise ConfigError(
                f"--record-drafts {directory}: nothing can be written there ({error.strerror or error}); "
                "name a directory of this user"
            ) from None
        made = cls(path, instance[:8], shard_limit=shard_mb << 20, total_limit=total_mb << 20)
        made.start()
        return made

    @property
    def status(self) -> Recording:
        """The condition for the heartbeat."""
        return Recording(path=str(self.directory), is_on=not self.fault, fault=self.fault)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def offer(self, asked: Sequence[int], chosen: Sequence[int]) -> None:
        """Takes a finished sequence: the ids of the client and the ids that the target generated.

        Neither may change any more. Sequences with fewer than LEAST_OUTPUT generated tokens are not wanted;
        others are dropped and counted if too much waits, if no shard could hold them, or after a fault.
        """
        if len(chosen) < LEAST_OUTPUT:
            return
        size = len(asked) + len(chosen)
        with self._changed:
            is_full = bool(self._waiting) and self._num_waiting + size > MAX_WAITING_TOKENS
            if self.fault or is_full or shard_bytes(size, 1) > self._shard_limit:
                self.counters["record_dropped"] += 1
                return
            self._num_taken += 1
            self._waiting.append((asked, chosen))
            self._num_waiting += size
            self._changed.notify()

    def close(self) -> None:
        """Writes what waits and ends the thread. Idempotent."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    # --- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.suppress(AttributeError, OSError):  # the priority of one thread is Linux's own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        try:
            self._gather()
        except Exception as error:
            with self._changed:
                self.fault = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
                self.counters["record_dropped"] += self._num_taken - self.counters["recorded_samples"]
                self._waiting.clear()
            logger.error("recording ends: %s: %s", self.directory, self.fault)

    def _gather(self) -> None:
        """Writes shards until the end. Raises OSError."""
        shard, due = ShardBuffer(), 0.0
        while True:
            samples, is_last = self._take(due - time.monotonic() if len(shard) else None)
            for asked, chosen in samples:
                size = len(asked) + len(chosen)
                if len(shard) and shard_bytes(shard.num_tokens + size, len(shard) + 1) > self._shard_limit:
                    self._write(shard)
                    shard = ShardBuffer()
                if not len(shard):
                    due = time.monotonic() + SHARD_AGE_S
                shard.add(Sample([*asked, *chosen], bytes(len(asked)) + b"\x01" * len(chosen)))
            if len(shard) and (is_last or time.monotonic() >= due):
                self._write(shard)
                shard = ShardBuffer()
            if is_last:
                return

    def _take(self, timeout: float | None) -> tuple[list[tuple[Sequence[int], Sequence[int]]], bool]:
        """The sequences that wait, after at most `timeout` seconds (None: no limit), and whether the recorder
        closes.
        """
        with self._changed:
            if not self._waiting and not self._is_closing:
                self._changed.wait(None if timeout is None else max(0.0, timeout))
            samples = list(self._waiting)
            self._waiting.clear()
            self._num_waiting = 0
            return samples, self._is_closing

    def _write(self, shard: ShardBuffer) -> None:
        content = save(shard.tensors())
        self._make_room(len(content))
        # by time, so that names of all workers are in the order of their ages
        self._last_stamp = max(self._last_stamp + 1, int(self._clock() * 1000))
        path = self.directory / f"samples-{self._last_stamp:013d}-r{self._name}.safetensors"
        write_private(path, content)
        self.counters["recorded_samples"] += len(shard)
        self.counters["recorded_tokens"] += shard.num_tokens
        self.counters["recorded_bytes"] += len(content)

    def _make_room(self, num_bytes: int) -> None:
        """Deletes the oldest recorded shards until `num_bytes` more are within the limit."""
        known: list[tuple[Path, int]] = []
        for path in sorted(self.directory.glob(RECORDED)):
            with contextlib.suppress(FileNotFoundError):  # another worker deleted it
                known.append((path, path.stat().st_size))
        total = sum(size for _, size in known) + num_bytes
        for path, size in known:
            if total <= self._total_limit:
                return
            path.unlink(missing_ok=True)
            self.counters["record_deleted_shards"] += 1
            total -= size


def write_private(path: Path, content: bytes) -> None:
    """Writes a file of mode 0600 under another name and renames it. Raises OSError; nothing is left then."""
    partial = path.with_name(f".{path.name}{PARTIAL}")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _delete_abandoned(directory: Path) -> None:
    """Deletes partial files that no living worker writes."""
    for path in directory.glob(f".{RECORDED}{PARTIAL}"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > ABANDONED_S:
                path.unlink()
