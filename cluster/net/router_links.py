"""A worker's links to its routers: configured endpoints, and addresses discovered by DNS.

A link is opened when its address is found. It is closed when DNS no longer lists the address and the router
no longer answers: a draining router leaves DNS first and serves its streams to their end. Each link has a
number that is never reused, since rooms of a departed router may still be ending in the worker.
"""

import itertools
import logging
import time
from collections.abc import Callable, Sequence

import zmq

from ..process.log import fields
from ..protocol.messages import Hello
from ..security.keyring import Keyring
from .control_link import ControlLink
from .dns_discovery import RouterDiscovery
from .sockets import Socket

logger = logging.getLogger(__name__)

Dial = Callable[[str], ControlLink]


class RouterLinks:
    """`links` by number; changed by `refresh` alone, in the thread that owns the sockets."""

    def __init__(self, names: RouterDiscovery, dial: Dial) -> None:
        """Raises ConfigError for an invalid endpoint, with no link left open."""
        self.links: dict[int, ControlLink] = {}
        self._names = names
        self._dial = dial
        self._numbers = itertools.count()
        self._leaving: set[int] = set()  # links whose addresses DNS no longer lists
        try:
            for endpoint in names.fixed:
                self._add(endpoint)
        except Exception:
            self.close()
            raise
        names.start()

    def __repr__(self) -> str:
        return f"RouterLinks({', '.join(map(repr, self.links.values())) or 'none'})"

    def refresh(self) -> None:
        """Opens and closes links after a DNS change.

        To be called after a tick of all links, so that every loss is reported.
        """
        found = self._names.take()
        if found is not None:
            wanted = {*self._names.fixed, *found}
            for endpoint in sorted(wanted - {link.endpoint for link in self.links.values()}):
                self._add(endpoint)
                logger.info("router found", extra=fields(endpoint=endpoint))
            self._leaving = {number for number, link in self.links.items() if link.endpoint not in wanted}
        for number in sorted(self._leaving):
            self._leave(number, self.links[number])

    def _leave(self, number: int, link: ControlLink) -> None:
        if not link.connected and not link.is_lost:
            del self.links[number]
            self._leaving.discard(number)
            link.close()
            logger.info("router left its name", extra=fields(endpoint=link.endpoint))

    def close(self) -> None:
        """Idempotent."""
        self._names.close()
        for link in self.links.values():
            link.close()

    def _add(self, endpoint: str) -> None:
        self.links[next(self._numbers)] = self._dial(endpoint)


def dial_routers(
    context: zmq.Context[Socket],
    endpoints: Sequence[str],
    hello: Hello,
    keyring: Keyring | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> RouterLinks:
    """Links to the routers that `endpoints` name. `clock`: the one that their ticks are given.

    Raises ConfigError for an invalid one, with no link left open.
    """

    def dial(endpoint: str) -> ControlLink:
        return ControlLink(context, endpoint, hello, clock(), keyring=keyring)

    return RouterLinks(RouterDiscovery(endpoints), dial)
