"""From a config to a serving prefill worker, in order."""

import os
import time

import zmq

from ..cluster.config.roles import PrefillConfig
from ..cluster.net.endpoints import endpoints_of, reached_at
from ..cluster.net.router_links import RouterLinks, dial_routers
from ..cluster.net.sockets import Socket
from ..cluster.net.transport_names import transports_of
from ..cluster.process.failpoints import reach_of
from ..cluster.process.process import Serve, Shutdown, run_phases
from ..cluster.process.sd_notify import notifier_of
from ..cluster.process.watchdog import Watchdog
from ..cluster.protocol.messages import Layout
from ..cluster.security.ciphers import ciphers_of
from ..cluster.security.keyring import load_keyring, split_key, with_key
from ..cluster.telemetry.metrics_server import serve_metrics
from ..cluster.telemetry.tracing import Tracing, closing, open_tracing
from ..engine.config import EngineConfig
from ..engine.loader import Engine, EngineLoader
from ..kvtransfer.heap import keep_blocks
from ..kvtransfer.identity import hello_of, layout_of, planes_of
from ..kvtransfer.link import WorkerLink
from ..kvtransfer.transports.zmq_blocks import ZmqBlocksSender
from ..kvtransfer.worker_loop import WorkerLoop
from .spans import PrefillSpans
from .worker import PrefillWorker


def start(config: PrefillConfig, instance: str) -> Serve:
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
    loader = EngineLoader(EngineConfig.of(config), has_drafter=False)
    run_phases(loader.phases())
    engine = loader.engine()
    layout = _layout_of(engine)
    ciphers = ciphers_of(config.kv_cipher, has_keys=bool(config.keys), trusted_network=config.trusted_network)

    def open_planes(context: zmq.Context[Socket]) -> tuple[RouterLinks, ZmqBlocksSender]:
        transport = ZmqBlocksSender(
            config.kv_bind,
            instance,
            layout,
            planes_of(engine.pool, engine.features),
            context=context,
            keyring=keyring,
            ciphers=ciphers,
            bulk_port=config.kv_bulk_port,
            trusted_network=config.trusted_network,
            lease_s=config.lease_s,
            transports=transports,
            slab_bytes=config.slab_mb << 20,
        )
        transport.reach = reach
        hello = hello_of(
            layout,
            engine.pool,
            role="prefill",
            instance=instance,
            model=config.served_model or config.model,
            max_context=engine.max_context,
            vocab_size=engine.model_config.vocab_size,
            max_running=config.max_batch,
            kv_endpoint=_known_as(transport.endpoint, config.kv_advertise),
            transports=transports,
        )
        try:
            return dial_routers(context, endpoints_of(config.router), hello, keyring), transport
        except Exception:
            transport.close()
            raise

    link = WorkerLink(open_planes)
    run_phases([("open sockets", link.start)])
    worker = _worker(config, engine, link, instance, tracing)
    feed = link.feeder(Watchdog(config.watchdog_s, notifier=notifier))
    loop = WorkerLoop(
        worker, link, shutdown, drain_timeout_s=config.drain_timeout_s, feed=feed, tell=tell, notifier=notifier,
        lost_spans=lambda: tracing.num_dropped)  # fmt: skip
    engine.runner.on_layer = loop.beat
    return closing(tracing, loop.run)


def _worker(
    config: PrefillConfig, engine: Engine, link: WorkerLink, instance: str, tracing: Tracing
) -> PrefillWorker:
    worker = PrefillWorker(
        engine,
        link,
        instance=instance,
        chunk_size=config.chunk_size,
        max_batch=config.max_batch,
        max_queue=config.max_queue,
    )
    worker.reach = reach_of(os.environ)
    worker.queues.on_left = PrefillSpans(tracing, time.monotonic).left
    return worker


def _layout_of(engine: Engine) -> Layout:
    return layout_of(
        engine.pool,
        model_fingerprint=engine.fingerprint,
        feature_ids=engine.feature_ids,
        feature_width=engine.feature_width,
    )


def _known_as(endpoint: str, advertised: str) -> str:
    """The address for decode workers, with the key of the one that was bound."""
    bound, key = split_key(endpoint)
    address = reached_at(bound, advertised)
    return with_key(address, key) if key else address
