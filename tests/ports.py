"""Ports of loopback for servers that tests start, each of one test alone.

A held port is bound, and nobody listens there. A server that sets SO_REUSEADDR, as all of ours do, may listen
at it. Whoever looks for an unused port passes over it, in this run and in others of the host, also while the
server is down (Linux: inet_csk_bind_conflict).
"""

import random
import socket

FIRST, LAST = 10_000, 20_000  # below the ports that `baton up` chooses, and those of connections


class HeldPorts:
    """Ports that are held until `release`. Raises AssertionError when too few are unused."""

    def __init__(self, count: int) -> None:
        self._holders: list[socket.socket] = []
        for port in random.SystemRandom().sample(range(FIRST, LAST), LAST - FIRST):
            if len(self._holders) == count:
                break
            self._hold(port)
        assert len(self._holders) == count, f"fewer than {count} ports of {FIRST}-{LAST} are unused"

    @property
    def ports(self) -> list[int]:
        return [holder.getsockname()[1] for holder in self._holders]

    def release(self) -> None:
        """Others may have the ports from now on; idempotent."""
        while self._holders:
            self._holders.pop().close()

    def _hold(self, port: int) -> None:
        holder = socket.socket()
        try:
            holder.bind(("127.0.0.1", port))  # fails beside any other socket, for it allows none as yet
        except OSError:
            holder.close()
            return
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._holders.append(holder)


def free_port() -> int:
    """An unused port, held no more."""
    held = HeldPorts(1)
    (port,) = held.ports
    held.release()
    return port
