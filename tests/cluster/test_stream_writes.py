"""A decode step is one write to a client's connection, however many choices and items it has for it."""

import contextlib

import httpx
import pytest
from baton.cluster.protocol.messages import Finished, Reserve, TokenItem, Tokens
from baton.router.http.http_protocol import HttpProtocol
from baton.tests.cluster.router_fakes import MODEL, Script, assert_nothing_left
from baton.tests.cluster.serving import sse_events

TEXT = "abcdefghijkl"
STEPS = [  # each a frame; of each choice the tokens [from, to) of its items
    [(1, 2)],
    [(2, 3), (3, 5), (5, 6)],
    [(7, 8), (6, 7)],  # what comes too early waits
    [(8, 9), (6, 10)],  # some of it again
]
SHARED = {"model": MODEL, "stream": True, "max_tokens": 100}
ASKED = [
    ("/v1/chat/completions", SHARED | {"messages": [{"role": "user", "content": "hi"}], "n": 4}),
    ("/v1/completions", SHARED | {"prompt": ["hi", "there"], "n": 2, "stop": "~~"}),
]
NUM_CHOICES = 4  # of each


class Counted:
    """A transport that notes what is written to it."""

    def __init__(self, transport):
        self.writes = []
        self._transport = transport

    def write(self, data):
        self.writes.append(data)
        self._transport.write(data)

    def __getattr__(self, name):
        return getattr(self._transport, name)


class Reader:
    """A stream, read as far as its choices' texts are wanted."""

    def __init__(self, response):
        assert response.status_code == 200
        self._events = sse_events(response)
        self._texts = [""] * NUM_CHOICES
        self.finishes = {}

    def read(self, text):
        """Until every choice has said so much, and nothing else."""
        while self._texts != [text] * NUM_CHOICES:
            self._take(next(self._events))

    def read_to_end(self, text):
        for event in self._events:
            self._take(event)
        assert self._texts == [text] * NUM_CHOICES

    def _take(self, event):
        for choice in event["choices"]:
            said = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            self._texts[choice["index"]] += said
            if choice["finish_reason"]:
                self.finishes[choice["index"]] = choice["finish_reason"]


@pytest.fixture
def lines(monkeypatch):
    """The transports of clients, in the order in which they came."""
    made, plainly_made = [], HttpProtocol.connection_made

    def connection_made(protocol, transport):
        made.append(Counted(transport))
        plainly_made(protocol, made[-1])

    monkeypatch.setattr(HttpProtocol, "connection_made", connection_made)
    return made


def tokens_of(worker, output, spans):
    """One frame's tokens of all rooms."""
    rooms = [(reserve.room, reserve.epoch) for reserve in worker.of(Reserve)]
    assert len(rooms) == NUM_CHOICES * len(ASKED)
    items = [
        TokenItem(room=room, epoch=epoch, seq=first, ids=output[first:end])
        for first, end in spans
        for room, epoch in rooms
    ]
    return Tokens(instance=worker.instance, items=items)


def ends_of(worker, num):
    return [
        Finished(
            room=reserve.room, epoch=reserve.epoch, instance=worker.instance, reason="stop", output_tokens=num
        )
        for reserve in worker.of(Reserve)
    ]


def test_a_step_is_one_write_per_stream_and_the_last_includes_the_end(start, lines):
    running, _ = start()
    script = Script([running.tokenizer.encode(letter)[0] for letter in TEXT])
    script.holds.set()  # what decode says is said below
    _, decode = running.pair(script)
    with contextlib.ExitStack() as stack:
        opened = [
            stack.enter_context(httpx.stream("POST", running.url + path, json=body)) for path, body in ASKED
        ]
        readers = [Reader(response) for response in opened]
        for reader in readers:
            reader.read(TEXT[:1])
        for number, spans in enumerate(STEPS):
            before = [len(line.writes) for line in lines]
            decode.send(tokens_of(decode, script.output, spans))
            for reader in readers:
                reader.read(TEXT[: max(end for _, end in spans)])
            assert [len(line.writes) - num for line, num in zip(lines, before, strict=True)] == [1, 1], number
        before = [len(line.writes) for line in lines]
        last = tokens_of(decode, script.output, [(10, 11), (11, 12)])
        decode.send(last, *ends_of(decode, len(TEXT)), together=True)
        for reader in readers:
            reader.read_to_end(TEXT)
            assert reader.finishes == dict.fromkeys(range(NUM_CHOICES), "stop")
        assert [len(line.writes) - num for line, num in zip(lines, before, strict=True)] == [1, 1]
        assert all(line.writes[-1].endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") for line in lines)
    assert_nothing_left(running)
