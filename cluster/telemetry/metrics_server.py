"""A worker's own /metrics, /health and /ready, served by one thread from the last report of the scheduler
loop.

    /health    503 once the loop has been silent for `SILENT_S`: the process needs a restart
    /ready     503 before the first report, while the worker drains, and while it is silent: send it no work

Answers come from a finished record, so that scrapes and forwards never wait for each other. Connections are
served one at a time, for at most `SCRAPE_TIMEOUT_S` each: a slow client delays other scrapers, but not the
worker.
"""

import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import ClassVar

from ..config.link_checks import check_metrics_address
from ..config.roles import WorkerConfig
from ..errors import StartupError
from ..process.log import fields
from ..protocol.messages import WorkerStats
from .families import CONTENT_TYPE
from .worker_metrics import WorkerFacts, WorkerRecord, render_worker

logger = logging.getLogger(__name__)

SCRAPE_TIMEOUT_S = 2.0
SILENT_S = 10.0  # silence of a loop that reports several times a second
PLAIN = "text/plain; charset=utf-8"


def serve_metrics(config: WorkerConfig, instance: str) -> "MetricsServer | None":
    """Opens --metrics-port for the life of the process; None without one."""
    if not config.metrics_port:
        return None
    server = MetricsServer(
        config.metrics_host,
        config.metrics_port,
        role=config.role,
        instance=instance,
        model=config.served_name,
        trusted_network=config.trusted_network,
    )
    server.start()
    return server


class MetricsServer:
    """The server, from `start` to `close`.

    Raises ConfigError for an address that is open to other hosts, StartupError for one in use.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        role: str,
        instance: str,
        model: str,
        trusted_network: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_metrics_address(host, port, trusted_network=trusted_network)
        self._role, self._instance, self._model = role, instance, model
        self._facts: WorkerFacts | None = None
        self._stats = WorkerStats(state="starting")
        self._clock = clock
        self._told_at: float | None = None
        try:
            self._server = _Server((host, port), _handler_of(self))
        except OSError as error:
            reason = error.strerror or str(error)
            raise StartupError(
                f"cannot listen on {host} port {port}: {reason}; choose another --metrics-port"
            ) from None
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)

    def __repr__(self) -> str:
        return f"MetricsServer(port {self.port})"

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def start(self) -> None:
        """Starts the server's thread."""
        self._thread.start()
        logger.info("metrics served", extra=fields(port=self.port))

    def tell(self, stats: WorkerStats) -> None:
        """Takes the newest stats. Called by the scheduler loop."""
        self._stats, self._told_at = stats, self._clock()

    def describe(self, facts: WorkerFacts) -> None:
        """Takes what is known of the worker once its engine is loaded."""
        self._facts = facts

    def fault(self, path: str) -> str:
        """The fault that /health or /ready reports; "" without one."""
        silent_s = self._clock() - self._told_at if self._told_at is not None else 0.0
        if silent_s > SILENT_S:
            return f"the scheduler loop has been silent for {silent_s:.0f} s"
        if path == "/ready" and (self._told_at is None or self._stats.state != "serving"):
            return f"the worker is {self._stats.state}"
        return ""

    def body(self) -> bytes:
        """The body of /metrics."""
        worker = WorkerRecord(
            role=self._role,
            instance=self._instance,
            stats=self._stats,
            facts=self._facts,
            metrics_port=self.port,
        )
        return render_worker(self._model, worker)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.TCPServer):
    allow_reuse_address = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignores a client that broke off or was too slow."""
        logger.debug("scrape failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET requests of three paths."""

    owner: ClassVar[MetricsServer]

    def handle(self) -> None:
        """Handles one request within a total time limit, since a timeout per read would not bound a trickling
        client."""
        timer = threading.Timer(SCRAPE_TIMEOUT_S, self._cut)
        timer.daemon = True
        timer.start()
        try:
            super().handle()
        finally:
            timer.cancel()

    def _cut(self) -> None:
        with suppress(OSError):  # the client has closed the connection
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        status, kind, body = 200, PLAIN, b""
        if self.path == "/metrics":
            kind, body = CONTENT_TYPE, self.owner.body()
        elif self.path in ("/health", "/ready"):
            fault = self.owner.fault(self.path)
            status, body = (503 if fault else 200), f"{fault or 'ok'}\n".encode()
        else:
            status, body = 404, b"No such address; here are /metrics, /health and /ready.\n"
        self.send_response_only(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Does not log scrapes."""


def _handler_of(server: MetricsServer) -> type[_Handler]:
    return type("_OwnedHandler", (_Handler,), {"owner": server})
