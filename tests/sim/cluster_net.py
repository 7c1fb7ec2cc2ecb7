"""Virtual time, processes that share it, and a network between them that may do everything a network does.

A line is one ZeroMQ connection. Without faults it keeps the order of its messages; when it breaks, what is
under way is lost, and the client's end makes a new one. A payload is read when it is delivered, as with
zero-copy sends: until then its memory belongs to the network.
"""

import heapq
from dataclasses import dataclass, field
from itertools import count
from zlib import crc32

import msgspec
from baton.tests.sim.draws import flipped

HEARTBEAT_TIMEOUT_S = 1.5  # a connection whose other end is not heard for so long is cut
REDIAL_S = 0.25
INFINITY = float("inf")


class Died(Exception):
    """Unwinds a turn of a process that was killed in its middle."""


class Delivery:
    """Whether the network still reads a payload."""

    done = False


def verbs(frame):
    """Types of a frame's messages. A single one is named in the first bytes: its first key is "type"."""
    if 0x90 < frame[0] < 0xA0 or frame[0] == 0xDC:
        return tuple(message["type"] for message in msgspec.msgpack.decode(frame))
    at = 1 if frame[0] < 0xDE else 3
    size = frame[at + 5] & 0x1F
    return (bytes(frame[at + 6 : at + 6 + size]).decode("ascii"),)


class Timeline:
    """Events in order of time; equal times in order of making."""

    def __init__(self):
        self.now = 0.0
        self.num_events = 0
        self.hash = 0
        self.story = None
        self._heap = []
        self._order = count()

    def at(self, when, action, *args):
        heapq.heappush(self._heap, (max(when, self.now), next(self._order), action, args))

    def run_next(self):
        self.now, _, action, args = heapq.heappop(self._heap)
        self.num_events += 1
        action(*args)

    def note(self, *words):
        """One line of the story; all lines together make the hash of the run."""
        line = f"{self.now:.4f} {' '.join(map(str, words))}"
        self.hash = crc32(line.encode(), self.hash)
        if self.story is not None:
            self.story.append(line)


@dataclass(eq=False)
class Process:
    """One start of a node: it lives until it is killed, and comes back as another one."""

    role: str  # "R", "P" or "D"
    name: str  # of the node, such as "D1"; stays over restarts
    instance: str
    timeline: Timeline
    is_alive: bool = True
    stalled_until: float = 0.0  # the whole process stands still
    offset: float = 0.0  # of its clock
    frozen_until: float = 0.0
    frozen_at: float = 0.0

    def clock(self):
        now = self.timeline.now
        return self.frozen_at if now < self.frozen_until else now + self.offset

    def freeze(self, seconds):
        """The clock stands still, and goes on from there."""
        self.frozen_at = self.clock()
        self.frozen_until = self.timeline.now + seconds
        self.offset = self.frozen_at - self.frozen_until

    def deliver(self, line, is_up, frames):
        """A message of the network."""
        raise NotImplementedError

    def line_broke(self, line):
        """A connection is gone."""


@dataclass(eq=False)
class Line:
    number: int
    kind: str  # "control" or "kv"
    client: Process
    server: Process
    address: str
    is_alive: bool = True
    last: list = field(default_factory=lambda: [0.0, 0.0])  # arrival of the last message, per direction
    under_way: dict = field(default_factory=dict)  # packets, in order of sending

    def __repr__(self):
        return f"{self.client.name}-{self.server.name}#{self.number}"


@dataclass(eq=False)
class Packet:
    line: Line
    is_up: bool
    frames: tuple
    verbs: tuple
    delivery: Delivery | None = None


class Network:
    """All lines. `on_transition(process, way, verb)` returns "before" or "after" to kill a process there."""

    def __init__(self, timeline, rng, faults, on_transition, reached):
        self.timeline, self.rng, self.faults, self.reached = timeline, rng, faults, reached
        self.on_transition = on_transition
        self.on_kill = None
        self.is_faulty = False
        self.listening = {}  # address -> process
        self.blocked = {}  # (from, to) node names -> (since, until)
        self._lines = {}  # number -> line
        self._dialled = {}  # (client, address) -> line
        self._redial_at = {}
        self._numbers = count(1)

    # --- connections ----------------------------------------------------------------------------------------

    def line(self, number):
        """The server's view of a connection."""
        return self._lines.get(number)

    def dial(self, client, address, kind):
        """The client's connection to an address, made now if it can be; None when nobody answers there."""
        line = self._dialled.get((client, address))
        if line is not None:
            return line
        server, now = self.listening.get(address), self.timeline.now
        if server is None or not server.is_alive or server.stalled_until > now:
            return None
        if self._redial_at.get((client, address), 0.0) > now or self._is_blocked(client, server):
            return None
        line = Line(next(self._numbers), kind, client, server, address)
        self._lines[line.number] = self._dialled[client, address] = line
        return line

    def hang_up(self, client, address):
        line = self._dialled.get((client, address))
        if line is not None:
            self.cut(line)

    def cut(self, line, words_survive=None):
        """The connection breaks. What process `words_survive` has sent reaches the other end still."""
        if not line.is_alive:
            return
        line.is_alive = False
        del self._lines[line.number], self._dialled[line.client, line.address]
        self._redial_at[line.client, line.address] = self.timeline.now + REDIAL_S * self.rng.random()
        for packet in list(line.under_way):
            sender = line.client if packet.is_up else line.server
            if sender is words_survive:
                packet.frames = tuple(bytes(frame) for frame in packet.frames)
            else:
                line.under_way.pop(packet, None)
            if packet.delivery is not None:
                packet.delivery.done = True
        for process in (line.client, line.server):
            if process.is_alive:
                process.line_broke(line)

    def drop_process(self, process):
        """A process is gone; its last words arrive in half the cases."""
        for address in [a for a, p in self.listening.items() if p is process]:
            del self.listening[address]
        for line in self.lines_of(process):
            self.cut(line, process if self.rng.random() < 0.5 else None)

    def lines_of(self, process):
        return [line for line in self._lines.values() if process in (line.client, line.server)]

    def all_lines(self):
        return list(self._lines.values())

    # --- partitions -----------------------------------------------------------------------------------------

    def block(self, source, target, seconds):
        """Nothing passes between two nodes for a while; longer than a heartbeat's patience cuts the lines."""
        now = self.timeline.now
        self.blocked[source, target] = (now, now + seconds)
        if seconds > HEARTBEAT_TIMEOUT_S:
            self.timeline.at(now + HEARTBEAT_TIMEOUT_S, self._cut_between, source, target)

    def _cut_between(self, source, target):
        for line in self.all_lines():
            if {line.client.name, line.server.name} == {source, target}:
                self.cut(line)

    def _is_blocked(self, a, b):
        now = self.timeline.now
        return any(self.blocked.get(pair, (0, 0))[1] > now for pair in ((a.name, b.name), (b.name, a.name)))

    def heal(self):
        self.is_faulty = False
        self.blocked.clear()

    # --- messages -------------------------------------------------------------------------------------------

    def send(self, line, is_up, frames):
        """Puts a message on a line; returns its Delivery, or None when the line takes none now."""
        source, target = (line.client, line.server) if is_up else (line.server, line.client)
        faults, rng, now = self.faults, self.rng, self.timeline.now
        if self.is_faulty and faults.congestion and rng.random() < faults.congestion:
            self.reached["congestion"] += 1
            return None
        names = verbs(frames[0])
        death = self._death(source, "send", names)
        if death == "before":
            self.on_kill(source)
            raise Died
        packet = Packet(line, is_up, frames, names, Delivery())
        when = now + 0.0005 + 0.002 * rng.random()
        if self.is_faulty:
            when = self._delayed(packet, when)
        blocked = self.blocked.get((source.name, target.name))
        if blocked is not None and blocked[1] > now:
            when += blocked[1] - now
        reorder = faults.control_reorder if line.kind == "control" else faults.kv_reorder
        if self.is_faulty and reorder and rng.random() < reorder:
            self.reached[line.kind + "_reorder"] += 1
            when += 0.02 * rng.random()
        else:
            line.last[is_up] = when = max(when, line.last[is_up])
        line.under_way[packet] = None
        self.timeline.at(when, self._arrive, packet)
        if death == "after":
            self.on_kill(source)
            raise Died
        return packet.delivery

    def _delayed(self, packet, when):
        faults, rng = self.faults, self.rng
        if faults.delay and rng.random() < faults.delay:
            self.reached["delay"] += 1
            when += 0.1 + 1.9 * rng.random() ** 2
        return when

    def _arrive(self, packet):
        line = packet.line
        if packet not in line.under_way:
            return
        target = line.server if packet.is_up else line.client
        if target.is_alive and target.stalled_until > self.timeline.now:  # the kernel keeps it
            self.timeline.at(target.stalled_until, self._arrive, packet)
            return
        line.under_way.pop(packet, None)
        frames = tuple(bytes(frame) for frame in packet.frames)  # read now, and not before
        if packet.delivery is not None:
            packet.delivery.done = True
        if not target.is_alive:
            return
        if self.is_faulty:
            frames = self._damaged(packet, frames)
            if frames is None:
                return
        self.timeline.note(
            "+".join(packet.verbs), line, "up" if packet.is_up else "down", len(frames[0]), crc32(frames[-1])
        )
        death = self._death(target, "recv", packet.verbs)
        if death != "before":
            target.deliver(line, packet.is_up, frames)
        if death:
            self.on_kill(target)

    def _death(self, process, way, names):
        """Whether a process dies of a frame: at the first of its messages that it may die at."""
        return next((death for name in names if (death := self.on_transition(process, way, name))), "")

    def _damaged(self, packet, frames):
        """What is left of a message, or None."""
        faults, rng, line, reached = self.faults, self.rng, packet.line, self.reached
        loss, again = (
            (faults.control_loss, faults.control_duplicate)
            if line.kind == "control"
            else (faults.kv_loss, faults.kv_duplicate)
        )
        if loss and rng.random() < loss:
            reached[line.kind + "_loss"] += 1
            return None
        if again and rng.random() < again:
            reached[line.kind + "_duplicate"] += 1
            copy = Packet(line, packet.is_up, frames, packet.verbs)
            if line.is_alive:
                line.under_way[copy] = None
                self.timeline.at(self.timeline.now + 0.3 * rng.random() ** 3, self._arrive, copy)
        if line.kind == "control":
            if faults.control_break and rng.random() < faults.control_break:
                reached["control_break"] += 1
                self.cut(line)
                return None
            flip = "report_flip" if packet.is_up else "order_flip"
            if (rate := getattr(faults, flip)) and rng.random() < rate:
                reached[flip] += 1
                return self._changed(frames, lambda data: flipped(data, rng))
            return frames
        if "Block" not in packet.verbs and faults.kv_flip and rng.random() < faults.kv_flip:
            reached["kv_flip"] += 1
            return self._changed(frames, lambda data: flipped(data, rng))
        if faults.truncate and rng.random() < faults.truncate:
            reached["truncate"] += 1
            return self._changed(frames, lambda data: data[: rng.randrange(len(data))])
        if "Block" in packet.verbs and faults.flip and rng.random() < faults.flip:
            reached["flip"] += 1
            return self._changed(frames, lambda data: flipped(data, rng))
        return frames

    def _changed(self, frames, change):
        which = self.rng.randrange(len(frames))
        if not frames[which]:
            return frames
        return tuple(change(data) if i == which else data for i, data in enumerate(frames))
