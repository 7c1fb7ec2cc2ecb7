"""Decode workers of several ranks, one after the other, over one process group.

Rank 0 is the process of the test. The other ranks are real processes of `python -m`, and each does what a
`RankProcess` does for one worker after the other: most of the time of a rank is its start.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import torch
from baton.cluster.config.load import load_config, to_argv
from baton.cluster.config.roles import DecodeConfig
from baton.cluster.process.process import EXIT_OK
from baton.decode.worker import DecodeWorker
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.loader import EngineLoader
from baton.engine.parallel.group import TensorGroup, join_group, leave_group
from baton.engine.parallel.plan_messages import LeavePlan, encode_plan
from baton.tests.parity.rank_plants import PLANTS
from baton.tests.parity.test_sampled_law import D, Ears
from baton.tests.parity.tp_worker import SIZES
from baton.worker.plan_ring import PlanReader, PlanRing, PlanWriter
from baton.worker.rank_process import RankProcess
from baton.worker.rank_processes import rank_environment

LIMIT_S = 60.0
CPU = torch.device("cpu")
NO_PLANTS: Mapping[int, str] = MappingProxyType({})


class RankCases:
    """Ranks 1 to `size` - 1 of workers that come one by one, on CPU in float32. Close it in the end.

    `limit_s`: the longest wait in a collective.
    """

    def __init__(self, size: int, limit_s: float = 10 * LIMIT_S) -> None:
        self.size = size
        ring, meeting = PlanRing.create(size - 1), os.memfd_create("baton-ranks")
        wakes = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(1, size)]
        self.children = [
            subprocess.Popen(
                [sys.executable, "-m", __name__, json.dumps([rank, size, ring.fd, wake, meeting, limit_s])],
                pass_fds=(ring.fd, wake, meeting),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=rank_environment(),
                text=True,
            )
            for rank, wake in enumerate(wakes, start=1)
        ]
        self._writer = PlanWriter(ring, wakes, limit_s=LIMIT_S)
        self._group = joined(meeting, 0, size, CPU, limit_s)

    @contextmanager
    def worker(
        self,
        target: Path,
        draft: Path | str = "",
        *,
        plants: Mapping[int, str] = NO_PLANTS,
        **settings: object,
    ) -> Iterator[DecodeWorker]:
        """An aggregated worker of all ranks. A failure inside ends the ranks. `plants`: faults of a start, by
        the rank that has one.
        """
        values: Mapping[str, object] = {"local_prefill_tokens": 16, **SIZES, **settings}
        config = DecodeConfig(
            model=str(target), draft=str(draft), aggregated=True, tp=self.size, threads=1, device="cpu",
            dtype="float32", **values,
        )  # fmt: skip
        for rank, child in enumerate(self.children, start=1):
            assert child.stdin is not None
            child.stdin.write(json.dumps([to_argv(config), plants.get(rank, "")]) + "\n")
            child.stdin.flush()
        try:
            with PLANTS[plants.get(0, "")]():
                engine = loaded(config, self._group)
            engine.tell = lambda plan: self._writer.send(encode_plan(plan))
            budget = engine.sizes.local_prefill_tokens
            worker = DecodeWorker(
                engine, Ears(), instance=D, max_running=config.max_running, local_prefill_tokens=budget
            )
            worker.local.budget_alone = worker.local.budget  # the same parts whether or not a stream runs
            yield worker
        except BaseException:
            self.kill()
            raise
        engine.tell(LeavePlan())

    def graphs(self) -> list[dict[str, list[int]]]:
        """The graphs of each other rank of the newest worker, as `graphs_of`; once for each worker."""
        return [json.loads(child.stdout.readline()) for child in self.children if child.stdout is not None]

    def kill(self) -> None:
        """Ends the ranks by force; no further worker starts."""
        for child in self.children:
            child.kill()

    def close(self) -> None:
        """Ends the ranks and the process group."""
        for child in self.children:
            child.communicate(timeout=LIMIT_S)
        leave_group(self._group)


def loaded(config: DecodeConfig, group: TensorGroup) -> Engine:
    """The engine of one rank."""
    loader = EngineLoader(EngineConfig.of(config), has_drafter=True, group=group)
    for _, run in loader.phases():
        run()
    return loader.engine()


def joined(meeting: int, rank: int, size: int, device: torch.device, limit_s: float) -> TensorGroup:
    """The process group of `size` ranks."""
    return join_group(Path(f"/proc/self/fd/{meeting}"), rank, size, device, timeout_s=limit_s)


def graphs_of(engine: Engine) -> dict[str, list[int]]:
    """The sizes that have a graph, by the kind of graph, its rows and its breaks."""
    found: dict[str, list[int]] = {}
    for kind in () if engine.graphs is None else engine.graphs.pool.kinds():
        for bucket, rows in zip(kind.buckets, kind.rows, strict=True):
            found.setdefault(f"{kind.kind} x {rows}, {kind.num_breaks} breaks", []).append(bucket)
    return found


def main() -> None:
    """One rank: a line of standard input has a worker's flags, and the name of a fault or ""."""
    rank, size, ring, wake, meeting, limit_s = json.loads(sys.argv[1])
    group = joined(meeting, rank, size, CPU, limit_s)
    reader = PlanReader(PlanRing.attach(ring, size - 1), rank - 1)
    for line in sys.stdin:
        flags, plant = json.loads(line)
        with PLANTS[plant]():
            engine = loaded(load_config(DecodeConfig, flags, {}, warns=False), group)
        print(json.dumps(graphs_of(engine)), flush=True)
        assert RankProcess(engine, reader, wake).run() == EXIT_OK
    leave_group(group)


if __name__ == "__main__":
    main()
