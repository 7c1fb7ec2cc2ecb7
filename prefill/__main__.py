"""`baton prefill`: one prefill worker process."""

import os
import secrets
import sys
import time
from collections.abc import Sequence

import zmq

from ..cluster.config import PrefillConfig, load_config
from ..cluster.control_link import ControlLink
from ..cluster.life import Serve, Shutdown, run_phases, run_role
from ..cluster.log import configure
from ..cluster.sockets import Socket, check_bind_address
from ..engine.config import EngineConfig
from ..engine.loader import EngineLoader
from ..kvtransfer.identity import hello_of, layout_of, planes_of
from ..kvtransfer.link import WorkerLink
from ..kvtransfer.transports.zmq_blocks import ZmqBlocksSender
from ..kvtransfer.worker_loop import WorkerLoop
from .worker import PrefillWorker


def main(argv: Sequence[str] | None = None) -> int:
    """Run until drained; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    return run_role("baton prefill", lambda: start(arguments))


def start(argv: Sequence[str]) -> Serve:
    """Everything up to the first heartbeat, in order."""
    config = load_config(PrefillConfig, argv, os.environ)
    instance = secrets.token_hex(16)
    configure("prefill", instance, level=config.log_level, log_format=config.log_format)
    check_bind_address(config.kv_bind, config.trusted_network)
    shutdown = Shutdown()
    shutdown.install()
    loader = EngineLoader(EngineConfig.of(config), has_drafter=False)
    run_phases(loader.phases())
    engine = loader.engine()
    layout = layout_of(
        engine.pool,
        model_fingerprint=engine.fingerprint,
        feature_ids=engine.feature_ids,
        feature_width=engine.feature_width,
    )

    def open_planes(context: zmq.Context[Socket]) -> tuple[ControlLink, ZmqBlocksSender]:
        transport = ZmqBlocksSender(
            config.kv_bind,
            instance,
            layout,
            planes_of(engine.pool, engine.features),
            context=context,
            trusted_network=config.trusted_network,
            lease_s=config.lease_s,
        )
        hello = hello_of(
            layout,
            engine.pool,
            role="prefill",
            instance=instance,
            model=config.served_model or config.model,
            max_context=engine.max_context,
            vocab_size=engine.model_config.vocab_size,
            max_running=config.max_batch,
            kv_endpoint=transport.endpoint,
        )
        return ControlLink(context, config.router, hello, time.monotonic()), transport

    link = WorkerLink(open_planes)
    run_phases([("open sockets", link.start)])
    worker = PrefillWorker(
        engine,
        link,
        instance=instance,
        chunk_size=config.chunk_size,
        max_batch=config.max_batch,
        max_queue=config.max_queue,
    )
    loop = WorkerLoop(worker, link, shutdown, drain_timeout_s=config.drain_timeout_s)
    engine.runner.on_layer = loop.beat
    return loop.run


if __name__ == "__main__":
    sys.exit(main())
