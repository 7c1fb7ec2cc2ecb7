"""Waits for a transport's ZeroMQ sockets by their file descriptors.

ZeroMQ's descriptor is edge-triggered: it signals a change of the socket's state, not a waiting message, and any operation
on the socket clears it. Therefore `next_deadline` asks each socket for its events (ZMQ_EVENTS) before each wait, and is due
at once while a socket holds a message. The question also clears the descriptors.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator

import zmq

from ...cluster.net.sockets import Socket
from ..transport import TransportEvent
from .endpoint import Clock, Endpoint, Queued

MESSAGES_PER_SOCKET = 64  # read per turn, so that no peer keeps the others waiting
TURN_S = 0.002  # nor the thread's other work: tokens on their way to clients wait for the end of a turn


class Polling(Endpoint[Queued]):
    """Waits for the transport's sockets, and for whatever else the owner registered."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._is_open = True
        self._poller = zmq.Poller()
        self._polled: list[Socket | int] = []
        self._foreign: list[Socket | int] = []

    @abstractmethod
    def _sockets(self) -> list[Socket]:
        """The open sockets, all of which `_turn` reads."""

    @abstractmethod
    def next_deadline(self, now: float) -> float | None:
        """When `poll` must be called at the latest; None when only a message can bring news. `now` while `has_unread`."""

    @abstractmethod
    def _turn(self) -> None:
        """Reads what is there and does what is due, without waiting."""

    def register(self, pollable: Socket | int) -> None:
        """Makes `poll` return when this other socket or file descriptor is readable."""
        self._foreign.append(pollable)

    def pollables(self) -> list[int]:
        """The sockets' file descriptors, for a wait right behind `next_deadline`; they change with the connections."""
        return [int(socket.get(zmq.FD)) for socket in self._sockets()]

    def has_unread(self) -> bool:
        """Whether a socket holds a message, of which its file descriptor may not tell any more."""
        return any(int(socket.get(zmq.EVENTS)) & zmq.POLLIN for socket in self._sockets())

    def poll(self, timeout: float) -> list[TransportEvent]:
        """Does the I/O that is due and waits at most `timeout` seconds for an event or a registered pollable."""
        end = self._clock() + timeout
        self._turn()
        while not self._events and self._is_open and (now := self._clock()) < end:
            deadline = self.next_deadline(now)
            seconds = (end if deadline is None else min(end, deadline)) - now
            ready = self._poller_of([*self.pollables(), *self._foreign]).poll(
                math.ceil(max(0.0, seconds) * 1000)
            )
            self._turn()
            if any(pollable in self._foreign for pollable, _ in ready):
                break
        return self._take_events()

    def _poller_of(self, pollables: list[Socket | int]) -> zmq.Poller:
        """A poller for these; the last one again while they are the same."""
        if pollables != self._polled:
            self._polled, self._poller = pollables, zmq.Poller()
            for pollable in pollables:
                self._poller.register(pollable, zmq.POLLIN)
        return self._poller


def a_few(clock: Clock) -> Iterator[int]:
    """Counts from 1 what may be read of one socket in a turn: one message at least, and none after `TURN_S`, since four
    blocks of a GPU take longer than that, and each answer brings more of them.
    """
    until = clock() + TURN_S
    for number in range(1, MESSAGES_PER_SOCKET + 1):
        yield number
        if clock() >= until:
            return
