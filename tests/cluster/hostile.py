"""Finds every port that a running cluster listens at, and makes hostile input for them."""

import contextlib
import pickle
import re
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from baton.cluster.net.sockets import try_send
from baton.cluster.protocol.codec import CONTROL_MAX_FRAME, KV_MAX_BYTES
from baton.cluster.security.keyring import load_keyring, read_key
from baton.kvtransfer.transports.two_way import PREFIX
from baton.tests.cluster.keyed_peers import stranger
from baton.tests.cluster.serving import status
from baton.tests.corpora import corpus

MIB = 1 << 20
CANARY = (
    "BATON_CANARY"  # the file that a pickle of the corpora makes in the working directory when it is loaded
)
LISTENING = "00010000"  # __SO_ACCEPTCON in /proc/net/unix
# who calls a port of pages, and the role whose key it has
PEERS = {"kv": ("decode", "prefill"), "prefixes": ("prefill", "decode")}
PICKLE = b"cposix\nsystem\n(S'touch BATON_CANARY'\ntR."


@dataclass(frozen=True)
class Port:
    """One listening TCP port of one process."""

    cluster: object
    child: str  # its name, as router or prefill-0
    plane: str  # http, control, kv, bulk; prefixes and prefix-bulk are kv and bulk of the way back
    number: int
    keys: Path | None

    def __repr__(self):
        return f"{self.plane}:{'keys' if self.keys else 'plain'}"

    @property
    def endpoint(self):
        return f"tcp://127.0.0.1:{self.number}"

    @property
    def max_frame(self):
        return KV_MAX_BYTES if self.plane in ("kv", "prefixes") else CONTROL_MAX_FRAME

    @property
    def pid(self):
        return next(child.pid for child in self.cluster.children if child.name == self.child)

    def resident(self):
        """Bytes of the process that listens, and of no other."""
        return psutil.Process(self.pid).memory_info().rss

    def curve(self, *, is_listed=True):
        """Keys to call it with; None on a link without keys."""
        if self.keys is None:
            return None
        caller, role = PEERS.get(self.plane, ("decode", "router"))
        if not is_listed:
            return stranger(self.keys)
        return load_keyring(str(self.keys), caller).calling(read_key(self.keys, role).public)

    def counter(self, name):
        """One of the totals that it reports; a worker's are as old as its last heartbeat."""
        document = status(self.cluster)
        if self.child == "router":
            return document["router"]["events"][name]
        return next(w for w in document["workers"] if w["pid"] == self.pid)["counters"][name]

    def num_malformed(self):
        if self.plane == "control":
            return self.counter("control_malformed") + self.counter("control_oversized")
        return self.counter(PREFIX + "malformed" if self.child.startswith("decode") else "malformed")

    def warnings(self, since=0):
        """What it logged as a warning or worse, from character `since` of the cluster's output."""
        text = self.cluster.output.getvalue()[since:]
        return [
            line
            for line in text.splitlines()
            if re.match(rf"{self.child}\s*\|.*(WARNING|ERROR|Traceback)", line)
        ]


def listeners(pid):
    """(kind, address) of everything that a process listens at: TCP, UDP and unix sockets."""
    process = psutil.Process(pid)
    found = {("tcp", c.laddr.ip) for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    found |= {("udp", c.laddr.ip) for c in process.net_connections("udp")}
    return found | {("unix", path) for path in _unix_paths(pid)}


def _unix_paths(pid):
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if named := re.fullmatch(r"socket:\[(\d+)\]", str(link.readlink())):
                inodes.add(named.group(1))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == LISTENING and words[6] in inodes:
            yield words[7] if len(words) > 7 else ""


def ports(cluster, keys=None):
    """All TCP ports of a cluster, the planes told apart by what the processes were told to bind."""
    found = []
    for child in cluster.children:
        for connection in psutil.Process(child.pid).net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                number = connection.laddr.port
                plane = "http" if number == cluster.config.port else "control"
                if child.role == "prefill":
                    plane = "bulk" if _asks_for_tickets(number) else "kv"
                elif child.role == "decode":
                    plane = "prefix-bulk" if _asks_for_tickets(number) else "prefixes"
                found.append(Port(cluster, child.name, plane, number, Path(keys) if keys else None))
    return found


def _asks_for_tickets(number):
    """Whether a ZeroMQ port's greeting names the PLAIN mechanism."""
    with socket.create_connection(("127.0.0.1", number), timeout=30) as connection:
        connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03")
        greeting = b""
        while len(greeting) < 32 and (data := connection.recv(64)):
            greeting += data
    return greeting[12:32].rstrip(b"\0") == b"PLAIN"


def send_all(peer, frames, seconds=60.0):
    """Sends message after message as the peer takes them; False when it stops taking."""
    end = time.monotonic() + seconds
    for frame in frames:
        while not try_send(peer, [frame]):
            if time.monotonic() > end:
                return False
            time.sleep(0.001)
    return True


def hostile_frames():
    """About a thousand frames that are no message: corpus, pickles, extension types, nests, timestamps."""
    frames = [
        data for case in corpus.load("msgpack_frames") if len(data := corpus.data(case)) <= KV_MAX_BYTES
    ]
    pickles = [
        PICKLE,
        *(pickle.dumps({"room": "a" * 32, "type": "Hello"}, protocol) for protocol in range(6)),
    ]
    for blob in pickles:
        binary = b"\xc5" + struct.pack(">H", len(blob)) + blob
        extension = [b"\xc8" + struct.pack(">HB", len(blob), kind) + blob for kind in (0, 1, 42, 127, 255)]
        frames += [blob, binary, *extension, b"\x82\xa4type\xa5Hello\xa8instance" + binary]
    for kind in range(128):
        frames += [bytes([lead, kind]) + bytes(size) for lead, size in FIXED]
        frames += [b"\xc7" + bytes([3, kind]) + b"\xd4\x01\x00", b"\x81\xa4type" + bytes([0xD4, kind, 0])]
    frames += [b"\x91" * depth + b"\xc0" for depth in (1, 100, 1000, 10_000)]
    frames += [b"\x81\xa1a" * depth + b"\xc0" for depth in (1, 100, 1000, 5000)]
    times = [(nanos, seconds) for nanos in (0, 10**9, 2**32 - 1) for seconds in EXTREME]
    frames += [b"\xc7\x0c\xff" + struct.pack(">Iq", *time) for time in times]
    return [*frames, b"\xd6\xff" + struct.pack(">I", 2**32 - 1), b"\xd7\xff" + b"\xff" * 8]


FIXED = ((0xD4, 1), (0xD5, 2), (0xD6, 4), (0xD7, 8), (0xD8, 16))  # extension types of a fixed size
EXTREME = (-(2**63), -1, 0, 2**31, 2**63 - 1)
