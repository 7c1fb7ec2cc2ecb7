"""`python -m baton.router`: the router process."""

import asyncio
import gc
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

import uvloop

from ..cluster.config.link_checks import check_links
from ..cluster.config.load import load_config
from ..cluster.config.roles import RouterConfig
from ..cluster.process.log import configure, fields
from ..cluster.process.process import EXIT_OK, Shutdown, run_phases, run_role
from ..cluster.process.sd_notify import notifier_of
from ..cluster.process.watchdog import Watchdog
from .api.sampling_defaults import SamplingDefaults, load_sampling_defaults
from .app import Router
from .sandbox.fork_server import ForkServer
from .sandbox.pool_worker import MEMORY, missing_address_space
from .text.model_files import model_directory
from .text.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__package__)  # `python -m` names this file __main__, which is no logger of baton

YOUNG_OBJECTS = 20_000  # allocations before a garbage collection: more than a step of 2000 streams makes


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a router until a signal ends it. Returns the process's exit code."""
    # texts come one at a time, so its threads would only wait
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    arguments = sys.argv[1:] if argv is None else argv
    return run_role("baton router", lambda: _start(arguments))


def _start(argv: Sequence[str]) -> Callable[[], int]:
    config = load_config(RouterConfig, argv, os.environ)
    configure("router", level=config.log_level, log_format=config.log_format)
    check_links(config)
    notifier = notifier_of(os.environ)
    if missing := missing_address_space():
        size = fields(mib=max(0, MEMORY - missing) >> 20, wanted_mib=MEMORY >> 20)
        logger.warning("the limit on address space (ulimit -v) leaves little for chat templates", extra=size)
    fork_server = ForkServer.forked()  # before this process has any other thread
    made: list[Tokenizer | Router] = []
    defaults = [SamplingDefaults()]

    def load() -> None:
        model = str(model_directory(config.model))
        made.append(load_tokenizer(model))
        if config.generation_config == "model":
            defaults.append(load_sampling_defaults(model))
            if given := defaults[-1].given:
                logger.info("the model's sampling defaults are used", extra=fields(**given))

    def listen() -> None:
        tokenizer = made[0]
        assert isinstance(tokenizer, Tokenizer)
        watchdog = Watchdog(config.watchdog_s, notifier=notifier)
        made.append(
            Router(
                config,
                tokenizer,
                fork_server,
                watchdog=watchdog,
                notifier=notifier,
                sampling_defaults=defaults[-1],
            )
        )

    run_phases([("loading the tokenizer", load), ("binding sockets", listen)])
    gc.collect()
    gc.freeze()  # objects of the start-up live on, and collections need not scan them
    gc.set_threshold(YOUNG_OBJECTS)
    router = made[1]
    assert isinstance(router, Router)
    return lambda: _serve(router, fork_server)


def _serve(router: Router, fork_server: ForkServer) -> int:
    try:
        uvloop.run(_run(router))
    finally:
        fork_server.close()
    return EXIT_OK


async def _run(router: Router) -> None:
    loop = asyncio.get_running_loop()
    drain, stop = asyncio.Event(), asyncio.Event()

    def pass_on() -> None:
        if shutdown.drain.is_set():
            drain.set()
        if shutdown.stop.is_set():
            stop.set()

    def wake() -> None:
        with suppress(RuntimeError):  # the loop has ended before the process
            loop.call_soon_threadsafe(pass_on)

    shutdown = Shutdown(on_change=wake)
    shutdown.install()
    await router.run(drain, stop)


if __name__ == "__main__":
    sys.exit(main())
