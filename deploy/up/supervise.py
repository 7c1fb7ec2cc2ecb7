"""Keeps child processes alive and ends them together.

`Supervisor.step` is called in a loop and never blocks: it starts due children and handles those that ended. A
child that exited before it was ready (exit code 1 or 2 on its first start) counts as failed to start and
fails the cluster. Any other exit leads to a restart after 0.5 s, doubled per failure up to 30 s, with jitter.
After 60 s of uptime the failure count is reset. `drain` ends the children of one role while the others keep
working; `stop` ends all within 5 s.
"""

import logging
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Protocol, TextIO

import psutil  # type: ignore[import-untyped,unused-ignore]

from ...cluster.process.log import as_json_line, fields
from ...cluster.process.process import EXIT_AGAIN, EXIT_CANNOT_START, EXIT_OK, EXIT_USAGE

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
FORGIVEN_AFTER_S = 60.0
TERM_AGAIN_S = 2.0  # seconds after the first SIGTERM until a second one ends a draining role at once
KILL_AFTER_S = 4.0
STUCK_S = 14.0  # seconds after which a child that still has not ended is told
# seconds to read an ended child's output, since another process may have inherited the pipe
LAST_LINE_S = 1.0
# ends that somebody asked for, by exit code
ORDERED_ENDS = {EXIT_OK: "drained", EXIT_AGAIN: "restart ordered"}
WHY_S = 10.0  # the same for the line with the reason of a failed start, when no restart is delayed


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    """The name and command of a child process."""

    name: str  # unique, such as prefill-0
    role: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str


class Process(Protocol):
    """A running child, as the supervisor sees it."""

    pid: int

    def poll(self) -> int | None:
        """The exit code; None while the process runs, negative for a signal."""

    def terminate(self) -> None:
        """Send SIGTERM, if it still runs."""

    def kill(self) -> None:
        """Kill it and everything it started."""

    def finish(self, patience_s: float = LAST_LINE_S) -> str:
        """Cleans up after the process has ended.

        Returns its line with the reason of a failed start, or "".
        """


Spawn = Callable[[ChildSpec], Process]


def pause_after(num_failures: int, rng: random.Random) -> float:
    """Seconds to wait before the start that follows `num_failures` failures in a row."""
    assert num_failures > 0
    pause = FIRST_PAUSE_S * 2.0 ** min(num_failures - 1, 10) * rng.uniform(1.0, 1.25)
    return min(pause, LONGEST_PAUSE_S)


class Child:
    """The state of one child across its restarts."""

    def __init__(self, spec: ChildSpec, now: float) -> None:
        self.spec = spec
        self.process: Process | None = None
        self.num_starts = 0
        self.num_failures = 0  # consecutive
        self.started_at = now
        self.due_at = now  # time of the next start; used only while there is no process

    def __repr__(self) -> str:
        state = f"pid {self.process.pid}" if self.process else "down"
        return f"Child({self.spec.name}, {state}, {self.num_starts} starts)"


class Supervisor:
    """Keeps children running. Clock, sleep and randomness are injected. One thread at a time may call it."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        spawn: Spawn,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        rng: random.Random | None = None,
    ) -> None:
        self._clock, self._sleep, self._spawn = clock, sleep, spawn
        self._rng = rng or random.Random()
        self.children = [Child(spec, clock()) for spec in specs]
        self.failure = ""  # the reason of the final failure, after which `step` does nothing
        self.failure_code = EXIT_CANNOT_START  # the exit code of the child that failed to start

    def __repr__(self) -> str:
        up = sum(child.process is not None for child in self.children)
        return f"Supervisor({up} of {len(self.children)} up{', failed' if self.failure else ''})"

    def step(self) -> None:
        """Starts due children and handles ended ones."""
        for child in self.children:
            if self.failure:
                return
            if child.process is None:
                if self._clock() >= child.due_at:
                    self._start(child)
                continue
            code = child.process.poll()
            if code is not None:
                self._ended(child, code)

    def drain(self, role: str, timeout_s: float, hurry: threading.Event | None = None) -> None:
        """Sends SIGTERM to the children of `role` only. The caller calls `stop` next.

        Returns when they have ended, after `timeout_s` seconds, or when `hurry` is set.
        """
        deadline = self._clock() + timeout_s
        leaving = [
            child.process for child in self.children if child.spec.role == role and child.process is not None
        ]
        for process in leaving:
            process.terminate()
        while any(process.poll() is None for process in leaving) and self._clock() < deadline:
            if hurry is not None and hurry.is_set():
                return
            self._sleep(0.02)

    def stop(self, hurry: threading.Event | None = None) -> None:
        """Ends all children by SIGTERM, a second SIGTERM and SIGKILL, or by SIGKILL at once when `hurry` is
        set.

        Returns when all have ended.
        """
        began = self._clock()
        escalation = [(0.0, _terminate), (TERM_AGAIN_S, _terminate), (KILL_AFTER_S, _kill), (STUCK_S, _tell)]
        while self._reap():
            elapsed = self._clock() - began
            if hurry is not None and hurry.is_set():
                elapsed = KILL_AFTER_S
            while escalation and elapsed >= escalation[0][0]:
                _, act = escalation.pop(0)
                for child in self.children:
                    if child.process is not None:
                        act(child.process)
            self._sleep(0.02)

    def _reap(self) -> bool:
        """Forgets ended children. Returns whether any is left."""
        for child in self.children:
            if child.process is not None and child.process.poll() is not None:
                child.process.finish()
                child.process = None
        return any(child.process is not None for child in self.children)

    def _start(self, child: Child) -> None:
        child.num_starts += 1
        child.started_at = self._clock()
        try:
            child.process = self._spawn(child.spec)
        except OSError as error:
            self.failure = f"{child.spec.name}: cannot run {child.spec.argv[0]}: {error.strerror or error}"

    def _ended(self, child: Child, code: int) -> None:
        assert child.process is not None
        is_hopeless = code in (EXIT_CANNOT_START, EXIT_USAGE) and child.num_starts == 1
        line, child.process = child.process.finish(WHY_S if is_hopeless else LAST_LINE_S), None
        if is_hopeless:
            self.failure = f"{child.spec.name}: {line or 'cannot start; its lines above say why'}"
            self.failure_code = code
            return
        now = self._clock()
        child.num_failures = 1 if now - child.started_at >= FORGIVEN_AFTER_S else child.num_failures + 1
        pause = pause_after(child.num_failures, self._rng)
        child.due_at = now + pause
        level, reason = logging.WARNING, line or "unknown"
        if code in ORDERED_ENDS:
            level, reason = logging.INFO, ORDERED_ENDS[code]
        extra = fields(child=child.spec.name, end=_describe(code), pause_s=round(pause, 2), reason=reason)
        logger.log(level, "child ended, will be restarted", extra=extra)


def _terminate(process: Process) -> None:
    process.terminate()


def _kill(process: Process) -> None:
    process.kill()


def _tell(process: Process) -> None:
    logger.error(
        "a child has not ended after SIGKILL; the kernel waits for a device",
        extra=fields(child=repr(process)),
    )


def _describe(code: int) -> str:
    if code < 0:
        with suppress(ValueError):
            return signal.Signals(-code).name
    return f"exit {code}"


class SpawnedProcess:
    """A real child in its own session, so that Ctrl-C in a terminal reaches the launcher alone.

    Its output goes to `output` line by line, with the child's name as a prefix, or `as_json` as the member
    `child` of a JSON object. A line that starts with `error_prefix` is kept for `finish` instead.
    """

    def __init__(self, spec: ChildSpec, output: TextIO, error_prefix: str, *, as_json: bool = False) -> None:
        # not psutil.Popen: before psutil 7.1 it takes a running process for another one once the system's
        # clock was set, and then sends no signal
        self._process = subprocess.Popen(
            list(spec.argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(spec.env),
            cwd=spec.cwd,
            start_new_session=True,
        )
        self.pid: int = self._process.pid
        self._name, self._output, self._error_prefix = spec.name, output, error_prefix
        self._as_json = as_json
        self._error = ""
        self._pump = threading.Thread(target=self._pass_lines, name=f"output of {spec.name}", daemon=True)
        self._pump.start()

    def __repr__(self) -> str:
        return f"SpawnedProcess({self._name}, pid {self.pid})"

    def poll(self) -> int | None:
        """The exit code; None while the process runs."""
        return self._process.poll()

    def terminate(self) -> None:
        """Send SIGTERM, if it still runs."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill it and everything it started."""
        started: list[psutil.Process] = []
        with suppress(psutil.Error):
            started = psutil.Process(self.pid).children(recursive=True)
        self._process.kill()
        for process in started:
            with suppress(psutil.Error):
                process.kill()

    def finish(self, patience_s: float = LAST_LINE_S) -> str:
        """Kills the rest of its session, waits for its last line, and returns its error line."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._pump.join(timeout=patience_s)
        return self._error

    def _pass_lines(self) -> None:
        stream: IO[bytes] | None = self._process.stdout
        assert stream is not None
        with stream:
            for raw in stream:
                line = raw.decode("utf-8", "replace").rstrip("\r\n")
                if line.startswith(self._error_prefix):
                    self._error = line.removeprefix(self._error_prefix)
                elif line:
                    shown = as_json_line(line, self._name) if self._as_json else f"{self._name:<9} | {line}"
                    self._output.write(shown + "\n")
                    self._output.flush()
