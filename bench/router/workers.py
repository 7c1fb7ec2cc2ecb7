"""A prefill and a decode worker that compute nothing: `python -m baton.bench.router.workers CONTROL [STEP_S
[TOKENS]]`.

Both run in one process and use the control-plane protocol. A request is answered at once with all tokens that
it asks for. With STEP_S decode gives each of its requests TOKENS (1) per step, all in one message, as a real
worker does.
"""

import secrets
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import zmq

from ...cluster.net.sockets import Socket, connect, make_socket, recv_parts, try_send
from ...cluster.protocol.codec import CONTROL_MAX_FRAME, control_down_decoder, messages_of, pack, send_waiting
from ...cluster.protocol.messages import (
    PROTOCOL_MAJOR,
    YOUNG_FIELDS,
    Cancel,
    ControlDown,
    ControlUp,
    Finished,
    FirstToken,
    Gone,
    Heartbeat,
    Hello,
    Prefill,
    Reserve,
    Reserved,
    TokenItem,
    Tokens,
    Welcome,
    WorkerStats,
)

HEARTBEAT_S = 0.1
PAGES = 1 << 30
TOKEN = 60  # of the answer: a letter, above the special tokens at the start of most vocabularies


@dataclass(eq=False)
class Stream:
    """One request on decode."""

    room: str
    epoch: int
    num_wanted: int
    num_sent: int = 1  # prefill's token


class FakeWorker:
    """One worker's socket and its unfinished streams."""

    def __init__(self, context: "zmq.Context[Socket]", endpoint: str, role: str) -> None:
        self.role = role
        self.instance = secrets.token_hex(16)
        self.socket = make_socket(context, zmq.DEALER)
        connect(self.socket, endpoint)
        self.streams: dict[str, Stream] = {}
        self._next_beat = 0.0
        self._is_known = False
        self._outbox: deque[bytes] = deque()
        self._decoder = control_down_decoder()
        is_prefill = role == "prefill"
        self._hello = Hello(
            role=role,
            instance=self.instance,
            protocol=PROTOCOL_MAJOR,
            fingerprint="bench",
            model="bench",
            kv_endpoint="ipc:///nowhere" if is_prefill else "",
            pages_total=PAGES,
            page_size=16,
            max_context=1 << 24,
            max_running=0,
            takes=YOUNG_FIELDS,
            takes_batches=True,
        )

    def send(self, message: ControlUp) -> None:
        self._outbox.append(pack(message))

    def turn(self, now: float, *, is_stepping: bool) -> None:
        """Reads and answers all waiting messages, and sends a heartbeat when one is due."""
        while (parts := recv_parts(self.socket, 1, CONTROL_MAX_FRAME)) is not None:
            messages: tuple[ControlDown, ...] = messages_of(self._decoder.decode(parts[0]))
            for message in messages:
                self._take(message, is_stepping)
        if now >= self._next_beat:
            self._next_beat = now + HEARTBEAT_S
            stats = WorkerStats(pages_total=PAGES, pages_free=PAGES)
            self.send(Heartbeat(instance=self.instance, stats=stats) if self._is_known else self._hello)
        is_batched = self._is_known  # the benchmark's router accepts batches
        send_waiting(self._outbox, lambda frame: try_send(self.socket, [frame]), takes_several=is_batched)

    def step(self, num_tokens: int) -> None:
        """Sends the next `num_tokens` tokens of every stream."""
        items, ended = [], []
        for stream in self.streams.values():
            ids = [TOKEN] * min(num_tokens, stream.num_wanted - stream.num_sent)
            items.append(TokenItem(room=stream.room, epoch=stream.epoch, seq=stream.num_sent, ids=ids))
            stream.num_sent += len(ids)
            if stream.num_sent >= stream.num_wanted:
                ended.append(stream)
        if items:
            self.send(Tokens(instance=self.instance, items=items))
        for stream in ended:
            del self.streams[stream.room]
            self._finish(stream.room, stream.epoch, stream.num_wanted)

    def _take(self, message: ControlDown, is_stepping: bool) -> None:
        match message:
            case Welcome():
                self._is_known = True
            case Prefill(room=room, epoch=epoch, sampling=sampling):
                finish = "length" if sampling.max_new_tokens == 1 else ""
                self.send(
                    FirstToken(room=room, epoch=epoch, instance=self.instance, token=TOKEN, finish=finish)
                )
            case Reserve(room=room, epoch=epoch, sampling=sampling):
                self.send(Reserved(room=room, epoch=epoch, instance=self.instance))
                self._begin(room, epoch, sampling.max_new_tokens, is_stepping)
            case Cancel(room=room, epoch=epoch):
                self.streams.pop(room, None)
                self.send(Gone(room=room, epoch=epoch, instance=self.instance))
            case _:
                pass

    def _begin(self, room: str, epoch: int, num_wanted: int, is_stepping: bool) -> None:
        if num_wanted == 1:
            return
        if is_stepping:
            self.streams[room] = Stream(room, epoch, num_wanted)
            return
        item = TokenItem(room=room, epoch=epoch, seq=1, ids=[TOKEN] * (num_wanted - 1))
        self.send(Tokens(instance=self.instance, items=[item]))
        self._finish(room, epoch, num_wanted)

    def _finish(self, room: str, epoch: int, num_tokens: int) -> None:
        self.send(
            Finished(
                room=room, epoch=epoch, instance=self.instance, reason="length", output_tokens=num_tokens
            )
        )


def serve(endpoint: str, step_s: float, num_tokens: int) -> None:
    """Serves both workers until the process is killed. `step_s` of 0 answers each request at once."""
    context: zmq.Context[Socket] = zmq.Context()
    workers = [FakeWorker(context, endpoint, role) for role in ("prefill", "decode")]
    poller = zmq.Poller()
    for worker in workers:
        poller.register(worker.socket, zmq.POLLIN)
    next_step = time.monotonic() + step_s
    while True:
        now = time.monotonic()
        poller.poll(max(1, round(1000 * min(HEARTBEAT_S, next_step - now if step_s else HEARTBEAT_S))))
        now = time.monotonic()
        if step_s and now >= next_step:
            next_step += step_s
            workers[1].step(num_tokens)
        for worker in workers:
            worker.turn(now, is_stepping=step_s > 0)


def main(argv: Sequence[str]) -> None:
    """Runs the workers with the arguments `CONTROL [STEP_S [TOKENS]]`."""
    serve(argv[0], float(argv[1]) if len(argv) > 1 else 0.0, int(argv[2]) if len(argv) > 2 else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
