"""A rank of two alone in its process: the other one is scripted, and collectives are imitated.

It must pad whatever it runs to what the other asks for, and a planted bug of padding must raise before a
collective is entered with the wrong number of rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from baton.cluster.config.roles import DecodeConfig
from baton.engine.engine import Engine
from baton.engine.errors import LifecycleError
from baton.engine.parallel import expert_rows
from baton.engine.parallel.group import TensorGroup
from baton.engine.parallel.lockstep import Turn
from baton.tests.parity.dp_cases import Asked, AskedWorker, asked_worker
from baton.tests.parity.dp_plants import PLANTS
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.rank_cases import loaded
from baton.tests.parity.toy_engine import random_ids

pytestmark = pytest.mark.usefixtures("one_thread")

MORE_ROWS, MORE_REQUESTS = 16, 4  # that the other rank asks for: sizes of graphs


class Imitated(TensorGroup):
    """Rank 0 of two, of which the other finds the same numbers."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x] * self.size, dim=1)

    def share(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def agree(self, is_so: bool) -> bool:
        return is_so


@dataclass
class Scripted:
    """The other rank: it wants MORE_ROWS rows of prompts, and MORE_REQUESTS in this rank's shape.

    `allowed`: the numbers of rows with which a layer may be entered in this turn. `prompts`: the rows of
    prompts that this rank wanted.
    """

    allowed: set[int] = field(default_factory=set)
    prompts: list[int] = field(default_factory=list)
    num_turns: int = 0
    is_called: bool = False

    def swap(self, turn: Turn, wish: Sequence[int]) -> list[list[int]]:
        self.num_turns += 1
        if turn is Turn.PROMPTS:
            other = [MORE_ROWS, 2]
            self.allowed = {max(wish[0], MORE_ROWS), max(wish[1], 2)}
            self.prompts += [wish[0]] if wish[0] else []
        else:
            other = [MORE_REQUESTS, *(wish[1:] if wish[0] else (1, 0, 1))]
            self.allowed = {max(wish[0], MORE_REQUESTS) * other[1]}
        return [list(wish), other]

    def rest(self) -> None:
        pass


@pytest.fixture(scope="module")
def target(toy_checkpoint: Callable[..., Path]) -> Path:
    return toy_checkpoint("qwen3_moe")


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head"), head_config(2, (0, 1, 2)), head_tensors())


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    """The other rank. A collective that is entered with rows of which it does not know fails the test."""
    scripted = Scripted()

    def gather(x: torch.Tensor, num_ranks: int, name: str) -> torch.Tensor:
        assert not scripted.num_turns or x.shape[0] in scripted.allowed, "the other rank would wait for ever"
        return torch.cat([x] * num_ranks)

    monkeypatch.setattr(expert_rows, "gather_rows", gather)
    monkeypatch.setattr(expert_rows, "scatter_sums", sums_of_equal_ranks)
    return scripted


def sums_of_equal_ranks(x: torch.Tensor, num_ranks: int, name: str) -> torch.Tensor:
    return x[: x.shape[0] // num_ranks] * num_ranks


def settings_of(target: Path, head: Path, graphs: str) -> DecodeConfig:
    return DecodeConfig(
        model=str(target), draft=str(head), aggregated=True, dp_attention=2, ep=True, threads=1, device="cpu",
        dtype="float32", local_prefill_tokens=16, graphs=graphs, graph_self_test=False, page_size=4,
        pages=200, max_context=96, max_running=8,
    )  # fmt: skip


@pytest.fixture(scope="module")
def engines(target: Path, head: Path) -> dict[str, Engine]:
    """One for each kind of steps: most of the time of a rank is its start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_rows, "gather_rows", lambda x, num_ranks, name: torch.cat([x] * num_ranks))
        patch.setattr(expert_rows, "scatter_sums", sums_of_equal_ranks)
        group = Imitated(rank=0, size=2)
        return {graphs: loaded(settings_of(target, head, graphs), group) for graphs in ("off", "on")}


@pytest.fixture
def worker(
    target: Path, head: Path, engines: dict[str, Engine], other: Scripted, request: pytest.FixtureRequest
) -> AskedWorker:
    graphs = request.param
    return asked_worker(engines[graphs], settings_of(target, head, graphs), other)


def serve(worker: AskedWorker) -> None:
    worker.ask([Asked(tuple(random_ids(length, seed=length)), 5, at) for length, at in ((5, 0), (21, 1))])
    while not worker.is_done:
        worker.step()
    assert [len(tokens) for tokens in worker.said()] == [5, 5]


@pytest.mark.parametrize("worker", ["off", "on"], indirect=True)
def test_all_forwards_have_the_rows_that_another_rank_asks_for(worker: AskedWorker, other: Scripted):
    serve(worker)
    assert other.num_turns == 2 * worker.rounds.num_rounds > 6


@pytest.mark.parametrize("worker", ["off"], indirect=True)
def test_prompts_are_cut_while_another_rank_has_streams(worker: AskedWorker, other: Scripted):
    worker.worker.local.budget_alone = 64
    serve(worker)  # from here on this rank has seen requests of the other
    other.prompts.clear()
    worker.ask([Asked(tuple(random_ids(50, seed=50)), 2)])
    while not worker.is_done:
        worker.step()
    assert other.prompts == [16, 16, 16, 2], "as beside streams of its own"


FAILS = {
    "off": ("plans before padding", "pads no prompts", "pads no steps", "drops a request"),
    "on": ("pads no prompts", "pads no steps", "takes another graph"),
}


@pytest.mark.parametrize(
    ("worker", "plant"),
    [(graphs, plant) for graphs, plants in FAILS.items() for plant in plants],
    indirect=["worker"],
)
def test_a_planted_bug_of_padding_raises_before_the_collective(worker: AskedWorker, plant: str):
    undo = PLANTS[plant]()
    try:
        with pytest.raises(LifecycleError, match=r"agreed on|planned for"):
            serve(worker)
    finally:
        undo()
