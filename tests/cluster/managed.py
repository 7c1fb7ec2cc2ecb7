"""A service manager as far as sd_notify(3) goes: starts a process, hears it, and acts on what it hears."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time


class Manager:
    """One process under watch. `words` holds (monotonic seconds, line) of everything that it said."""

    def __init__(self, directory, role, *flags, watchdog_s=0.0, env=None):
        self.words = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(directory / "notify"))
        self._socket.settimeout(0.1)
        self._is_open = True
        self._ear = threading.Thread(target=self._listen, daemon=True)
        self._ear.start()
        self.log = directory / "log"
        told = {
            **os.environ,
            **(env or {}),
            "NOTIFY_SOCKET": str(directory / "notify"),
            "OMP_NUM_THREADS": "1",
        }
        if watchdog_s:
            told["WATCHDOG_USEC"] = str(int(watchdog_s * 1e6))
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", f"baton.{role}", *flags],
                env=told,
                cwd="/",
                stdout=log,
                stderr=log,
            )

    def _listen(self):
        while self._is_open:
            with contextlib.suppress(TimeoutError):
                said = self._socket.recv(4096).decode()
                self.words += [(time.monotonic(), line) for line in said.splitlines()]

    def has_heard(self, line):
        return any(said == line for _, said in self.words)

    def wait_for(self, line, seconds):
        deadline = time.monotonic() + seconds
        while True:
            code = self.process.poll()
            time.sleep(0.1)  # also for what it said just before its end
            if self.has_heard(line):
                return
            assert code is None, self.log.read_text()
            assert time.monotonic() < deadline, f"no {line} in {self.words}\n{self.log.read_text()}"

    def wait_for_pings(self, count, seconds):
        """Until it has said so many more."""
        so_far, deadline = self.num_pings, time.monotonic() + seconds
        while self.num_pings < so_far + count:
            assert time.monotonic() < deadline, f"{self.num_pings - so_far} pings\n{self.log.read_text()}"
            time.sleep(0.05)

    @property
    def num_pings(self):
        return sum(line == "WATCHDOG=1" for _, line in self.words)

    def watch(self, limit_s, seconds):
        """Sends SIGABRT if no ping comes for `limit_s`, as the manager does; True if so in `seconds`."""
        until = time.monotonic() + seconds
        last = time.monotonic()
        while time.monotonic() < until:
            time.sleep(0.05)
            last = max([last, *(at for at, line in self.words if line == "WATCHDOG=1")])
            if time.monotonic() - last > limit_s:
                self.process.send_signal(signal.SIGABRT)
                return True
        return False

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._is_open = False
        self._ear.join()
        self._socket.close()


@contextlib.contextmanager
def managed(directory, role, *flags, **options):
    directory.mkdir()
    manager = Manager(directory, role, *flags, **options)
    try:
        yield manager
    finally:
        manager.close()
