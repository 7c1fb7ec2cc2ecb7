"""From a config to a serving decode worker, in order."""

import os
import time
from collections.abc import Callable

import zmq

from ..cluster.config.roles import DecodeConfig
from ..cluster.net.endpoints import endpoints_of
from ..cluster.net.router_links import RouterLinks, dial_routers
from ..cluster.net.sockets import Socket
from ..cluster.net.transport_names import transports_of
from ..cluster.process.failpoints import reach_of
from ..cluster.process.process import Serve, Shutdown, run_phases
from ..cluster.process.sd_notify import Notifier, notifier_of
from ..cluster.process.watchdog import Watchdog
from ..cluster.protocol.messages import WorkerStats
from ..cluster.security.ciphers import ciphers_of
from ..cluster.security.keyring import load_keyring
from ..cluster.telemetry.metrics_server import serve_metrics
from ..cluster.telemetry.tracing import Tracing, closing, open_tracing
from ..engine.config import EngineConfig
from ..engine.loader import Engine, EngineLoader
from ..kvtransfer.heap import keep_blocks
from ..kvtransfer.identity import hello_of, layout_of, planes_of
from ..kvtransfer.link import WorkerLink
from ..kvtransfer.transports.zmq_blocks import ZmqBlocksReceiver
from ..kvtransfer.worker_loop import WorkerLoop
from .spans import DecodeSpans
from .worker import DecodeWorker


def start(config: DecodeConfig, instance: str) -> Serve:
    """Everything up to the first heartbeat, in order."""
    shutdown = Shutdown()
    shutdown.install()
    reach = reach_of(os.environ)
    notifier = notifier_of(os.environ)
    keep_blocks()
    keyring = load_keyring(config.keys, config.role)
    transports = transports_of(config.transports)
    tell = serve_metrics(config, instance)
    tracing = open_tracing(config, instance)
    loader = EngineLoader(EngineConfig.of(config), has_drafter=True)
    run_phases(loader.phases())
    engine = loader.engine()
    layout = layout_of(
        engine.pool,
        model_fingerprint=engine.fingerprint,
        feature_ids=engine.feature_ids,
        feature_width=engine.feature_width,
    )

    ciphers = ciphers_of(config.kv_cipher, has_keys=bool(config.keys), trusted_network=config.trusted_network)

    def open_planes(context: zmq.Context[Socket]) -> tuple[RouterLinks, ZmqBlocksReceiver]:
        transport = ZmqBlocksReceiver(
            instance,
            layout,
            planes_of(engine.pool, engine.features),
            context=context,
            keyring=keyring,
            ciphers=ciphers,
            window=config.pull_window,
            lease_s=config.lease_s,
            transports=transports,
        )
        transport.reach = reach
        hello = hello_of(
            layout,
            engine.pool,
            role="decode",
            instance=instance,
            model=config.served_model or config.model,
            max_context=engine.max_context,
            vocab_size=engine.model_config.vocab_size,
            max_running=config.max_running,
            local_prefill=True,
            spec_tokens=engine.shape.spare_slots,
            transports=transports,
        )
        try:
            return dial_routers(context, endpoints_of(config.router), hello, keyring), transport
        except Exception:
            transport.close()
            raise

    link = WorkerLink(open_planes)
    run_phases([("open sockets", link.start)])
    loop = _loop_of(config, engine, link, instance, shutdown, tell, tracing, notifier)
    return closing(tracing, loop.run)


def _loop_of(
    config: DecodeConfig,
    engine: Engine,
    link: WorkerLink,
    instance: str,
    shutdown: Shutdown,
    tell: Callable[[WorkerStats], None],
    tracing: Tracing,
    notifier: Notifier,
) -> WorkerLoop:
    worker = DecodeWorker(
        engine,
        link,
        instance=instance,
        max_running=config.max_running,
        local_prefill_tokens=config.local_prefill_tokens,
    )
    worker.reach = reach_of(os.environ)
    worker.queues.on_left = DecodeSpans(tracing, time.monotonic).left
    feed = link.feeder(Watchdog(config.watchdog_s, notifier=notifier))
    loop = WorkerLoop(
        worker, link, shutdown, drain_timeout_s=config.drain_timeout_s, feed=feed, tell=tell, notifier=notifier,
        lost_spans=lambda: tracing.num_dropped,
    )  # fmt: skip
    engine.runner.on_layer = loop.beat
    return loop
