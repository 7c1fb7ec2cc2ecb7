"""The wait for a transport's sockets."""

import math
from abc import abstractmethod
from collections.abc import Iterator

import zmq

from ...cluster.net.sockets import Socket
from ..endpoint import Clock, Endpoint, Queued
from ..transport import TransportEvent

MESSAGES_PER_SOCKET = 64  # read per turn, so that no peer keeps the others waiting
TURN_S = 0.002  # nor the thread's other work: tokens on their way to clients wait for the end of a turn


class Polling(Endpoint[Queued]):
    """Waits for the transport's sockets, and for whatever else the owner registered."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._is_open = True
        self._poller = zmq.Poller()
        self._foreign: set[Socket | int] = set()

    @abstractmethod
    def next_deadline(self, now: float) -> float | None:
        """When `poll` must be called at the latest; None when only a message can bring news."""

    @abstractmethod
    def _turn(self) -> None:
        """Reads what is there and does what is due, without waiting."""

    def register(self, pollable: Socket | int) -> None:
        """Makes `poll` return when this other socket or file descriptor is readable."""
        self._poller.register(pollable, zmq.POLLIN)
        self._foreign.add(pollable)

    def poll(self, timeout: float) -> list[TransportEvent]:
        """Does the I/O that is due and waits at most `timeout` seconds for an event or a registered pollable."""
        end = self._clock() + timeout
        self._turn()
        while not self._events and self._is_open and (now := self._clock()) < end:
            deadline = self.next_deadline(now)
            seconds = (end if deadline is None else min(end, deadline)) - now
            ready = self._poller.poll(math.ceil(max(0.0, seconds) * 1000))
            self._turn()
            if any(pollable in self._foreign for pollable, _ in ready):
                break
        return self._take_events()


def a_few(clock: Clock) -> Iterator[int]:
    """Counts from 1 what may be read of one socket in a turn: one message at least, and none after `TURN_S`, since four
    blocks of a GPU take longer than that, and each answer brings more of them.
    """
    until = clock() + TURN_S
    for number in range(1, MESSAGES_PER_SOCKET + 1):
        yield number
        if clock() >= until:
            return
