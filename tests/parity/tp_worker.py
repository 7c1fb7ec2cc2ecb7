"""An aggregated decode worker of several ranks: rank 0 is the process of the test, the others are real."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from baton.cluster.config.roles import DecodeConfig
from baton.decode.worker import DecodeWorker
from baton.engine.config import EngineConfig
from baton.engine.loader import EngineLoader, join_ranks
from baton.tests.parity.test_sampled_law import D, Ears
from baton.worker.ranks import Ranks

SIZES = {"page_size": 4, "pages": 160, "max_context": 96, "max_running": 6, "watchdog_s": 60.0}


@contextmanager
def tp_worker(target: Path, draft: Path | str | None, tp: int, **settings: object) -> Iterator[DecodeWorker]:
    """A worker of `tp` ranks, by default on CPU in float32. `worker.ranks` are the other ranks."""
    config = DecodeConfig(
        model=str(target), draft=str(draft or ""), aggregated=True, tp=tp, threads=1,
        **{"device": "cpu", "dtype": "float32", **SIZES, "local_prefill_tokens": 16, **settings},
    )  # fmt: skip
    ranks = Ranks.start(config, D)
    try:
        wanted = EngineConfig.of(config)
        group = join_ranks(ranks.meeting_path, 0, tp, wanted)
        loader = EngineLoader(wanted, has_drafter=True, group=group)
        for _, run in loader.phases():
            run()
        engine = loader.engine()
        ranks.lead(engine)
        worker = DecodeWorker(
            engine,
            Ears(),
            instance=D,
            max_running=config.max_running,
            local_prefill_tokens=engine.sizes.local_prefill_tokens,
        )
        worker.local.budget_alone = worker.local.budget  # the same parts whether or not a stream runs
        worker.ranks = ranks
        yield worker
        ranks.close()
        # on a GPU a graph with a collective would keep its rank from leaving the others
        assert not any(engine.graph_counts.values()), "a graph outlived the group of its ranks"
    finally:
        ranks.close(is_clean=False)
        assert [process.returncode for process in ranks.processes] == [0] * (tp - 1)
