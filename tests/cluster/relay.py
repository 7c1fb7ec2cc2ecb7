"""A wire tap between decode and a port of prefill."""

import contextlib
import select
import socket
import threading


class Relay:
    """Records both directions, may change prefill's bytes, and can cut the connection. One at a time."""

    def __init__(self, port, change=None):
        self.heard = bytearray()  # from prefill
        self.told = bytearray()  # to prefill
        self.num_connections = 0
        self._target = port
        self._change = change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._stop, self._cut = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def cut(self):
        self._cut.set()

    def _run(self):
        while not self._stop.is_set():
            if not select.select([self._listener], [], [], 0.02)[0]:
                continue
            decode, _ = self._listener.accept()
            self.num_connections += 1
            with decode, socket.create_connection(("127.0.0.1", self._target)) as prefill:
                self._cut.clear()
                with contextlib.suppress(OSError):
                    self._pump(decode, prefill)

    def _pump(self, decode, prefill):
        while not self._stop.is_set() and not self._cut.is_set():
            for ready in select.select([decode, prefill], [], [], 0.02)[0]:
                data = ready.recv(1 << 16)
                if not data:
                    return
                if ready is prefill:
                    data = bytes(data if self._change is None else self._change(len(self.heard), data))
                    self.heard += data
                else:
                    self.told += data
                (decode if ready is prefill else prefill).sendall(data)

    def close(self):
        self._stop.set()
        self._thread.join(10)
        self._listener.close()
