"""A stream of events that pauses gets comments, which change nothing else on its connection."""

import asyncio
from types import SimpleNamespace

import pytest
from baton.router.http.exchange import COMMENT
from baton.router.http.http_protocol import COMMENT_S, NEVER, WRITE_STALL_S, HttpProtocol
from baton.router.http.rate_limits import ANYONE

GET = b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n"
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON = [(b"content-type", b"application/json")]
CHUNK = b"%x\r\n%b\r\n" % (len(COMMENT), COMMENT)


class Transport:
    """Takes all that is written."""

    def __init__(self):
        self.data = b""
        self.is_aborted = False

    def take(self):
        data, self.data = self.data, b""
        return data

    def write(self, data):
        self.data += data

    def abort(self):
        self.is_aborted = True

    def is_closing(self):
        return False

    def get_extra_info(self, name):
        return None

    def set_write_buffer_limits(self, high, low):
        pass

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass


class Line:
    """A connection with one request, on a clock of the test."""

    def __init__(self, sent=GET):
        self.now, self.begun = 100.0, []
        server = SimpleNamespace(
            guard=SimpleNamespace(caller_of=lambda raw_path, fields: ANYONE),
            cors=None, hosts=None, max_body=1 << 20, keep_alive_s=75.0, is_leaving=False, is_draining=False,
            deadline_in=lambda seconds: self.now + seconds, joined=lambda line: True, left=lambda line: None,
            may_buffer=lambda size: True, unbuffer=lambda size: None, begin=self.begun.append,
            answered=lambda status: None, served=lambda exchange: None, clock=lambda: self.now,
        )  # fmt: skip
        self.protocol, self.transport = HttpProtocol(server), Transport()
        self.protocol.connection_made(self.transport)
        self.protocol.data_received(sent)

    @property
    def left(self):
        """Seconds to its deadline."""
        return self.protocol.deadline - self.now

    def start(self, headers):
        asyncio.run(self.begun[0].start(200, headers))

    def write(self, data, *, is_last=False):
        asyncio.run(self.begun[0].write(data, is_last=is_last))
        return self.transport.take()

    def pass_deadline(self):
        self.now = self.protocol.deadline
        self.protocol.on_deadline()
        return self.transport.take()


def streaming(sent=GET):
    line = Line(sent)
    line.start(EVENTS)
    line.write(b"data: 1\n\n")
    return line


def test_a_stream_that_pauses_gets_a_comment_again_and_again():
    line = streaming()
    assert line.left == COMMENT_S
    assert [line.pass_deadline() for _ in range(3)] == [CHUNK] * 3
    assert line.write(b"data: 2\n\n") == b"9\r\ndata: 2\n\n\r\n"
    assert line.write(b"", is_last=True) == b"0\r\n\r\n"
    assert line.left == 75.0, "the connection may serve another request"


def test_each_part_defers_the_comment():
    line = streaming()
    line.now += COMMENT_S - 1.0
    line.write(b"data: 2\n\n")
    assert line.left == COMMENT_S


def test_a_client_of_http_1_0_gets_it_without_chunks():
    line = streaming(b"GET /x HTTP/1.0\r\n\r\n")
    assert line.pass_deadline() == COMMENT


@pytest.mark.parametrize("headers", [EVENTS, JSON])
def test_nothing_comes_before_the_head(headers):
    line = Line()
    assert line.protocol.deadline == NEVER
    line.start(headers)
    assert line.protocol.deadline == NEVER


def test_an_answer_that_is_no_stream_of_events_gets_none():
    line = Line()
    line.start(JSON)
    line.write(b"{")
    assert line.protocol.deadline == NEVER


def test_a_client_that_does_not_read_gets_none_and_is_cut_as_before():
    line = streaming()
    line.now += 5.0
    line.protocol.pause_writing()
    assert line.left == WRITE_STALL_S
    line.protocol.streamed()
    assert line.left == WRITE_STALL_S, "no part defers it"
    assert line.pass_deadline() == b""
    assert line.transport.is_aborted


def test_a_client_that_reads_again_gets_comments_again():
    line = streaming()
    line.protocol.pause_writing()
    line.protocol.resume_writing()
    assert line.left == COMMENT_S
    line = Line()
    line.protocol.pause_writing()
    line.protocol.resume_writing()
    assert line.protocol.deadline == NEVER, "its answer has not begun"


def test_the_next_request_that_is_not_complete_stays_until_the_stream_ends():
    line = streaming(GET + b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\nab")
    assert line.pass_deadline() == CHUNK
    line.protocol.data_received(b"cde")
    line.write(b"", is_last=True)
    assert len(line.begun) == 2
