"""A server as a child process of a benchmark."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from ..cluster.errors import StartupError

READY_S = 600.0  # a first start on a GPU compiles its kernels
END_S = 60.0
SHOWN_LINES = 20


@contextmanager
def serving(arguments: Sequence[str], port: int) -> Iterator[str]:
    """`baton ARGUMENTS` on `port` of this host, until the end of the context. Returns its URL once it is
    ready.

    Raises StartupError with the end of its log, if it does not get ready.
    """
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        log = Path(folder) / "log"
        command = [sys.executable, "-m", "baton", *arguments, "--host=127.0.0.1", f"--port={port}"]
        with log.open("wb") as lines:
            child = subprocess.Popen(command, stdout=lines, stderr=lines)
        url = f"http://127.0.0.1:{port}"
        try:
            _wait(child, url, log)
            yield url
        finally:
            child.terminate()
            try:
                child.wait(END_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _wait(child: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    end = time.monotonic() + READY_S
    while time.monotonic() < end and child.poll() is None:
        with suppress(httpx.HTTPError):
            if httpx.get(f"{url}/ready", timeout=5.0).status_code == 200:
                return
        time.sleep(0.2)
    last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN_LINES:]
    why = (
        f"ended with {child.returncode}" if child.poll() is not None else f"is not ready after {READY_S:g} s"
    )
    raise StartupError(f"the server {why}:\n" + "\n".join(last))
