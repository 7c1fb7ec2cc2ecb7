"""The sending process of `baton bench transfer`: JSON orders on stdin, one answer a line on stdout.

    {"num_blocks": n, "folder": dir, "keys": dir}   first; answered with where everything is
    {"raw": "tcp" | "unix"}                         sends all bytes over that socket; the first one accepts it
    {"offer": source, "room": id}                   serves one room to its end
"""

import json
import secrets
import socket
import sys
import time
from pathlib import Path

import msgspec
import torch
import zmq

from ..cluster.keyring import load_keyring
from ..kvtransfer.heap import keep_blocks
from ..kvtransfer.transport import Dropped, Offer, Released
from ..kvtransfer.transports.zmq_blocks import ZmqBlocksSender
from .transfer_parts import PAGE_TOKENS, Done, Where, layout, memory, no_digest, ways


class Source:
    """Prefill's end of every way, over the same pages."""

    def __init__(self, num_blocks: int, folder: Path, keys: str) -> None:
        self._num_blocks = num_blocks
        self._planes = memory(num_blocks, seed=1)
        self._instance = secrets.token_hex(16)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._senders: dict[str, ZmqBlocksSender] = {}
        for way in ways([1]):
            endpoint = "tcp://127.0.0.1:0" if way.link == "tcp" else f"ipc://{folder}/{len(self._senders)}"
            # a context has one authenticator, so keyed senders have their own
            sender = ZmqBlocksSender(
                endpoint,
                self._instance,
                layout(),
                self._planes,
                context=zmq.Context() if way.is_keyed else context,
                keyring=load_keyring(keys, "prefill") if way.is_keyed else None,
                ciphers=way.ciphers,
                transports=tuple(dict.fromkeys((way.transport, "zmq_blocks"))),
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
        """What the receiving process must know."""
        endpoints = {name: sender.endpoint for name, sender in self._senders.items()}
        return Where(self._instance, endpoints, self._listeners["tcp"].getsockname()[1])

    def send_raw(self, kind: str) -> None:
        """All blocks, in order, through a plain socket."""
        if kind not in self._raw:
            self._raw[kind] = self._listeners[kind].accept()[0]
        pages = self._planes.kv.numpy()
        for block in range(self._num_blocks):
            self._raw[kind].sendall(pages[block].data)

    def offer(self, source: str, room: str) -> None:
        """One room with all blocks; returns when it has ended."""
        sender, num_tokens = self._senders[source], self._num_blocks * PAGE_TOKENS
        sender.offer(Offer(room=room, epoch=0, num_tokens=num_tokens, pages=tuple(range(self._num_blocks))))
        sender.advance(room, 0, num_tokens, first_token=1)
        while not any(isinstance(event, Released | Dropped) for event in sender.poll(0.5)):
            pass

    def close(self) -> None:
        """Ends the links."""
        for sender in self._senders.values():
            sender.close()
        for opened in (*self._listeners.values(), *self._raw.values()):
            opened.close()


def main() -> int:
    """Until stdin ends."""
    torch.set_num_threads(1)
    keep_blocks()
    first = json.loads(sys.stdin.readline())
    source = Source(first["num_blocks"], Path(first["folder"]), first["keys"])
    _answer(source.where())
    for line in sys.stdin:
        order = json.loads(line)
        before = time.process_time()
        if "raw" in order:
            source.send_raw(order["raw"])
        else:
            source.offer(order["offer"], order["room"])
        _answer(Done(time.process_time() - before))
    source.close()
    return 0


def _answer(message: Where | Done) -> None:
    sys.stdout.write(msgspec.json.encode(message).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
