"""The clock of a router's HTTP server under a test's control: no client is late for want of a core."""

import array
import contextlib
import fcntl
import select
import termios
import time

from baton.router.http.http_protocol import NEVER

PATIENCE_S = 60.0


@contextlib.contextmanager
def standing_time(running):
    """Stops the server's clock; the function that this yields advances it. Afterwards the clock runs."""
    server = running.router._server
    began, passed = server.clock(), 0.0

    def let_pass(seconds):
        nonlocal passed
        passed += seconds

    server.clock = lambda: began + passed
    try:
        yield let_pass
    finally:
        ahead = max(0.0, began + passed - time.monotonic())  # its end waits for time to pass
        server.clock = lambda: time.monotonic() + ahead


def seconds_left(running, connection):
    """Seconds the server still waits for this client, having read all its bytes; None while it is busy."""
    if waiting_bytes(connection, termios.TIOCOUTQ):
        return None

    def look():
        server, name = running.router._server, connection.getsockname()
        for line in server._connections:
            if line._transport.get_extra_info("peername") != name:
                continue
            is_ending = line._is_discarding or line.is_paused or line._transport.is_closing()
            if is_ending or line.deadline == NEVER or waiting_bytes(line._transport.get_extra_info("socket")):
                return None
            return line.deadline - server.clock()
        return None

    return running.call(look)


def waiting_bytes(end, kind=termios.FIONREAD):
    """Bytes in a socket's kernel queue: received ones, or with TIOCOUTQ those that the peer has not taken."""
    found = array.array("i", [0])
    fcntl.ioctl(end.fileno(), kind, found)
    return found[0]


def read_to_the_end(running, connection, let_pass):
    """All that comes. Whenever the server waits for this client alone, so much time passes."""
    answer, end = b"", time.monotonic() + PATIENCE_S
    with contextlib.suppress(ConnectionError):
        while True:
            while not select.select([connection], [], [], 0.01)[0]:
                assert time.monotonic() < end, f"it comes to no end: {running.router._server}"
                left = seconds_left(running, connection)
                if left is not None and left > 0:
                    assert left <= running.router._server.keep_alive_s, "that is no bound"
                    let_pass(left)
            part = connection.recv(1 << 16)
            if not part:
                break
            answer += part
    return answer
