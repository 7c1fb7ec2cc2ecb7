"""The sending process of `baton bench transfer`: JSON orders on stdin, one answer a line on stdout.

a `Setup`                                       first; answered with the endpoints
{"raw": "tcp" | "unix"}                         sends all bytes over that socket; the first such order accepts
                                                the connection
{"offer": source, "rooms": [id, ...]}           serves rooms to their end; they are ready after all Attaches
"""

import json
import secrets
import socket
import sys
import time
from collections.abc import Callable, Sequence

import msgspec
import torch
import zmq

from ...cluster.errors import TransferError
from ...cluster.security.keyring import load_keyring
from ...kvtransfer.memory.malloc_tuning import keep_blocks
from ...kvtransfer.transport import Dropped, Offer, Released
from ...kvtransfer.transports.zmq_blocks import ZmqBlocksSender
from .parts import PAGE_TOKENS, Done, SourceSetup, Where, layout, memory, no_digest, ways

FORWARD_CYCLES = 6_000_000  # some 3 ms
ATTACH_S = 60.0  # the other process may be gone
SLABS_BYTES = 8 << 30  # limit of the slabs of all ways of one transport


class Source:
    """Prefill's end of every measured combination, over the same pages."""

    def __init__(self, setup: SourceSetup) -> None:
        if setup.source != "cpu":
            torch.cuda.set_device(setup.source)  # as a worker's process has it
        self._num_pages, folder, keys = setup.num_pages, setup.folder, setup.keys
        self._planes = memory(setup.num_pages, 1, setup.source)
        self._host = self._planes if setup.source == "cpu" else memory(setup.num_pages, 1)
        self._instance = secrets.token_hex(16)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._senders: dict[str, ZmqBlocksSender] = {}
        for way in ways([1], is_on_gpus=setup.is_on_gpus):
            endpoint = "tcp://127.0.0.1:0" if way.link == "tcp" else f"ipc://{folder}/{len(self._senders)}"
            # a context has one authenticator, so keyed senders have their own
            sender = ZmqBlocksSender(
                endpoint,
                self._instance,
                layout(setup.block_bytes),
                self._planes,
                context=zmq.Context() if way.is_keyed else context,
                keyring=load_keyring(keys, "prefill") if way.is_keyed else None,
                ciphers=way.ciphers,
                transports=way.transports,
                device_slab_bytes=SLABS_BYTES,
            )
            if way.guard == "plain":
                sender.use_crc(no_digest)
            self._senders[way.source] = sender
        self._listeners = {"tcp": socket.socket(), "unix": socket.socket(socket.AF_UNIX)}
        self._listeners["tcp"].bind(("127.0.0.1", 0))
        self._listeners["unix"].bind(f"{folder}/raw")
        for listener in self._listeners.values():
            listener.listen(1)
        self._raw: dict[str, socket.socket] = {}

    def where(self) -> Where:
        """The endpoints and keys for the receiving process."""
        endpoints = {name: sender.endpoint for name, sender in self._senders.items()}
        return Where(self._instance, endpoints, self._listeners["tcp"].getsockname()[1])

    def send_raw(self, kind: str) -> None:
        """Sends all blocks in order through a plain socket."""
        if kind not in self._raw:
            self._raw[kind] = self._listeners[kind].accept()[0]
        pages = self._host.kv.numpy()
        for page in range(self._num_pages):
            self._raw[kind].sendall(pages[page].data)

    def offer(self, source: str, rooms: Sequence[str]) -> float:
        """Offers rooms with all blocks, as a worker does behind a forward: decode attaches before its end.

        Returns the monotonic time at which the blocks were ready, when all rooms have ended.
        """
        sender, num_tokens = self._senders[source], self._num_pages * PAGE_TOKENS
        pages = tuple(range(self._num_pages))
        for room in rooms:
            sender.offer(Offer(room=room, epoch=0, num_tokens=num_tokens, pages=pages))
        until = time.monotonic() + ATTACH_S
        while not all(sender.session.is_attached(room, 0) for room in rooms):
            if time.monotonic() > until:
                raise TransferError(f"decode attached to no room of {source} within {ATTACH_S:g} s")
            sender.poll(0.001)
        has_ended = self._forward()
        if self._planes.kv.is_cuda:
            for room in rooms:
                sender.launched(room, 0, 0, num_tokens)
        while not has_ended():
            sender.poll(0.0)
        ready_at = time.monotonic()
        for room in rooms:
            sender.advance(room, 0, num_tokens, first_token=1)
        num_left = len(rooms)
        while num_left:
            num_left -= sum(isinstance(event, Released | Dropped) for event in sender.poll(0.5))
        return ready_at

    def _forward(self) -> Callable[[], bool]:
        """Keeps the device busy, in the place of a forward over all pages. Returns whether that has ended."""
        order = self._planes.order
        if not self._planes.kv.is_cuda or order is None:
            return lambda: True
        with torch.cuda.device(self._planes.kv.device):
            torch.cuda._sleep(FORWARD_CYCLES)  # type: ignore[no-untyped-call]
            order.stamp(range(self._num_pages))
            ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ended.record()
        return ended.query

    def close(self) -> None:
        """Closes the links."""
        for sender in self._senders.values():
            sender.close()
        for opened in (*self._listeners.values(), *self._raw.values()):
            opened.close()


def main() -> int:
    """Carries out orders until stdin ends."""
    torch.set_num_threads(1)
    keep_blocks()
    source = Source(msgspec.json.decode(sys.stdin.readline(), type=SourceSetup))
    _answer(source.where())
    for line in sys.stdin:
        order = json.loads(line)
        before, ready_at = time.process_time(), 0.0
        if "raw" in order:
            source.send_raw(order["raw"])
        else:
            ready_at = source.offer(order["offer"], order["rooms"])
        _answer(Done(time.process_time() - before, ready_at))
    source.close()
    return 0


def _answer(message: Where | Done) -> None:
    sys.stdout.write(msgspec.json.encode(message).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
