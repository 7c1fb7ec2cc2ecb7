"""Finds routers by DNS: every address of `dns+tcp://NAME:PORT` is a router. The name is resolved
periodically.

libzmq can resolve names too, but uses only the first address and blocks its I/O thread while the resolver is
slow. Here a separate thread resolves, and the owner of the links takes the result.
"""

import logging
import socket
import threading
from collections.abc import Callable, Sequence

from ..process.log import fields
from .endpoints import DISCOVERED, bracketed

logger = logging.getLogger(__name__)

ASK_S = 2.0  # seconds between two queries; a cluster's resolver caches answers at least as long
MAX_ADDRESSES = 64  # per name; a name with more addresses does not name routers

Resolve = Callable[[str, int], Sequence[str]]


def addresses_of(name: str, port: int) -> list[str]:
    """The addresses of `name` in order, of one family, since a host may have both. Raises OSError."""
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    families = [
        family for family in (socket.AF_INET, socket.AF_INET6) if any(info[0] == family for info in found)
    ]
    return sorted({str(info[4][0]) for info in found if info[0] == families[0]})


class RouterDiscovery:
    """Resolves the names among `endpoints` from `start` to `close`.

    The thread that opens links calls `take`.
    """

    def __init__(
        self, endpoints: Sequence[str], *, resolve: Resolve = addresses_of, ask_s: float = ASK_S
    ) -> None:
        self.fixed = tuple(endpoint for endpoint in endpoints if not endpoint.startswith(DISCOVERED))
        self._names = [
            endpoint.removeprefix(DISCOVERED) for endpoint in endpoints if endpoint.startswith(DISCOVERED)
        ]
        self._resolve = resolve
        self._ask_s = ask_s
        self._known: dict[str, tuple[str, ...]] = {}  # by name; kept while a query fails
        self._failed: dict[str, str] = {}  # the last logged error of a name
        self._found: tuple[str, ...] | None = None
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="router names", daemon=True)

    def __repr__(self) -> str:
        return f"RouterDiscovery({', '.join(self._names) or 'none'})"

    def start(self) -> None:
        """Starts the resolving thread if there is a name to resolve."""
        if self._names:
            self._thread.start()

    def close(self) -> None:
        """Stops resolving, without waiting for a slow query in progress. Idempotent."""
        self._closing.set()

    def take(self) -> tuple[str, ...] | None:
        """The endpoints of all names if they changed since the last call, else None."""
        with self._lock:
            found, self._found = self._found, None
        return found

    def ask(self) -> None:
        """Resolves each name once.

        A name that fails keeps its previous addresses, so that workers keep their routers.
        """
        for name in self._names:
            host, _, port = name.rpartition(":")
            try:
                found = self._resolve(host, int(port))[:MAX_ADDRESSES]
            except OSError as error:
                self._log_fault(name, str(error))
                continue
            self._known[name] = tuple(f"tcp://{bracketed(address)}:{port}" for address in found)
            self._log_fault(name, "")
        every = tuple(
            dict.fromkeys(endpoint for name in self._names for endpoint in self._known.get(name, ()))
        )
        with self._lock:
            self._found = every

    def _log_fault(self, name: str, fault: str) -> None:
        if fault and fault != self._failed.get(name):
            logger.warning("no addresses of routers", extra=fields(name=name, reason=fault))
        self._failed[name] = fault

    def _run(self) -> None:
        while not self._closing.is_set():
            self.ask()
            self._closing.wait(self._ask_s)
