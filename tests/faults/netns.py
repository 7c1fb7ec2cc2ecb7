"""Linux network namespaces as hosts: made, entered by a thread, configured with `ip`, `tc` and `nft`.

A namespace is an open file descriptor. Nothing has a name and no process waits in it, so it is gone with the
process that made it, whatever becomes of that. Sockets, and threads and processes that a thread starts, are
of the namespace in which that thread is; that thread alone moves.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator

NEW_NETWORK, NEW_HOST_NAME = 0x40000000, 0x04000000  # CLONE_NEWNET, CLONE_NEWUTS of <linux/sched.h>
TOOLS = ("ip", "tc", "nft")
OURS = "/proc/thread-self/ns/net"
_libc = ctypes.CDLL(None, use_errno=True)


def missing() -> str:
    """Why this process cannot make hosts, with the remedy; "" when it can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if absent := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"{' and '.join(absent)} not found: install iproute2 and nftables"
    try:
        with make():
            return ""
    except OSError as error:
        return f"no network namespace may be made ({error.strerror}): run it as root, or under `unshare -Urn`"


@contextlib.contextmanager
def make() -> Iterator[int]:
    """A new namespace, as a descriptor that is closed behind. Raises OSError."""
    made: list[int | OSError] = []

    def move() -> None:
        try:
            _check(_libc.unshare(NEW_NETWORK))
            made.append(os.open(OURS, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            made.append(error)

    mover = threading.Thread(target=move)
    mover.start()
    mover.join()
    if isinstance(made[0], OSError):
        raise made[0]
    try:
        yield made[0]
    finally:
        os.close(made[0])


@contextlib.contextmanager
def inside(namespace: int) -> Iterator[None]:
    """This thread is there meanwhile."""
    own = os.open(OURS, os.O_RDONLY | os.O_CLOEXEC)
    try:
        enter(namespace)
        yield
    finally:
        enter(own)
        os.close(own)


def enter(namespace: int) -> None:
    """This thread is there from now on. Raises OSError."""
    _check(_libc.setns(namespace, NEW_NETWORK))


def name_host(name: str) -> None:
    """This process has a host name of its own. Raises OSError."""
    _check(_libc.unshare(NEW_HOST_NAME))
    encoded = name.encode()
    _check(_libc.sethostname(encoded, len(encoded)))


def path_of(namespace: int) -> str:
    """Under which other processes, and `ip`, find a namespace while this process holds it."""
    return f"/proc/{os.getpid()}/fd/{namespace}"


def do(namespace: int, *commands: str, text: str | None = None) -> str:
    """Runs commands there, one after the other; what they wrote. `text` is their stdin."""
    said = ""
    with inside(namespace):
        for command in commands:
            done = subprocess.run(command.split(), input=text, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{command}: {done.stderr}"
            said += done.stdout
    return said


def _check(result: int) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
