"""Waits for a transport's ZeroMQ sockets by their file descriptors.

ZeroMQ's descriptor is edge-triggered: it signals a change of the socket's state, not a waiting message, and
any operation on the socket clears it. `next_deadline` therefore reads the events (ZMQ_EVENTS) of each socket
before each wait, and is due at once while a socket holds a message. That read also clears the descriptors.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator
from socket import socket as UnixSocket

import zmq

from ...cluster.net.sockets import Socket
from ..protocol.session import Peer
from ..transport import TransportEvent
from .endpoint import Clock, Endpoint, Queued
from .wire import received

MESSAGES_PER_SOCKET = 64  # messages read per turn, so that no peer delays the others
TURN_S = 0.002  # limit of reads per socket: tokens for clients wait for the end of a turn


class Polling(Endpoint[Queued]):
    """Waits for the transport's sockets and for the owner's registered descriptors."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._is_open = True
        self._poller = zmq.Poller()
        self._polled: list[Socket | int] = []
        self._foreign: list[Socket | int] = []

    @abstractmethod
    def _sockets(self) -> list[Socket]:
        """The open sockets; `_turn` reads all of them."""

    @property
    @abstractmethod
    def wake_fds(self) -> list[int]:
        """Descriptors of other threads that have something for `poll`."""

    @abstractmethod
    def next_deadline(self, now: float) -> float | None:
        """Latest monotonic time of the next `poll`; None: only a message makes it due.

        Returns `now` while `has_unread`.
        """

    @abstractmethod
    def _turn(self) -> None:
        """Reads the messages that arrived and does the work that is due. It waits for nothing but blocks that
        come at once.
        """

    def _wires(self) -> list[tuple[Peer, UnixSocket]]:
        """The connections of slabs that carry frames."""
        return []

    def _take_frame(self, peer: Peer, frame: memoryview) -> None:
        """Handles a frame of a connection in `_wires`; an empty one is its end."""

    def _read_wires(self) -> None:
        for peer, wire in self._wires():
            for frame in received(wire):
                self._take_frame(peer, frame)

    def register(self, pollable: Socket | int) -> None:
        """Makes `poll` return when `pollable`, another socket or file descriptor, is readable."""
        self._foreign.append(pollable)

    def pollables(self) -> list[int]:
        """The file descriptors of sockets and of other threads, for a wait directly after `next_deadline`.

        They change with the connections.
        """
        return [
            *(int(socket.get(zmq.FD)) for socket in self._sockets()),
            *(wire.fileno() for _, wire in self._wires()),
            *self.wake_fds,
        ]

    def has_unread(self) -> bool:
        """Whether a socket holds a message that its file descriptor may no longer signal."""
        return any(int(socket.get(zmq.EVENTS)) & zmq.POLLIN for socket in self._sockets())

    def poll(self, timeout: float) -> list[TransportEvent]:
        """Does due I/O and waits at most `timeout` seconds for an event or a registered pollable."""
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
        """A poller for `pollables`; the last poller is reused while they are the same."""
        if pollables != self._polled:
            self._polled, self._poller = pollables, zmq.Poller()
            for pollable in pollables:
                self._poller.register(pollable, zmq.POLLIN)
        return self._poller


def a_few(clock: Clock) -> Iterator[int]:
    """Counts the messages to read from one socket in a turn, from 1: at least one, and none after `TURN_S`
    seconds.

    The time limit is needed because four blocks of a GPU take longer, and each answer brings more of them.
    """
    until = clock() + TURN_S
    for number in range(1, MESSAGES_PER_SOCKET + 1):
        yield number
        if clock() >= until:
            return
