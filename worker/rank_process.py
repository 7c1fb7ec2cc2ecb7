"""A process of one rank of a tensor-parallel worker, other than rank 0: loads its part and does plans.

`python -m baton.worker.rank_process ROLE PLACE FLAGS...`, started by `ranks`. It has no socket to a router.
It ignores SIGTERM and SIGINT, which a service manager or a terminal sends to all processes of a worker: rank
0 decides when it ends. With rank 0 it dies.
"""

import gc
import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from ..cluster.config.load import load_config
from ..cluster.config.roles import DecodeConfig, PrefillConfig, WorkerConfig
from ..cluster.process.log import configure
from ..cluster.process.process import EXIT_CANNOT_START, EXIT_CRASHED, EXIT_OK, end_with_parent, run_phases
from ..engine.config import EngineConfig
from ..engine.engine import Engine
from ..engine.loader import EngineLoader, join_ranks
from ..engine.parallel.plan_messages import LeavePlan, decode_plan
from ..engine.plan_follower import Follower
from .hand_off import RankLink
from .plan_ring import PlanReader, PlanRing
from .ranks import RankPlace
from .startup import rank_settings

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.5  # between two signs of life of an idle rank


class RankProcess:
    """The loop of one rank."""

    def __init__(self, engine: Engine, reader: PlanReader, wake: int) -> None:
        self.engine = engine
        self.reader = reader
        self.num_executed = 0
        self._wake = wake
        self._follower = Follower(engine)
        engine.runner.on_layer = reader.beat

    def run(self) -> int:
        """Does plans until the last one; returns the exit code."""
        while True:
            data = self._next()
            if data is None:
                continue
            plan = decode_plan(data)
            if isinstance(plan, LeavePlan):
                return EXIT_OK
            self._follower.perform(plan)
            self.reader.done()
            self.num_executed += 1

    def _next(self) -> bytes | None:
        """The next plan; None after some time without any."""
        self.reader.beat()
        data = self.reader.take()
        if data is None and select.select([self._wake], [], [], IDLE_WAIT_S)[0]:
            os.eventfd_read(self._wake)
            data = self.reader.take()
        return data

    def __repr__(self) -> str:
        return f"<RankProcess {self.engine.group!r}, {self.num_executed} plans>"


def load_rank(config: WorkerConfig, place: RankPlace, beat: Callable[[], None]) -> Engine:
    """Joins the process group and loads the rank's part, in step with the other ranks. `beat` gives signs of
    life.
    """
    settings = rank_settings(EngineConfig.of(config))
    group = join_ranks(Path(f"/proc/self/fd/{place.meeting}"), place.rank, place.size, settings)
    loader = EngineLoader(settings, has_drafter=isinstance(config, DecodeConfig), group=group, beat=beat)
    run_phases(loader.phases())
    gc.collect()
    gc.freeze()
    return loader.engine()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one rank until rank 0 ends it; returns the exit code."""
    role, placed, *flags = sys.argv[1:] if argv is None else argv
    place = msgspec.json.decode(placed, type=RankPlace)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(place.parent, signal.SIGKILL)
    config_type: type[WorkerConfig] = DecodeConfig if role == DecodeConfig.role else PrefillConfig
    config = load_config(config_type, flags, {}, warns=False)
    # with more than warnings, every line of the start would come once per rank
    level = "warning" if config.log_level == "info" else config.log_level
    configure(f"{role} rank {place.rank}", place.instance, level=level, log_format=config.log_format)
    reader = PlanReader(PlanRing.attach(place.ring, place.size - 1), place.rank - 1)
    try:
        engine = load_rank(config, place, reader.beat)
    except Exception as error:
        logger.error("cannot start: %s", error, exc_info=error if level == "debug" else None)
        return EXIT_CANNOT_START
    link = RankLink(config, engine, place.instance, socket.socket(fileno=place.link))
    link.start()
    try:
        code = RankProcess(engine, reader, place.wake).run()
    except Exception:
        logger.exception("crashed")
        return EXIT_CRASHED
    link.close()
    engine.leave_ranks()
    return code


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # no thread of a collective that cannot end keeps the process
