"""The router process: what it is made of, how it serves, how it ends.

    joining    behind a shared port: nothing is listened to before a pair has shown itself, for at most JOIN_S
    serving    new requests are taken
    leaving    behind a shared port: new connections go to the others, those that stand are closed behind an answer
    draining   /ready is 503 and new requests get 503; running ones end, for at most drain_timeout_s
    stopping   what still runs gets an error; the listener closes
"""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path

from ..cluster.api_keys import ApiKeys
from ..cluster.config import RouterConfig
from ..cluster.endpoints import bracketed
from ..cluster.errors import StartupError
from ..cluster.keyring import load_keyring
from ..cluster.life import OPERATOR_VARIABLE
from ..cluster.log import fields
from ..cluster.metrics import RouterMetrics
from ..cluster.notify import Notifier
from ..cluster.sockets import check_bind_address
from ..cluster.tracing import open_tracing
from ..cluster.watchdog import Watchdog
from .auth import Guard
from .control import ControlSocket
from .dispatch import Dispatcher
from .http import Routes
from .nursery import NurseryHandle
from .placing import PairingPolicy
from .registry import Registry
from .room_effects import Timeouts
from .server import HttpServer
from .service import Service
from .tls import certificate_of
from .tokenizer import Tokenizer

logger = logging.getLogger(__name__)

TICK_S = 0.1
LOOK_S = 0.002  # libzmq tells that a connection has ended a moment before it lets go of it
SEND_BUFFER = 128 << 10  # bytes that the kernel takes for a client that reads slowly; by itself it takes megabytes
LAST_WRITES_S = 2  # for error frames, after the drain
JOIN_S = 10.0  # then whoever asks may hear why nothing serves
HAND_OVER_S = 2.0  # for clients with a kept connection to ask once more, and to find another router then


class Router:
    """Everything of one router. Sockets are bound when it is made, so that a port in use is known at once.

    `nursery` gives it template workers, and is closed by its owner, behind the router.
    """

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: Tokenizer,
        nursery: NurseryHandle,
        timeouts: Timeouts | None = None,
        watchdog: Watchdog | None = None,
        notifier: Notifier | None = None,
    ) -> None:
        self._config = config
        self._notifier = notifier or Notifier()
        self._watchdog = watchdog or Watchdog(0)
        self.instance = secrets.token_hex(16)
        self._tracing = open_tracing(config, self.instance)
        self._api_keys = _api_keys(config.api_keys)
        self._certificate = certificate_of(config.tls_cert, config.tls_key)
        is_guarded = self._api_keys is not None and self._certificate is not None
        is_trusted = config.trusted_network or is_guarded
        self._listener = _listen(config.host, config.port, trusted_network=is_trusted, share_port=config.share_port)
        self._port = int(self._listener.getsockname()[1])
        try:
            keyring = load_keyring(config.keys, config.role)
            self.control = ControlSocket(config.control_bind, trusted_network=config.trusted_network, keyring=keyring)
        except Exception:
            self._listener.close()
            raise
        self.dispatcher = Dispatcher(
            Registry(self.instance, config.worker_timeout_s, local_prefill=config.local_prefill),
            self.control.transmit,
            time.monotonic,
            RouterMetrics(),
            max_queue=config.max_queue,
            queue_timeout_s=config.queue_timeout_s,
            request_timeout_s=config.request_timeout_s,
            canary_s=config.canary_s,
            drops=lambda: self.control.drops,
            timeouts=timeouts,
            soon=_soon,
            policy=PairingPolicy(
                prefill=config.prefill_policy, decode=config.decode_policy, local_prefill_max=config.local_prefill_max
            ),
        )
        served = config.served_model or Path(config.model).name
        chat_max = config.chat_max_tokens
        self._service = Service(
            self.dispatcher, tokenizer, served, time.monotonic, nursery, self._tracing, chat_max_tokens=chat_max
        )
        self._server = HttpServer(
            Routes(self._service).app(),
            Guard(self._api_keys, os.environ.get(OPERATOR_VARIABLE, "")),
            max_body=config.max_body_mb << 20,
            max_connections=config.max_connections,
            certificate=self._certificate,
        )
        self._service.responses = self._server.responses
        self.served_model = served
        self._has_looked = False  # since the last tick, for whose connection has ended

    def __repr__(self) -> str:
        return f"Router({self.url}, {self.dispatcher})"

    @property
    def port(self) -> int:
        return self._port

    @property
    def url(self) -> str:
        return f"{'http' if self._certificate is None else 'https'}://{bracketed(self._config.host)}:{self.port}"

    async def run(self, drain: asyncio.Event, stop: asyncio.Event) -> None:
        """Serves until `drain` is set and the running requests have ended, or until `stop` is set."""
        url = self.url
        self.control.open(self.dispatcher.on_message, self.dispatcher.on_damaged, self._on_left)
        self._service.open()
        serving = asyncio.create_task(self._serve())
        ticking = asyncio.create_task(self._tick())
        ending = asyncio.create_task(self._end(drain, stop))
        logger.info("router serves", extra=fields(url=url, control=self.control.endpoint, model=self.served_model))
        try:
            done, _ = await asyncio.wait({serving, ticking, ending}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # a crash of the timers is a crash of the router
            await self._server.close(LAST_WRITES_S)
        finally:
            for task in (serving, ticking, ending):
                task.cancel()
            await asyncio.gather(serving, ticking, ending, return_exceptions=True)
            self.close()

    def close(self) -> None:
        """Gives the sockets back. Idempotent."""
        self._watchdog.stop()
        self._service.close()
        self._tracing.close()
        self._listener.close()
        self.control.close()

    async def _serve(self) -> None:
        """Behind a shared port another router would have served who came too early to this one."""
        began = time.monotonic()
        while self._config.share_port and not self.dispatcher.is_ready and time.monotonic() - began < JOIN_S:
            await asyncio.sleep(TICK_S)
        await self._server.serve(self._listener)

    def _on_left(self) -> None:
        """Looks at once who is gone, before anything is sent there; for whoever comes and goes not more than once a tick."""
        if not self._has_looked:
            self._has_looked = True
            asyncio.get_running_loop().call_later(LOOK_S, self.dispatcher.probe)

    async def _tick(self) -> None:
        num_left = 0
        while True:
            await asyncio.sleep(TICK_S)
            self._has_looked = False
            if self.control.num_left != num_left:
                num_left = self.control.num_left
                self.dispatcher.probe()
            self.dispatcher.tick(is_behind=self.control.is_behind)
            if num_dropped := self._tracing.num_dropped:
                self.dispatcher.events["spans_dropped"] = num_dropped
            if num_failed := self._server.num_tls_failed:
                self.dispatcher.events["tls_failed"] = num_failed
            self._watchdog.feed(time.monotonic())
            self._notifier.ready(f"serving at {self.url}")

    async def _end(self, drain: asyncio.Event, stop: asyncio.Event) -> None:
        await drain.wait()
        self._notifier.stopping("draining")
        logger.info("router drains", extra=fields(running=self.dispatcher.num_running))
        if self._config.share_port:
            await self._server.hand_over(self._listener)
            await _wait(stop, HAND_OVER_S)
        self.dispatcher.is_draining = True
        self._server.begin_drain()
        deadline = time.monotonic() + self._config.drain_timeout_s
        while self.dispatcher.num_live and time.monotonic() < deadline and not stop.is_set():
            await _wait(stop, TICK_S)
        self.dispatcher.fail_all("Shutdown", "The server is shutting down.")


def _soon(work: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_soon(work)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)


def _api_keys(path: str) -> ApiKeys | None:
    """Raises ConfigError."""
    return ApiKeys(Path(path), time.time, time.monotonic) if path else None


def _listen(host: str, port: int, *, trusted_network: bool, share_port: bool) -> socket.socket:
    """A socket that listens, or a shared one that will.

    Raises ConfigError for an address open to others, StartupError for one that is taken.
    """
    check_bind_address(f"tcp://{bracketed(host)}:{port}", trusted_network)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        if not share_port:
            made = socket.create_server((host, port), family=family, backlog=1024)
        else:
            made = socket.socket(family)
            for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                made.setsockopt(socket.SOL_SOCKET, option, 1)
            if family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            made.bind((host, port))
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)  # connections inherit it
        return made
    except OSError as error:
        reason = error.strerror or str(error)
        raise StartupError(f"cannot listen on {host} port {port}: {reason}; choose another --port") from None
