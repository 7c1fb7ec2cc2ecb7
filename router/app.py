"""The router process: its parts, and its states from start to end.

    joining    with a shared port: the router does not listen before a pair of workers is ready, for at most
               JOIN_S
    serving    new requests are accepted
    leaving    with a shared port: new connections go to the other routers, and open ones close after an
               answer
    draining   /ready and new requests get 503; running requests may finish, for at most drain_timeout_s
    stopping   requests that still run get an error; the listener closes

The router's own port (--own-port) and the port of probes (--probe-port) answer in all of these states.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from ..cluster.config.roles import RouterConfig
from ..cluster.net.endpoints import bracketed
from ..cluster.process.log import fields
from ..cluster.process.process import OPERATOR_VARIABLE
from ..cluster.process.running_clock import PauseMeter
from ..cluster.process.sd_notify import Notifier
from ..cluster.process.watchdog import Watchdog
from ..cluster.protocol.messages import ControlUp
from ..cluster.security.api_keys import ApiKeys
from ..cluster.security.keyring import load_keyring
from ..cluster.telemetry.metrics import RouterMetrics
from ..cluster.telemetry.tracing import open_tracing
from .api.sampling_defaults import SamplingDefaults
from .endpoints.routes import Routes
from .endpoints.service import Service
from .formats.registry import formats_of
from .http.access_log import AccessLog
from .http.allowed_hosts import allowed_hosts_of
from .http.auth import Guard
from .http.cors import Cors
from .http.listeners import open_listeners
from .http.server import OWN_CONNECTIONS, PROBE_CONNECTIONS, Counts, HttpServer, connections_allowed
from .http.tls import certificate_of
from .rooms.effects import Timeouts
from .sandbox.fork_server import ForkServer
from .scheduling.dispatcher import Dispatcher
from .scheduling.placement import PairingPolicy
from .scheduling.role_scaler import RoleScaler
from .text.tokenizer import Tokenizer
from .workers.control import ControlSocket
from .workers.registry import Registry

logger = logging.getLogger(__name__)

TICK_S = 0.1
PAUSE_S = 1.0  # after so long without a tick or a message, this process did not run
LOOK_S = 0.002  # libzmq reports the end of a connection a moment before it releases the connection
LAST_WRITES_S = 2  # seconds for error frames after the drain
GOODBYE_S = 0.5  # longest wait for workers to hear that the router ends
JOIN_S = 10.0  # after this time clients get the reason why no pair serves
# seconds for a last request on each kept connection, which then closes, so that clients reach another router
HAND_OVER_S = 2.0


class Router:
    """All parts of one router. The constructor binds the sockets, so a port in use is reported at once.

    `fork_server` forks the sandboxed workers. Its owner closes it after the router.
    """

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: Tokenizer,
        fork_server: ForkServer,
        timeouts: Timeouts | None = None,
        watchdog: Watchdog | None = None,
        notifier: Notifier | None = None,
        sampling_defaults: SamplingDefaults | None = None,
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
        self._listeners = open_listeners(config, trusted_network=is_trusted)
        self._port = int(self._listeners.clients.getsockname()[1])
        try:
            keyring = load_keyring(config.keys, config.role)
            self.control = ControlSocket(
                config.control_bind, trusted_network=config.trusted_network, keyring=keyring
            )
        except Exception:
            self._listeners.close()
            raise
        self.dispatcher = Dispatcher(
            Registry(self.instance, config.worker_timeout_s, local_prefill=config.local_prefill),
            self.control.transmit,
            time.monotonic,
            RouterMetrics(config.served_name),
            max_queue=config.max_queue,
            queue_timeout_s=config.queue_timeout_s,
            request_timeout_s=config.request_timeout_s,
            stall_s=config.stall_timeout_s,
            canary_s=config.canary_s,
            drops=lambda: self.control.drops,
            timeouts=timeouts,
            soon=_soon,
            scaler=RoleScaler() if config.autoscale_roles else None,
            policy=PairingPolicy(
                prefill=config.prefill_policy,
                decode=config.decode_policy,
                local_prefill_max=config.local_prefill_max,
                local_prefill_queued_max=config.local_prefill_queued_max,
                prefix_pulls=config.prefix_pulls,
            ),
        )
        served = config.served_name
        chat_max = config.chat_max_tokens
        self._service = Service(
            self.dispatcher,
            tokenizer,
            config.served_names,
            time.monotonic,
            fork_server,
            self._tracing,
            formats=formats_of(
                tokenizer.chat_template,
                frozenset(tokenizer.special_ids),
                tool_parser=config.tool_parser,
                reasoning_parser=config.reasoning_parser,
            ),
            chat_max_tokens=chat_max,
            sampling_defaults=sampling_defaults,
            takes_embeds=config.prompt_embeds,
            embeds_bytes=config.prompt_embeds_mb << 20,
            worker_metrics=config.worker_metrics,
        )
        self._access_log = access_log_of(config)
        self._server, self._own_server, self._probe_server = self._servers()
        self.served_model = served
        self._pauses = PauseMeter(PAUSE_S)
        self._has_looked = False  # a probe for the ended connection has run since the last tick

    def __repr__(self) -> str:
        return f"Router({self.url}, {self.dispatcher})"

    @property
    def port(self) -> int:
        return self._port

    @property
    def url(self) -> str:
        return self._url_at(self.port)

    @property
    def own_url(self) -> str:
        """The URL at the router's own port; "" without --own-port."""
        return self._url_at(self._config.own_port) if self._listeners.own is not None else ""

    async def run(self, drain: asyncio.Event, stop: asyncio.Event) -> None:
        """Serves until `drain` is set and the running requests have ended, or until `stop` is set."""
        self.control.open(self._on_message, self.dispatcher.on_damaged, self._on_left)
        self._service.open()
        if self._access_log is not None:
            self._access_log.start()
        tasks = {asyncio.create_task(work) for work in (self._serve(), self._tick(), self._end(drain, stop))}
        if self._listeners.own is not None:
            tasks.add(asyncio.create_task(self._own_server.serve(self._listeners.own)))
        if self._listeners.probes is not None:
            tasks.add(asyncio.create_task(self._probe_server.serve(self._listeners.probes)))
        reached = {"url": self.url} | ({"own_url": self.own_url} if self.own_url else {})
        logger.info(
            "router serves", extra=fields(**reached, control=self.control.endpoint, model=self.served_model)
        )
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises a crash of the timers, which ends the router
            servers = (self._server, self._own_server, self._probe_server)
            await asyncio.gather(*[server.close(LAST_WRITES_S) for server in servers])
            await self._say_goodbye()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.close()

    def close(self) -> None:
        """Closes the sockets. Idempotent."""
        self._watchdog.stop()
        self._service.close()
        self._tracing.close()
        self._listeners.close()
        self.control.close()
        if self._access_log is not None:
            self._access_log.close()

    def _servers(self) -> tuple[HttpServer, HttpServer, HttpServer]:
        """The servers of the clients' port and of the router's own port, with one application and one set of
        callers, and the server of probes."""
        config, counts = self._config, Counts()
        token = os.environ.get(OPERATOR_VARIABLE, "")
        guard = Guard(self._api_keys, token, parts=config.limit_parts or 1)
        self._service.limit_parts = config.limit_parts or 1
        cors = Cors(config.allowed_origins) if config.allowed_origins else None
        hosts = allowed_hosts_of(config)
        routes = Routes(
            self._service,
            is_keyed=self._api_keys is not None,
            ignores_unknown=self._config.unknown_fields == "ignore",
        )
        app = routes.app()

        def server(max_connections: int) -> HttpServer:
            return HttpServer(
                app, guard, counts, max_body=config.max_body_mb << 20, max_connections=max_connections,
                keep_alive_s=config.keep_alive_s, certificate=self._certificate, cors=cors, hosts=hosts,
                access_log=self._access_log,
            )  # fmt: skip

        self._service.responses = counts.responses
        allowed = connections_allowed(
            config.max_connections,
            has_own_port=bool(config.own_port),
            has_probe_port=bool(config.probe_port),
        )
        # counts of its own: probes are no requests of clients
        probes = HttpServer(
            routes.probe_app(), Guard(None), Counts(), max_body=0, max_connections=PROBE_CONNECTIONS,
            keep_alive_s=config.keep_alive_s, ends_oldest=True,
        )  # fmt: skip
        return server(allowed), server(OWN_CONNECTIONS), probes

    def _url_at(self, port: int) -> str:
        return f"{'http' if self._certificate is None else 'https'}://{bracketed(self._config.host)}:{port}"

    async def _serve(self) -> None:
        """Serves; with a shared port only when a pair is ready, since other routers can serve until then."""
        began = time.monotonic()
        while self._config.share_port and not self.dispatcher.is_ready and time.monotonic() - began < JOIN_S:
            await asyncio.sleep(TICK_S)
        await self._server.serve(self._listeners.clients)

    def _on_message(self, identity: bytes, message: ControlUp) -> None:
        self._look_for_pause()
        self.dispatcher.on_message(identity, message)

    def _look_for_pause(self) -> None:
        """Before anything is judged by the time: this process may have been stopped, or its host."""
        if seconds := self._pauses.turn(time.monotonic()):
            self.dispatcher.paused(seconds)

    def _on_left(self) -> None:
        """Probes for lost workers at once when a connection ends, but not more than once a tick."""
        if not self._has_looked:
            self._has_looked = True
            asyncio.get_running_loop().call_later(LOOK_S, self.dispatcher.probe)

    async def _tick(self) -> None:
        num_left = 0
        while True:
            await asyncio.sleep(TICK_S)
            self._look_for_pause()
            self._has_looked = False
            if self.control.num_left != num_left:
                num_left = self.control.num_left
                self.dispatcher.probe()
            self.dispatcher.tick(is_behind=self.control.is_behind)
            self.dispatcher.note_load()
            if num_dropped := self._tracing.num_dropped:
                self.dispatcher.events["spans_dropped"] = num_dropped
            if num_failed := self._server.num_tls_failed + self._own_server.num_tls_failed:
                self.dispatcher.events["tls_failed"] = num_failed
            self._watchdog.feed(time.monotonic())
            self._notifier.ready(
                f"serving at {self.url}" + (f", alone at {self.own_url}" if self.own_url else "")
            )

    async def _say_goodbye(self) -> None:
        """Tells the workers that this router ends, and waits until they know."""
        self.dispatcher.leave()
        deadline = time.monotonic() + GOODBYE_S
        while not self.dispatcher.is_heard_of_leaving and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_S)

    async def _end(self, drain: asyncio.Event, stop: asyncio.Event) -> None:
        await drain.wait()
        self._notifier.stopping("draining")
        logger.info("router drains", extra=fields(running=self.dispatcher.num_running))
        if self._config.share_port:
            await self._server.hand_over(self._listeners.clients)
            await _wait(stop, HAND_OVER_S)
        self.dispatcher.is_draining = True
        self._server.begin_drain()
        deadline = time.monotonic() + self._config.drain_timeout_s
        while self.dispatcher.num_live and time.monotonic() < deadline and not stop.is_set():
            await _wait(stop, TICK_S)
        self.dispatcher.fail_all("Shutdown", "The server is shutting down.")


def access_log_of(config: RouterConfig) -> AccessLog | None:
    """The access log that the settings ask for: it has lines of level info, and of level debug."""
    if not config.access_log or config.log_level not in ("debug", "info"):
        return None
    return AccessLog(config.log_format, logs_quiet=config.log_level == "debug")


def _soon(work: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_soon(work)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)


def _api_keys(path: str) -> ApiKeys | None:
    """The API keys in the file at `path`. Raises ConfigError for an unusable file."""
    return ApiKeys(Path(path), time.time, time.monotonic) if path else None
