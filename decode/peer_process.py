"""A process of one rank with data-parallel attention, other than rank 0: a decode worker of its own.

`python -m baton.decode.peer_process PLACE FLAGS...`, started by `worker.peers`. It ignores SIGTERM and
SIGINT, which a service manager or a terminal sends to all processes of a worker: rank 0 decides when all
ranks drain. With rank 0 it dies.
"""

import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from ..cluster.config.load import load_config
from ..cluster.config.roles import DecodeConfig
from ..cluster.process.log import configure
from ..cluster.process.process import (
    EXIT_CANNOT_START,
    EXIT_CRASHED,
    SERVING,
    SWITCH_INTERVAL_S,
    end_with_parent,
)
from ..engine.errors import LifecycleError
from ..worker.peers import PeerPlace
from ..worker.rank_processes import EXPLAIN_S
from .startup import DecodeStartup

logger = logging.getLogger(__name__)


def config_of(flags: Sequence[str], rank: int) -> DecodeConfig:
    """The settings of rank `rank` of a worker with `flags`: each rank has a port for metrics of its own."""
    config = load_config(DecodeConfig, flags, {}, warns=False)
    return replace(config, metrics_port=config.metrics_port + rank) if config.metrics_port else config


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one rank until all have drained; returns the exit code."""
    placed, *flags = sys.argv[1:] if argv is None else argv
    place = msgspec.json.decode(placed, type=PeerPlace)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(place.parent, signal.SIGKILL)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    config, instance = config_of(flags, place.rank), secrets.token_hex(16)

    def log_at(level: str) -> None:
        configure(f"decode rank {place.rank}", instance, level=level, log_format=config.log_format)

    # with more than warnings, every line of the start would come once per rank
    log_at("warning" if config.log_level == "info" else config.log_level)
    try:
        serve = DecodeStartup(config, instance, place).run()
    except Exception as error:
        logger.error("cannot start: %s", error, exc_info=error if config.log_level == "debug" else None)
        return EXIT_CANNOT_START
    log_at(config.log_level)
    sys.audit(SERVING)
    try:
        return serve()
    except Exception as error:
        if isinstance(error, RuntimeError) and not isinstance(error, LifecycleError):
            time.sleep(EXPLAIN_S)  # a collective fails when another rank has ended: then rank 0 ends this one
        logger.exception("crashed")
        return EXIT_CRASHED


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # no thread of a collective that cannot end keeps the process
