"""What a worker of several GPUs is asked, each in a process of its own.

torch keeps the store of a process group by its name for symmetric memory, and every group of a worker has the
same name: a second worker in one process would wait for ranks of the first.
"""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from baton.engine.parallel.rank_cards import VARIABLE, ranks_per_card
from baton.tests.parity.rank_cases import graphs_of
from baton.tests.parity.rank_plants import BUCKET, PLANTS
from baton.tests.parity.test_aggregated import answers_of, ask
from baton.tests.parity.tp_worker import tp_worker

SIZES = {"device": "cuda", "page_size": 16, "gpu_memory_share": 0.2, "pages": 160}


def share_cards(num_ranks: int, patch: pytest.MonkeyPatch) -> None:
    """Lets the ranks of workers of `num_ranks` share GPUs, as few on each as there are GPUs for."""
    patch.setenv(VARIABLE, str(-(-num_ranks // torch.cuda.device_count())))


def in_own_process(check: Callable[..., None], *args: object, **settings: object) -> None:
    """Calls `check` in a new process, which dies with an error here. AssertionError: what it raised."""
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(sending, check, args, settings))
    process.start()
    sending.close()
    try:
        fault = receiving.recv()
    except EOFError:
        process.join()
        raise AssertionError(f"the process of the check ended with exit code {process.exitcode}") from None
    finally:
        if process.is_alive():
            process.join(20)
        process.kill()
        process.join()
    assert not fault, fault


def _run(
    sending: Connection, check: Callable[..., None], args: tuple[object, ...], settings: dict[str, object]
) -> None:
    try:
        check(*args, **settings)
    except BaseException:
        sending.send(traceback.format_exc())
        raise
    sending.send("")


def check_answers(target: Path, draft: Path | None, tp: int, **settings: object) -> None:
    """Prompts that come together get the tokens of transformers, cold and cached."""
    answers = answers_of(target)
    with tp_worker(target, draft, tp, **{**SIZES, **settings}) as worker:
        if worker.engine.pool.device.type == "cuda":
            has_own_cards = ranks_per_card(os.environ) == 1
            small = worker.engine.group.small
            assert (small is not None) == has_own_cards, f"peer sums: {small}, own cards: {has_own_cards}"
        assert ask(worker, list(answers)) == list(answers.values())
        assert ask(worker, list(answers)) == list(answers.values()), "from cached prefixes"
        worker.engine.cache.allocator.check_integrity()
        assert worker.ranks is not None
        assert worker.ranks.size == tp


def check_plant(target: Path, head: Path, plant: str, **settings: object) -> None:
    """Both ranks drop what one cannot capture or finds wrong, and no token changes."""
    answers = answers_of(target)
    with PLANTS[plant](), tp_worker(target, head, 2, graphs="on", **{**SIZES, **settings}) as worker:
        has_graphs = any(BUCKET in sizes for sizes in graphs_of(worker.engine).values())
        assert has_graphs == (plant == "capture fails once")
        assert ask(worker, list(answers)) == list(answers.values())
