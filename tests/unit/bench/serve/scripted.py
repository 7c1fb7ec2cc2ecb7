"""A scripted endpoint for `baton bench serve` in virtual time."""

import asyncio
import json
import random

from baton.bench.serve.bench import LoadPlan, ServeBench
from baton.bench.serve.client import LoadClient, endpoint_of
from baton.bench.serve.figures import Goals
from baton.bench.serve.prompts import random_prompts
from baton.tests.unit.virtual_time import run

TTFT_S, GAP_S, NUM_TOKENS = 0.2, 0.05, 5
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Wire:
    """What a client writes to; the other end is a coroutine of the script."""

    def __init__(self, endpoint, reader):
        self.endpoint, self.reader = endpoint, reader
        self.sent = b""
        self.is_closed = False

    def write(self, data):
        self.sent += data
        head, _, body = self.sent.partition(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
        if len(body) == size:
            self.sent = b""
            answer = self.endpoint.serve(head.decode(), json.loads(body or b"{}"), self)
            self.endpoint.tasks.append(asyncio.ensure_future(answer))

    async def drain(self):
        pass

    def close(self):
        self.is_closed = True


class Scripted:
    """Answers as `script(request number)` says: "ok", "429", "frame", "cut", "early", "hang", "slow".

    `slowness(now)` multiplies its delays at that time.
    """

    def __init__(self, script=lambda number: "ok", per_event=1, slowness=lambda now: 1.0):
        self.script, self.per_event, self.slowness = script, per_event, slowness
        self.bodies, self.wires, self.tasks = [], [], []

    async def connect(self, host, port, **_):
        if self.script(-1) == "refused":
            raise ConnectionRefusedError
        wire = Wire(self, asyncio.StreamReader())
        self.wires.append(wire)
        return wire.reader, wire

    async def serve(self, head, body, wire):
        if head.startswith("GET /v1/models ") and self.script(-1).isdigit():
            return wire.reader.feed_data(whole(int(self.script(-1)), b'{"error": {"message": "No."}}'))
        if head.startswith("GET /v1/models "):
            return wire.reader.feed_data(whole(200, b'{"data": [{"id": "toy"}]}'))
        if head.startswith("GET"):
            return wire.reader.feed_data(whole(404, b"{}"))
        self.bodies.append(body)
        what = self.script(len(self.bodies) - 1)
        if what == "429":
            return wire.reader.feed_data(whole(429, b'{"error": {"code": "overloaded"}}'))
        if what == "hang":
            return None
        factor = self.slowness(asyncio.get_running_loop().time())
        await asyncio.sleep(factor * TTFT_S * (3 if what == "slow" else 1))
        wire.reader.feed_data(SSE)
        for i in range(NUM_TOKENS):
            if i:
                await asyncio.sleep(factor * GAP_S)
            if what == "cut" and i == 2:
                return wire.reader.feed_eof()
            wire.reader.feed_data(event({"choices": [{"text": "x", "token_ids": [7] * self.per_event}]}))
        if what == "frame":
            wire.reader.feed_data(event({"error": {"code": "server_error"}}))
        elif what != "early":
            num_output = NUM_TOKENS * self.per_event
            wire.reader.feed_data(
                event({"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": num_output}})
            )
            wire.reader.feed_data(b"e\r\ndata: [DONE]\n\n\r\n")
        return wire.reader.feed_data(b"0\r\n\r\n")


def whole(status, body):
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


def event(value):
    data = f"data: {json.dumps(value)}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


def measured(
    endpoint, level, bound, *, goals=None, questions=None, timeout_s=60.0, busy=None, takes_turns=False
):
    """The run of one level and its figures."""

    async def main():
        loop = asyncio.get_running_loop()
        client = LoadClient(
            endpoint_of("http://x:1"), loop.time, timeout_s=timeout_s, connect=endpoint.connect
        )
        asked = questions or random_prompts(
            random.Random(1), inputs=(11, 11), outputs=(5, 5), vocab=256, prefix=0
        )
        plan = LoadPlan(
            model="toy",
            common={},
            questions=asked,
            bound=bound,
            goals=goals or Goals(),
            warmup=0,
            rng=random.Random(4),
            takes_turns=takes_turns,
        )
        if busy is not None:
            loop.call_at(busy[0], lambda: setattr(loop, "now", loop.now + busy[1]))
        return await ServeBench(client, plan).measure(level)

    return run(main())
