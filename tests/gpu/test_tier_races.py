"""Races between forwards, copies of tiers and the reuse of pages would show here: copies end late.

A kernel that only waits stands before each copy on its stream, and now and then before the work of the
compute stream. Meanwhile the worker serves others, evicts pages and gives them to new requests. Free pages
are filled with NaN behind the work that used them, so a page that is copied too early or too late brings NaN
or foreign rows into an answer.
"""

import random
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from baton.cluster.protocol.messages import Failed, Finished, Reserve, Sampling, Tokens
from baton.decode.worker import DecodeWorker
from baton.engine.kv.page_order import PageOrder
from baton.engine.kv.pool import PageAllocator
from baton.engine.kv.tiers.cuda_page_copies import CudaPageCopies, _Lane
from baton.engine.kv.tiers.host_slab import HostSlab
from baton.engine.kv.tiers.jobs import PageMove, Save
from baton.engine.kv.tiers.tier_threads import TierThreads
from baton.engine.speculative.drafters.protocol import draft_pools
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.test_sampled_law import D
from baton.tests.parity.toy_engine import random_ids
from baton.tests.sim.tiered_decode import decode_worker, settled, turns

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CYCLES = 20_000_000  # some 10 ms of a kernel that only waits
CHATS, ROUNDS, AT_ONCE, ANSWER = 8, 3, 4, 6
HOST, DISK = 3 << 20, 64 << 20


def wait_a_while(rng: random.Random, most: int = CYCLES) -> None:
    """Keeps the current stream busy."""
    if torch.cuda.is_available():
        torch.cuda._sleep(rng.randrange(1, most))


class LateCopies(CudaPageCopies):
    """Copies that begin late on their streams, by `rng`."""

    rng = random.Random(1)

    @contextmanager
    def _copying(self, lane: _Lane, moves: Sequence[PageMove]) -> Iterator[None]:
        with torch.cuda.stream(lane.stream):
            wait_a_while(self.rng)
        with super()._copying(lane, moves):
            yield


class PoisonedPages(PageAllocator):
    """Free pages hold NaN, written on the stream of the forwards."""

    planes: Sequence[torch.Tensor] = ()

    def release(self, pages: Iterable[int], *, is_used: bool = True) -> None:
        pages = list(pages)
        super().release(pages, is_used=is_used)
        freed = [page for page in pages if not self.refs(page)]
        for plane in self.planes if freed else ():
            plane[freed] = float("nan")
        if freed and self._order is not None:
            self._order.stamp(freed)  # the fills are work of the owners that left


def watched(worker: DecodeWorker) -> None:
    """The worker's free pages hold NaN from now on."""
    engine = worker.engine
    allocator = engine.cache.allocator
    allocator.__class__ = PoisonedPages
    pools = [engine.pool, *draft_pools(engine.drafter)]
    allocator.planes = [pool.kv for pool in pools]  # type: ignore[attr-defined]
    free = [page for page in range(1, allocator.num_pages) if not allocator.refs(page)]
    for plane in allocator.planes:  # type: ignore[attr-defined]
        plane[free] = float("nan")


def crowd(worker: DecodeWorker, seed: int) -> list[list[int]]:
    """The answers of conversations of which AT_ONCE are asked at the same time, round for round."""
    rng = random.Random(seed)
    texts = [random_ids(60 + 5 * chat, seed=100 * seed + chat) for chat in range(CHATS)]
    said: list[list[int]] = []
    for _ in range(ROUNDS):
        for first in range(0, CHATS, AT_ONCE):
            chats = range(first, first + AT_ONCE)
            rooms = [secrets.token_hex(16) for _ in chats]
            for room, chat in zip(rooms, chats, strict=True):
                wait_a_while(rng)  # the device is behind the host
                sampling = Sampling(temperature=0.0, max_new_tokens=ANSWER, ignore_eos=True)
                worker.handle(
                    Reserve(
                        room=room, epoch=0, instance=D, prompt_ids=texts[chat], sampling=sampling,
                        deadline_ms=0,
                    ),
                    now=0.0,
                )  # fmt: skip
                worker.step()
            turns(worker, lambda: worker.num_rooms == 0)
            answers = _taken(worker, rooms)
            for chat, answer in zip(chats, answers, strict=True):
                texts[chat] = texts[chat] + answer + [5, 6, 7 + chat]
            said += answers
    return said


def _taken(worker: DecodeWorker, rooms: list[str]) -> list[list[int]]:
    heard = list(worker.link.heard)  # type: ignore[attr-defined]
    worker.link.heard.clear()  # type: ignore[attr-defined]
    failed = [message for message in heard if isinstance(message, Failed)]
    assert not failed, failed
    assert sum(isinstance(message, Finished) for message in heard) == len(rooms)
    items = [item for message in heard if isinstance(message, Tokens) for item in message.items]
    return [[token for item in items if item.room == room for token in item.ids] for room in rooms]


@pytest.fixture
def late() -> Iterator[None]:
    with patch("baton.worker.tier_startup.CudaPageCopies", LateCopies):
        yield


@pytest.fixture
def models(toy_checkpoint: Callable[..., Path], tmp_path: Path) -> SimpleNamespace:
    torch.backends.cuda.matmul.allow_tf32 = False
    head = write_head(tmp_path / "head", head_config(2, (0, 1, 3)), head_tensors())
    return SimpleNamespace(target=toy_checkpoint("llama", num_hidden_layers=4), head=head)


def told(models: SimpleNamespace, seed: int, *, drafts: bool, overlap: str, device: str = "cuda") -> list:
    """The answers without tiers, from an ample pool."""
    head = models.head if drafts else None
    return crowd(decode_worker(models.target, head, device, pages=200, overlap=overlap), seed)


@pytest.mark.parametrize("has_disk", [False, True])
@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.usefixtures("late")
def test_late_copies_change_no_answer(
    models: SimpleNamespace, tmp_path: Path, drafts: bool, overlap: str, has_disk: bool
) -> None:
    head = models.head if drafts else None
    tiers = (HOST // 8, tmp_path / "disk", DISK) if has_disk else (HOST, "", 0)
    worker = decode_worker(models.target, head, "cuda", pages=38, tiers=tiers, overlap=overlap)
    watched(worker)
    settled(worker)
    for seed in range(3):
        expected = told(models, seed, drafts=drafts, overlap=overlap)
        assert crowd(worker, seed) == expected, f"seed {seed}, {worker.tiers.counters}"
        worker.tiers.tiers.check_integrity()
    counters = worker.tiers.counters
    assert counters["disk_hit_tokens" if has_disk else "host_hit_tokens"] > 200, counters
    assert counters["host_bad_pages"] == counters["disk_bad_pages"] == 0, counters
    worker.tiers.close()


def test_slabs_come_and_go_and_each_is_registered() -> None:
    device = torch.device("cuda")
    for _ in range(20):
        slab = HostSlab(8, 1 << 20, device)
        assert slab.is_pinned, "an earlier registration did not end"
        del slab


def test_threads_that_end_leave_no_copy_into_memory_that_is_gone() -> None:
    device, num_pages, page_bytes = torch.device("cuda"), 24, 1 << 20
    plane = torch.randint(0, 256, (num_pages, page_bytes), dtype=torch.uint8, device=device)
    order = PageOrder(num_pages, device)
    for _ in range(3):
        slab = HostSlab(8, page_bytes, device)
        threads = TierThreads(LateCopies([plane], slab, order))
        moves = tuple(PageMove(key=bytes(32), slot=n, page=n + 1) for n in range(8))
        threads.submit(Save(number=1, moves=moves))
        threads.close()
        ended = threads.results()
        assert len(ended) == 1, "close waits for the copy under way"
        assert (torch.from_numpy(slab.slots[:, :page_bytes]) == plane[1:9].cpu()).all()
        del threads, slab
