"""Hosts with their own keys, a control socket in a thread, and raw peers for tests of admission."""

import asyncio
import contextlib
import secrets
import socket as stdlib_socket
import threading
import time
from urllib.parse import urlsplit

import zmq
from baton.cluster.net.sockets import CONTROL_HIGH_WATER, make_socket, recv_parts, try_send
from baton.cluster.protocol.codec import encode
from baton.cluster.protocol.messages import PROTOCOL_MAJOR, Hello
from baton.cluster.security.keyring import Curve, load_keyring, make_key, read_key
from baton.deploy.keys.keys import add, init
from baton.router.workers.control import ControlSocket

REFUSAL_S = 0.5  # a handshake on loopback takes a few ms; who has not got through by then was refused
PATIENCE_S = 60.0  # for who is to get through


class Hosts:
    """Directories of `baton keys`, one per host: router, prefill/p0, decode/d0, all admitting each other."""

    def __init__(self, directory):
        self._directory = directory
        self.router, self.prefill = self.new("router", "r"), self.new("prefill", "p0")
        self.decode = self.new("decode", "d0")
        for host in (self.router, self.prefill, self.decode):
            for role, other in (("router", self.router), ("prefill", self.prefill), ("decode", self.decode)):
                if host is not other:
                    admit(host, other, role)

    def new(self, role, name):
        """A host that nobody admits yet."""
        place = self._directory / f"{role}-{name}"
        init(place, [role], name)
        return place


def admit(host, other, role):
    """`host` admits the key of `other`."""
    key = read_key(other, role)
    add(host, key.public, role, key.name, 3600, time.time())


def curve(host, role, server):
    """The keys of `host` to call `server` (another host, a router or prefill) with."""
    serving = "router" if (server / "router.key").exists() else "prefill"
    return load_keyring(str(host), role).calling(read_key(server, serving).public)


def stranger(server):
    """Keys that nobody lists."""
    key = make_key("decode", "stranger")
    serving = "router" if (server / "router.key").exists() else "prefill"
    return Curve(
        bytes.fromhex(key.public), bytes.fromhex(key.secret), bytes.fromhex(read_key(server, serving).public)
    )


def hello(role, instance=None):
    return Hello(
        role=role, instance=instance or secrets.token_hex(16), protocol=PROTOCOL_MAJOR, fingerprint="f",
        model="m",
        kv_endpoint="ipc:///x" if role == "prefill" else "", pages_total=4, page_size=16, max_context=64,
        max_running=2,
    )  # fmt: skip


class Front:
    """A router's control socket on its own loop; `heard` lists the received (routing id, message)."""

    def __init__(self, endpoint="tcp://127.0.0.1:0", keys=None):
        self.heard = []
        self._made = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(endpoint, keys)))
        self._thread.start()
        assert self._made.wait(PATIENCE_S)
        self.endpoint = self.control.endpoint

    async def _run(self, endpoint, keys):
        self._stop, self._loop = asyncio.Event(), asyncio.get_running_loop()
        keyring = load_keyring(str(keys), "router") if keys is not None else None
        self.control = ControlSocket(endpoint, trusted_network=False, keyring=keyring)
        self.control.open(lambda identity, message: self.heard.append((identity, message)))
        self._made.set()
        await self._stop.wait()
        self.control.close()

    def call(self, function, *arguments):
        """`function(*arguments)` on the loop."""

        async def work():
            return function(*arguments)

        return asyncio.run_coroutine_threadsafe(work(), self._loop).result(PATIENCE_S)

    def instances(self):
        return [message.instance for _, message in list(self.heard)]

    def close(self):
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the control socket did not close"


@contextlib.contextmanager
def dealer(endpoint, keys=None, routing_id=None, high_water=CONTROL_HIGH_WATER):
    """A raw peer in a context of its own."""
    context = zmq.Context()
    socket = make_socket(
        context, zmq.DEALER, max_frame=1 << 26, curve=keys, linger_ms=0, high_water=high_water
    )
    if routing_id is not None:
        socket.setsockopt(zmq.ROUTING_ID, routing_id)
    socket.connect(endpoint)
    try:
        yield socket
    finally:
        socket.close()
        context.term()


def say(socket, *messages, seconds=PATIENCE_S):
    """Sends once the connection stands; False when it does not come to stand within `seconds`."""
    end = time.monotonic() + seconds
    for message in messages:
        frame = message if isinstance(message, bytes) else encode(message)
        while not try_send(socket, [frame]):
            if time.monotonic() > end:
                return False
            time.sleep(0.002)
    return True


def is_refused(socket, message):
    """Whether no connection comes to stand."""
    return not say(socket, message, seconds=REFUSAL_S)


def answer(socket, seconds=PATIENCE_S):
    """The next message's bytes, None when none comes."""
    parts = recv_parts(socket, 2, 1 << 20) if socket.poll(int(seconds * 1000)) else None
    return parts[0].bytes if parts else None


def raw_send(endpoint, steps, patience=0.3):
    """Writes raw bytes to a port; returns the number of connections left at the end (0: we were cut off)."""
    where = urlsplit(endpoint)
    with stdlib_socket.create_connection((where.hostname, where.port), timeout=60) as connection:
        connection.settimeout(PATIENCE_S)
        try:
            for step in steps:
                connection.sendall(step)
                connection.settimeout(patience)
                with contextlib.suppress(TimeoutError, stdlib_socket.timeout):
                    while connection.recv(65536):
                        pass
                    return 0
        except OSError:
            return 0
        return 1
