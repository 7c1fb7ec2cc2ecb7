"""The I/O thread of a worker: control plane, KV plane and a wake-up in one loop.

The scheduler thread computes. The link thread alone touches sockets, so a hand-off goes on while a forward
runs (torch releases the GIL). The two threads exchange frozen values over queues (`commands`). A worker may
serve several routers, each over its own control link; `room_owners` records which router owns a room.
Commands are performed in order. A page that was given to the transport belongs to it until the room's
terminal event comes back, also after `Drop`.
"""

import queue
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

import zmq

from ..cluster.errors import BatonError, LocalProtocolError, StartupError
from ..cluster.net.control_link import LinkQueues
from ..cluster.net.router_links import RouterLinks
from ..cluster.net.sockets import wait_readable
from ..cluster.process.running_clock import RunningClock
from ..cluster.process.watchdog import Watchdog
from ..cluster.protocol.messages import ControlUp
from ..kvtransfer.transport import Dropped, Freed, KVTransport, Lost, Offer, PollableTransport, PullRequest
from .commands import Advance, Command, Drop, DropDone, LinkEvent, LinkFailed, Nudge, Sourced, Underway
from .room_owners import EVERY, FromRouter, RoomOwners, RouterLost, ToRouter

IDLE_WAIT_S = 0.2
HAND_OVER_S = 0.0005  # longest wait of the computing thread for the link thread
POLL_S = 0.00002
LET_ON_S = 0.001  # longest wait of the link thread for an idle computing thread that has got a message
COUNT_S = 0.1  # between two readings of the transport's counters in a busy thread
INBOX_LIMIT = 4096  # events that the scheduler has not taken yet
Opening = TypeVar("Opening", Offer, PullRequest)


OpenPlanes = Callable[["zmq.Context[zmq.Socket[bytes]]"], tuple[RouterLinks, PollableTransport]]


class LinkWork:
    """The work of the link thread, without the thread: commands in order, then messages and timers.

    `deliver` passes an event to the scheduler. `controls` maps a router's number to its control link and may
    change.
    """

    def __init__(
        self, controls: Mapping[int, LinkQueues], transport: KVTransport, deliver: Callable[[Sourced], None]
    ) -> None:
        self.controls = controls
        self.transport = transport
        self._deliver = deliver

    def perform(self, command: Command | ToRouter) -> None:
        """Perform one command of the scheduler."""
        match command:
            case Offer():
                self._open(command, self.transport.offer)
            case PullRequest():
                self._open(command, self.transport.pull)
            case Underway(room=room, epoch=epoch, start=start, tokens=tokens):
                self.transport.launched(room, epoch, start, tokens)
            case Advance():
                for control in self.controls.values():  # token 1 does not wait for the hand-off
                    control.flush()
                self.transport.advance(
                    command.room, command.epoch, command.tokens_ready, command.first_token, command.ready_at
                )
            case Drop(room=room, epoch=epoch, reason=reason):
                self.transport.release(room, epoch, reason)
                if not self.transport.frees_later:
                    self._deliver(DropDone(room=room, epoch=epoch))
            case ToRouter(router=router, message=message):
                for number, control in self.controls.items():
                    if router in (number, EVERY):
                        control.send(message)

    def turn_routers(self, now: float, *, is_behind: bool = False) -> bool:
        """Receive from routers without waiting and run timers, at `now` in monotonic seconds.

        While the scheduler `is_behind`, their messages stay in their sockets. Returns whether some were
        delivered.
        """
        was_told = False
        for router, control in self.controls.items():
            for message in [] if is_behind else control.receive():
                self._deliver(FromRouter(router=router, message=message))
                was_told = True
            lost = control.tick(now)
            if lost:
                self._deliver(RouterLost(router=router, reason=lost))
        return was_told

    def turn_transport(self) -> None:
        """Receive from the transport without waiting and run its timers."""
        for event in self.transport.poll(0.0):
            is_freed = isinstance(event, Freed)
            self._deliver(DropDone(room=event.room, epoch=event.epoch) if is_freed else event)

    def _open(self, command: Opening, opening: Callable[[Opening], None]) -> None:
        """Open a room on the transport.

        A refusal, for example of a repeated Reserve of a closed attempt, ends only that room.
        """
        try:
            opening(command)
        except LocalProtocolError as error:
            kind, reason = type(error).__name__, str(error)
            if isinstance(command, Offer):
                self._deliver(Dropped(room=command.room, epoch=command.epoch, reason=reason))
            else:
                self._deliver(Lost(room=command.room, epoch=command.epoch, kind=kind, reason=reason))


class WorkerLink:
    """The scheduler's handle on the link thread.

    `open_planes` runs in that thread, which owns the sockets. `clock` gives that thread's monotonic seconds,
    without the time in which this process did not run: routers and peers were not silent for so long.
    """

    def __init__(self, open_planes: OpenPlanes) -> None:
        self._open_planes = open_planes
        self._commands: queue.SimpleQueue[Command | ToRouter] = queue.SimpleQueue()
        # No SimpleQueue: before Python 3.13 its `get` waits without limit if a signal ends the wait and
        # `timeout` is over by then. The scheduler would sleep until the next event.
        self._inbox: queue.Queue[Sourced] = queue.Queue()
        self._owners = RoomOwners()
        self._wake_r, self._wake_w = socket.socketpair()
        self._wake_r.setblocking(False)
        self._wake_w.setblocking(False)
        self._is_woken = False  # a byte waits in the pipe; the thread takes it and then looks at the commands
        self._is_serving = False  # the thread performs commands
        self._is_idle = False  # the scheduler waits for an event
        self._started: queue.SimpleQueue[BatonError | None] = queue.SimpleQueue()  # the failure, or None
        self._stopping = threading.Event()
        self._polled: list[zmq.Socket[bytes] | int] = []
        self._poller = zmq.Poller()
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self.connected = False
        self.transport_counters: dict[str, float] = {}
        self._count_at = 0.0
        self.heartbeat_s = 0.25  # as the router wants it
        self.clock = RunningClock(time.monotonic)
        self._turned_at = time.monotonic()

    def __repr__(self) -> str:
        state = "connected" if self.connected else "not connected"
        return f"<WorkerLink {state}, {self._commands.qsize()} commands>"

    def start(self) -> None:
        """Start the thread and open the sockets.

        Raises the BatonError that stopped the thread; StartupError for an address in use.
        """
        self._thread.start()
        failed = self._started.get()
        if failed is not None:
            raise failed

    def feeder(self, watchdog: Watchdog) -> Callable[[float], None]:
        """A function that feeds `watchdog` at a monotonic time, as long as the link thread turns too."""

        def feed(now: float) -> None:
            if now - self._turned_at < watchdog.shortest_s / 2:
                watchdog.feed(now)

        return feed

    def post(self, command: Command | ControlUp) -> None:
        """Queue a command or a message for routers; never blocks."""
        for item in outgoing(self._owners, command):
            self._commands.put(item)
        self._wake()

    def nudge(self) -> None:
        """End the scheduler's wait in `receive`; for other threads that have something for it."""
        self._inbox.put(Nudge())

    def hand_over(self) -> None:
        """Wait until the thread has sent what was posted, at most HAND_OVER_S.

        It needs the interpreter's lock, which a caller that goes on with other work gives it in slices.
        """
        until = time.monotonic() + HAND_OVER_S
        while (self._is_woken or self._is_serving) and time.monotonic() < until:
            time.sleep(POLL_S)

    def receive(self, timeout: float) -> list[LinkEvent]:
        """All events that have arrived; waits up to `timeout` seconds for the first one."""
        events: list[LinkEvent] = []
        try:
            events += incoming(self._owners, self._first(timeout))
            while True:
                events += incoming(self._owners, self._inbox.get_nowait())
        except queue.Empty:
            return events

    def _first(self, timeout: float) -> Sourced:
        if timeout <= 0:
            return self._inbox.get_nowait()
        self._is_idle = True
        try:
            return self._inbox.get(timeout=timeout)
        finally:
            self._is_idle = False

    def retain(self, rooms: Collection[str]) -> None:
        """Forget the owners of all rooms but `rooms`, the ids that the worker still holds.

        Call it when every received event has been handled.
        """
        self._owners.retain(rooms)

    def close(self) -> None:
        """Perform the queued commands, tell the peers, close the sockets and end the thread. Idempotent."""
        self._stopping.set()
        self._wake()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
        self._wake_r.close()
        self._wake_w.close()

    def _wake(self) -> None:
        """Ends the thread's wait, once for all commands that it has not looked at.

        Each byte is a system call, at which the scheduler may lose the interpreter's lock.
        """
        if self._is_woken:
            return
        self._is_woken = True
        try:
            self._wake_w.send(b"\0")
        except (BlockingIOError, OSError):
            return  # a full pipe also wakes the thread; a closed pipe has no reader

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            routers, transport = self._open_planes(context)
        except BatonError as error:
            self._started.put(error)
            context.term()
            return
        except Exception as error:
            self._started.put(StartupError(f"the worker's sockets could not be opened: {error}"))
            context.term()
            return
        self._started.put(None)
        work = LinkWork(routers.links, transport, self._inbox.put)
        try:
            while not self._stopping.is_set():
                self._turn(work, routers, transport)
            self._perform_all(work)
        except Exception as error:
            self._inbox.put(LinkFailed(error=error))
        finally:
            transport.close()
            routers.close()
            context.term()

    def _turn(self, work: LinkWork, routers: RouterLinks, transport: PollableTransport) -> None:
        """Wait for the earliest of a message, a block, a command and a deadline, then do the due work.

        The transport's descriptors may be edge-triggered, so no call touches it between its `next_deadline`
        and the wait.
        """
        controls = routers.links.values()
        self._turned_at, now = time.monotonic(), self.clock()
        deadlines = [
            now + IDLE_WAIT_S,
            transport.next_deadline(now),
            *(control.next_deadline for control in controls),
        ]
        wait = max(0.0, min(at for at in deadlines if at is not None) - now)
        is_behind = (
            self._inbox.qsize() >= INBOX_LIMIT
        )  # then the routers' messages wait in their own bounded queues
        heard = [] if is_behind else [control.socket for control in controls]
        poller = self._poller_for([*transport.pollables(), *heard])
        ready = poller.poll(int(wait * 1000) + (wait > 0))
        if (self._wake_r.fileno(), zmq.POLLIN) in ready:
            self._drain_wake()
        self._perform_all(work)
        is_idle = self._is_idle
        if work.turn_routers(self.clock(), is_behind=is_behind) and is_idle:
            self._let_on(transport)
        work.turn_transport()
        self._is_serving = False
        self.connected = any(control.connected for control in controls)
        self.heartbeat_s = min((control.heartbeat_s for control in controls), default=self.heartbeat_s)
        if not ready or now >= self._count_at:  # they take as long as a short turn
            self.transport_counters, self._count_at = transport.counters, now + COUNT_S
        routers.refresh()

    def _let_on(self, transport: PollableTransport) -> None:
        """Leaves the interpreter's lock to a computing thread that was idle and has got a message.

        The rest of a turn takes as long as the way to its first launch. Work of the transport and commands
        end the wait.
        """
        now = self.clock()
        deadline = transport.next_deadline(now)
        wait = LET_ON_S if deadline is None else min(LET_ON_S, deadline - now)
        if wait > 0:
            wait_readable((self._wake_r.fileno(), *transport.pollables()), wait)

    def _poller_for(self, pollables: list["zmq.Socket[bytes] | int"]) -> zmq.Poller:
        """A poller for `pollables` and the wake-up; reused while they are the same."""
        if pollables != self._polled:
            self._polled, self._poller = pollables, zmq.Poller()
            self._poller.register(self._wake_r.fileno(), zmq.POLLIN)
            for ready in pollables:
                self._poller.register(ready, zmq.POLLIN)
        return self._poller

    def _drain_wake(self) -> None:
        """Takes the byte of `_wake`. A command that comes later sends another one."""
        self._wake_r.recv(4096)
        self._is_serving, self._is_woken = True, False

    def _perform_all(self, work: LinkWork) -> None:
        try:
            while True:
                work.perform(self._commands.get_nowait())
        except queue.Empty:
            return


def incoming(owners: RoomOwners, event: Sourced) -> list[LinkEvent]:
    """The events that the scheduler sees: `event`, or none for a message about another router's room."""
    if not isinstance(event, (FromRouter, RouterLost)):
        return [event]
    seen = owners.take(event)
    return [] if seen is None else [seen]


def outgoing(owners: RoomOwners, item: Command | ControlUp) -> Sequence[Command | ToRouter]:
    """The work of the link thread for an item that the scheduler posted: a command, or addressed messages."""
    return [item] if isinstance(item, Command) else owners.address(item)
